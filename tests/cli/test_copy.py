"""``kvformat copy``, and options of object stores on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import kvformat
from kvformat.cli.copy import Watch
from kvformat.cli.options import parse_storage_options
from kvformat.cli.progress import Bar, Lines
from kvformat.errors import UsageError
from tests.cli.conftest import command, environment
from tests.cli.datasets import flip, write
from tests.cli.sharing import saved_plan


def test_a_copy(run, published: Path, tmp_path: Path, snapshot) -> None:
    result = run("copy", published, tmp_path / "[red]copy")
    assert result.code == 0
    assert snapshot(tmp_path / "[red]copy") == snapshot(published)
    first, identity, size, rate = result.stdout.splitlines()
    nbytes = sum(map(len, snapshot(published).values()))
    assert first == f"copied: {tmp_path}/[red]copy"
    assert identity == f"    id {kvformat.open(published).id}"
    assert size == f"    4 records, {nbytes / 1000:.3g} kB in all files"
    assert rate.startswith(f"    copied {nbytes / 1000:.3g} kB in ")
    assert rate.endswith("/s")


def test_the_same_as_json(run, published: Path, tmp_path: Path, snapshot) -> None:
    shards = {name: data for name, data in snapshot(published).items() if name.startswith("shards/")}
    for name, data in shards.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    nbytes = sum(map(len, snapshot(published).values()))
    there = sum(map(len, shards.values()))
    found = run("copy", published, f"file://{tmp_path}/copy", "--json", "--threads", 1).json
    assert found.pop("seconds") > 0
    assert found == {
        "ok": True,
        "id": kvformat.open(published).id,
        "location": str(tmp_path / "copy"),
        "records": 4,
        "nbytes": nbytes,
        "copied_nbytes": nbytes - there,
        "skipped_nbytes": there,
        "already_there": False,
    }
    assert snapshot(tmp_path / "copy") == snapshot(published)


def test_what_was_there_before_is_said(run, published: Path, tmp_path: Path, snapshot) -> None:
    for name, data in snapshot(published).items():
        if name.startswith("shards/"):
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / name).write_bytes(data)
    shown = run("copy", published, tmp_path / "copy").stdout
    assert shown.splitlines()[-1].endswith("/s, 45.1 kB there before")
    result = run("copy", published, tmp_path / "copy")
    assert result.code == 0
    assert result.stdout.startswith(f"already there: {tmp_path}/copy\n")
    assert "verified at level 2" in result.stdout
    assert run("copy", published, tmp_path / "copy", "--json").json["already_there"] is True


def test_errors_leave_with_their_codes(run, published: Path, dataset: Path, tmp_path: Path) -> None:
    shard = next((dataset / "shards").rglob("*.safetensors"))
    flip(shard, -1)
    other = write(tmp_path / "other", first=5)
    for source, target, code, path in (
        (tmp_path / "nothing", tmp_path / "copy", "E001", tmp_path / "nothing" / "kvformat.json"),
        (dataset, tmp_path / "copy", "E077", shard),
        (published, other, "E100", other / "kvformat.json"),
    ):
        result = run("copy", source, target, "--json")
        assert result.code == 3
        assert (result.json["ok"], result.json["error"]["code"]) == (False, code)
        assert result.json["error"]["path"] == str(path)
        assert f"error [{code}]: " in result.stderr


@pytest.mark.parametrize("args", [["--threads", "0"], ["--threads", "x"], ["--storage-option", "secret"]])
def test_usage_errors(run, published: Path, tmp_path: Path, args: list[str]) -> None:
    result = run("copy", published, tmp_path / "copy", *args)
    assert (result.code, result.stdout) == (2, "")
    assert "error [E081]: " in result.stderr
    assert not (tmp_path / "copy").exists()


def test_an_interrupt_says_how_to_go_on(run, monkeypatch, published: Path, tmp_path: Path, snapshot) -> None:
    def stop(self: Watch, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "__call__", stop)
        result = run("copy", published, tmp_path / "copy", "--json")
    assert result.code == 130
    assert result.stderr == (
        "interrupted: stopped on request: files that are in their places stay, and the same command goes on from "
        "there\n"
    )
    assert result.json["error"]["code"] == "interrupted"
    assert not (tmp_path / "copy" / "kvformat.json").exists()
    found = run("copy", published, tmp_path / "copy", "--json").json
    assert found["skipped_nbytes"] > 0
    assert snapshot(tmp_path / "copy") == snapshot(published)


SLOW = """
import os, sys
from kvformat.cli import copy

class Told(copy.Watch):
    def __call__(self, done, total):
        super().__call__(done, total)
        os.write(int(os.environ["PIPE"]), b".")

copy.Watch = Told
from kvformat.cli.main import main
sys.argv[0] = "kvformat"
main()
"""


def test_ctrl_c_in_a_process_of_its_own(tmp_path: Path, published: Path, snapshot) -> None:
    """The signal comes while files are under way: the pipe that progress is written to is full."""
    read, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, bytes(1 << 16))
    except BlockingIOError:
        os.set_blocking(write_end, True)
    started = command([])
    process = subprocess.Popen(
        [started[0], "-c", SLOW, "copy", str(published), str(tmp_path / "copy"), "--json", "--threads", "1"],
        env={**environment(), "PIPE": str(write_end)},
        pass_fds=[write_end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    while not (tmp_path / "copy" / ".staging").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    while os.read(read, 1 << 16):
        pass
    os.close(read)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.startswith("interrupted: stopped on request: ")
    assert json.loads(stdout)["error"]["code"] == "interrupted"
    left = snapshot(tmp_path)
    assert not [name for name in left if ".staging" in name or name.endswith("kvformat.json")]


# ----------------------------------------------------------------------------------------------------------- progress


def test_progress_has_a_rate_and_the_time_left(capsys) -> None:
    now = [0.0]
    with Lines(clock=lambda: now[0], phases=False) as lines:
        watch = Watch(lines, clock=lambda: now[0])
        now[0] = 10.0
        watch(1_000_000, 8_500_000)
        now[0] = 20.0
        watch(2_000_000, 1_000_000_000)
        now[0] = 25.0
        watch(0, 1)
    assert watch.seconds == 25
    assert capsys.readouterr().err == (
        "copying: 1 MB of 8.5 MB, 11 %, 100 kB/s, 1:15 left\ncopying: 2 MB of 1 GB, 0 %, 100 kB/s, 2:46:20 left\n"
    )


def test_a_bar_shows_the_time_by_itself(monkeypatch) -> None:
    notes = []
    monkeypatch.setattr(Bar, "update", lambda _self, _done, *, total, note: notes.append(note))
    now = [0.0]
    with Bar() as bar:
        watch = Watch(bar, clock=lambda: now[0])
        now[0] = 2.0
        watch(1000, 2000)
    assert notes == ["500 bytes/s"]


# ------------------------------------------------------------------------------------------------------------ options


def test_storage_options_are_json_where_they_are_numbers_truths_and_objects() -> None:
    given = [
        "a=1",
        "b=true",
        "c=http://host:1/x=y",
        'd={"region_name": "x"}',
        "e=1.5",
        "f=[1]",
        'g="x"',
        "h=",
        "i=null",
    ]
    assert parse_storage_options(given, "--storage-option") == {
        "a": 1,
        "b": True,
        "c": "http://host:1/x=y",
        "d": {"region_name": "x"},
        "e": "1.5",
        "f": "[1]",
        "g": '"x"',
        "h": "",
        "i": "null",
    }
    assert parse_storage_options(None, "--storage-option") == {}
    assert parse_storage_options([f"deep={'[' * 100_000}"], "x")["deep"] == "[" * 100_000


@pytest.mark.parametrize("given", [["hush"], ["=hush"], ["a=1", "a=hush"]])
def test_what_may_be_a_secret_is_not_repeated(given: list[str]) -> None:
    with pytest.raises(UsageError, match="E081") as caught:
        parse_storage_options(given, "--source-option")
    assert "hush" not in str(caught.value)
    assert "--source-option" in str(caught.value)


def test_what_a_killed_copy_left_is_named_and_cleaned(run, published: Path, tmp_path: Path) -> None:
    identity = kvformat.open(published).id
    left = tmp_path / "copy" / ".staging" / f"copy-{identity[:16]}"
    left.mkdir(parents=True)
    (left / "00000000-0123456789abcdef.safetensors.0a0b0c0d.part").write_bytes(bytes(5000))
    lines = run("status", tmp_path / "copy").stdout.splitlines()
    assert f"    a copy of dataset {identity[:16]}, 5 kB; copy again to go on" in lines
    assert not any("not a staging directory" in line for line in lines)
    assert run("clean", tmp_path / "copy", "--yes").code == 0
    assert not (tmp_path / "copy" / ".staging").exists()


def test_nothing_is_copied_into_a_plan_or_over_a_documents_file(run, dataset: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    saved_plan(plan)
    before = sorted(plan.iterdir())
    for target in (plan, plan / "x", tmp_path / "d.kvdocs", f"file://{plan}/x"):
        result = run("copy", dataset, target)
        assert (result.code, "error [E081]" in result.stderr) == (2, True)
        assert "choose another location for" in result.stderr
    assert (sorted(plan.iterdir()), (tmp_path / "d.kvdocs").exists()) == (before, False)
