"""Shared leases, and files that tell whether whoever wrote them lives."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage import lease
from kvformat.storage.lease import DirectoryLease, HeldFile, is_held

REPOSITORY = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from kvformat.storage.lease import HeldFile
held = HeldFile(Path(sys.argv[1]))
held.replace(b"first")
held.replace(b"second")
print("held", flush=True)
sys.stdin.read()
"""


def test_any_number_share_and_nobody_else_has_it_alone(tmp_path: Path) -> None:
    first = DirectoryLease.take(tmp_path, shared=True)
    second = DirectoryLease.take(tmp_path, shared=True)
    assert first is not None
    assert second is not None
    assert first.supported
    assert DirectoryLease.take(tmp_path) is None
    first.release()
    assert DirectoryLease.take(tmp_path) is None
    second.release()
    alone = DirectoryLease.take(tmp_path)
    assert alone is not None
    assert DirectoryLease.take(tmp_path, shared=True) is None
    alone.release()


def test_a_lease_is_of_the_directory_it_was_taken_on(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir()
    taken = DirectoryLease.take(path)
    assert taken is not None
    assert taken.holds(path)
    path.rmdir()
    assert not taken.holds(path)
    path.mkdir()
    assert not taken.holds(path)
    taken.release()
    assert not taken.holds(path)


def test_a_file_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "state"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        assert path.read_bytes() == b"second"
        assert is_held(path) is True
    finally:
        holder.kill()
        holder.wait(timeout=60)
        holder.stdin.close()
        holder.stdout.close()
    assert is_held(path) is False
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_never_seems_free(tmp_path: Path) -> None:
    held = HeldFile(tmp_path / "state")
    held.replace(b"0")
    over = threading.Event()

    def replace() -> None:
        while not over.is_set():
            held.replace(b"1")

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert all(is_held(held.path) for _ in range(3000))
    finally:
        over.set()
        thread.join()
    held.remove()
    held.remove()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KVFormatError, match="E002"):
        is_held(held.path)


def test_a_file_that_cannot_be_replaced_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldFile(tmp_path / "state")
    held.replace(b"0")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lease.os, "pwrite", full)
    with pytest.raises(KVFormatError, match="E200"):
        held.replace(b"1")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"state": b"0"}
    assert is_held(held.path) is True
    held.remove()
    with pytest.raises(KVFormatError, match="E002"):
        HeldFile(tmp_path / "none" / "state").replace(b"")


def test_where_there_are_no_locks_nobody_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    held = HeldFile(tmp_path / "state")
    held.replace(b"0")
    assert is_held(held.path) is None
    held.remove()
