"""The README's quickstart and commands run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvformat
from kvformat.cli.app import app
from tests.models import save_tiny, write_documents


def blocks(repository: Path) -> list[str]:
    """The README's Python, block by block."""
    return re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def python(program: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=directory,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(repository: Path, tmp_path: Path) -> None:
    start, more, *_ = blocks(repository)
    assert len(start.splitlines()) <= 22
    checks = """
assert nbytes == ds["clip-1"].component("k").nbytes * 2
assert torch.equal(tensors["v"], ds["clip-1"].component("v"))
assert same.names == ["clip-1"]
"""
    python(start + more + checks, tmp_path)
    assert (tmp_path / "out" / "quickstart" / "kvformat.json").is_file()


def test_training_loop(repository: Path, tmp_path: Path) -> None:
    """Stopped after each batch, it goes on as if it had not been."""
    start, _, train, ways, *_ = blocks(repository)
    python(start, tmp_path)
    whole = python(train + "print('weights', model.query.sum().item())\n" + ways, tmp_path)
    lines = [line.rpartition(" ")[0] for line in whole.splitlines()]  # without the time waited
    assert len(lines) == 7  # 3 epochs of 2 batches, and the weights
    (tmp_path / "out" / "checkpoint.pt").unlink()
    stopping = train.replace("        print(", "        raise SystemExit(print(")
    stopping = stopping.replace("loader.stats().wait_s)", "loader.stats().wait_s))")
    assert stopping != train
    found = []
    for _ in range(6):
        found += [line.rpartition(" ")[0] for line in python(stopping, tmp_path).splitlines()]
    assert found == lines[:6]
    end = python(train + "print('weights', model.query.sum().item())", tmp_path)
    assert end.splitlines() == [whole.splitlines()[-1]]


def test_object_stores(repository: Path, seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, _, _, _, remote, _ = blocks(repository)
    python(start, tmp_path)
    options = seaweed.storage_options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_REGION", options["client_kwargs"]["region_name"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    url = f"{seaweed.bucket()}/quickstart"
    for transport in ("auto", "fsspec"):
        program = remote.replace("s3://bucket/quickstart", f"{url}-{transport}").replace(
            "out/back", f"out/{transport}"
        )
        if transport == "fsspec":
            program = "import sys\nsys.modules['obstore'] = None\n" + program
        python(program, tmp_path)
        assert (tmp_path / "out" / transport / "kvformat.json").is_file()


def shell(program: str, directory: Path, **more: str) -> None:
    """Run a program of the README with the commands of this environment, on a CPU and with few processes."""
    for given, small in (("DIR_OR_ID", "model"), ("--nproc-per-node 8", "--nproc-per-node 2"), ("--device cuda", "")):
        program = program.replace(given, small)
    program = program.replace("--ray-gpus 1", "--ray-workers 2")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        cwd=directory,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **more,
        },
        timeout=250,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_extraction_at_scale(repository: Path, tmp_path: Path) -> None:
    """One process, torchrun, a Slurm array and Ray make one dataset."""
    *_, captions = blocks(repository)
    python(captions, tmp_path)
    text = (repository / "README.md").read_text(encoding="utf-8")
    single, torchrun, slurm, ray = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    save_tiny(tmp_path / "model", "llama", max_position_embeddings=64)
    lines = [{"id": f"{number}", "text": f"text {number % 40}"} for number in range(50)]
    write_documents(tmp_path / "docs.jsonl", lines)
    shell(single.replace("--batch-size 8", "--batch-size 8 --shard-size 24K"), tmp_path)
    shell(torchrun, tmp_path)
    for task in (1, 0):
        shell(slurm, tmp_path, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT="2")
    shell(ray, tmp_path)
    found = {kvformat.open(tmp_path / "out" / name).id for name in ("scale", "torchrun", "slurm", "ray")}
    assert len(found) == 1
    assert kvformat.open(tmp_path / "out" / "scale").manifest.totals.shards > 2


def test_commands(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8").partition("## Training on it")[0]
    lines = re.findall(r"^kvformat (.*?) +# ", text, re.MULTILINE)
    commands = [line.replace("DIR_OR_ID", "model").split() for line in lines]
    names = ["estimate", "extract", "inspect", "verify", "diff", "status", "clean", "copy"]
    assert [command[0] for command in commands] == names
    save_tiny(tmp_path / "model", "llama")
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text('{"id": "a", "text": "..."}\n', encoding="utf-8")
    for command in commands:
        if command[0] == "diff":
            for copy in ("out/a", "out/b"):
                shutil.copytree("out/ds", copy)
        done = CliRunner().invoke(app, command, prog_name="kvformat")
        assert done.exit_code == 0, (command, done.output)
