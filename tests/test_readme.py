"""The README's quickstart and commands run as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvformat.cli.app import app
from tests.models import save_tiny


def test_quickstart(repository: Path, tmp_path: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    start, more = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(start.splitlines()) <= 22
    checks = """
assert nbytes == ds["clip-1"].component("k").nbytes * 2
assert torch.equal(tensors["v"], ds["clip-1"].component("v"))
assert same.names == ["clip-1"]
"""
    subprocess.run([sys.executable, "-c", start + more + checks], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "out" / "quickstart" / "kvformat.json").is_file()


def test_commands(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"^kvformat (.*?) +# ", (repository / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [line.replace("DIR_OR_ID", "model").split() for line in lines]
    names = ["estimate", "extract", "inspect", "verify", "diff", "status", "clean"]
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
