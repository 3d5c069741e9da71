from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvformat.extract.documents import DocumentsWriter, open_documents, part_file
from kvformat.extract.documents.part_file import create_part, remove_leftovers
from kvformat.spec.document import Document
from kvformat.storage.local_write import LocalFiles

WRITING = """
import sys
from kvformat.extract.documents import DocumentsWriter
from kvformat.spec.document import Document

writer = DocumentsWriter(sys.argv[1])
writer.add("a", Document.of([1, 2, 3] * 200_000))  # more than is buffered
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_writer_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing a documents file."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


def write(path: Path, *ids: int) -> None:
    with DocumentsWriter(path) as writer:
        writer.add("a", Document.of(ids))
        writer.finish()


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.part"))


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    target = tmp_path / "docs.kvdocs"
    with a_writer_elsewhere(target) as process:
        (part,) = parts(tmp_path)
        assert part.stat().st_size > 1 << 20
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert parts(tmp_path) == [part]
    write(target, 5, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["docs.kvdocs"]
    assert open_documents(target).document(0).token_ids.tolist() == [5, 6]


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    target = tmp_path / "docs.kvdocs"
    with a_writer_elsewhere(target) as process:
        (held,) = parts(tmp_path)
        write(target, 5, 6)
        assert parts(tmp_path) == [held]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    write(tmp_path / "other.kvdocs", 5, 6)
    assert parts(tmp_path) == [held]  # of another name
    write(target, 5, 6)
    assert parts(tmp_path) == []


def test_what_this_process_is_writing_stays(tmp_path: Path) -> None:
    target = tmp_path / "docs.kvdocs"
    with DocumentsWriter(target) as first:
        first.add("a", Document.of([1]))
        with DocumentsWriter(target) as second:
            assert len(parts(tmp_path)) == 2
            second.add("a", Document.of([1]))
            second.finish()
        first.finish()
    assert parts(tmp_path) == []


def test_only_parts_of_the_very_name_are_removed(tmp_path: Path) -> None:
    kept = {".a.kvdocs.0123456789abcdef.part.bak", ".a.kvdocs.xyz.part", ".axkvdocs.0123456789abcdef.part", "a.part"}
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    link = tmp_path / ".a.kvdocs.fedcba9876543210.part"
    link.symlink_to(tmp_path / "a.part")
    folder = tmp_path / ".a.kvdocs.aaaaaaaaaaaaaaaa.part"
    folder.mkdir()
    left = tmp_path / ".a.kvdocs.0123456789abcdef.part"
    left.write_bytes(b"half")
    remove_leftovers(LocalFiles(), tmp_path / "a.kvdocs")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, link.name, folder.name}


def test_where_locks_may_reach_no_further_than_one_machine_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".a.kvdocs.0123456789abcdef.part"
    left.write_bytes(b"half")
    monkeypatch.setattr(part_file, "prefers_pread", lambda _: True)
    remove_leftovers(LocalFiles(), tmp_path / "a.kvdocs")
    assert left.exists()


def test_without_locks_nothing_is_removed_and_writing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".a.kvdocs.0123456789abcdef.part"
    left.write_bytes(b"half")

    def unsupported(fd: int, how: int) -> None:
        raise OSError(38, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    write(tmp_path / "a.kvdocs", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "a.kvdocs"]


def test_a_part_that_was_taken_for_a_leftover_before_it_was_held_is_made_again(tmp_path: Path) -> None:
    target = tmp_path / "a.kvdocs"

    class Swept(LocalFiles):
        made = 0

        def create(self, path: Path) -> int:
            fd = super().create(path)
            self.made += 1
            if self.made == 1:
                remove_leftovers(LocalFiles(), target)
            return fd

    files = Swept()
    path, fd = create_part(files, target)
    with closing(os.fdopen(fd, "rb")):
        assert files.made == 2
        assert parts(tmp_path) == [path]
        remove_leftovers(LocalFiles(), target)
        assert parts(tmp_path) == [path]
