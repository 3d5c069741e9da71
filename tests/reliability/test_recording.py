"""The recorder and what it says a crash leaves: against hand-made sequences, and against the real disk."""

from __future__ import annotations

import os
import random
import threading

import pytest

from kvformat.testing.recording import MODES, Operation, RecordingFiles, existing, replay, tear
from tests.reliability import small


def content(directory):
    return {
        path.relative_to(directory).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in directory.rglob("*")
    }


def links(directory):
    """Names by file, so that two names of one file are told from two equal files."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            found.setdefault(path.stat().st_ino, set()).add(path.relative_to(directory).as_posix())
    return sorted(map(sorted, found.values()))


def left(operations, mode, tmp_path, **options):
    target = tmp_path / f"left-{mode}-{len(list(tmp_path.iterdir()))}"
    replay(operations, target, mode, **options)
    return content(target)


def record(tmp_path, steps):
    """Operations of ``steps(files, base)``."""
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)
    steps(files, base)
    return files.operations


def write_two(files, base):
    files.make_dir(base / "d")
    fd = files.create(base / "d" / "a")
    files.write(fd, [b"one", b"two"], 0, base / "d" / "a")
    files.sync(fd, base / "d" / "a")
    files.write(fd, [b"more"], 6, base / "d" / "a")
    os.close(fd)
    files.create_file(base / "d" / "b", b"bb")
    files.sync_dir(base / "d")


def test_operations_are_listed_with_their_data(tmp_path):
    assert record(tmp_path, write_two) == (
        Operation(kind="make_dir", path="d"),
        Operation(kind="create", path="d/a", file=0),
        Operation(kind="write", path="d/a", file=0, data=b"onetwo"),
        Operation(kind="sync", path="d/a", file=0),
        Operation(kind="write", path="d/a", file=0, offset=6, data=b"more"),
        Operation(kind="create", path="d/b", file=1),
        Operation(kind="write", path="d/b", file=1, data=b"bb"),
        Operation(kind="sync", path="d/b", file=1),
        Operation(kind="sync_dir", path="d"),
    )


def test_what_changes_nothing_is_not_listed(tmp_path):
    def steps(files, base):
        files.make_dir(base / "d")
        assert not files.make_dir(base / "d")
        files.create_file(base / "d" / "a", b"")
        assert files.link(base / "d" / "a", base / "b")
        assert not files.link(base / "d" / "a", base / "b")
        files.unlink(base / "none")
        assert not files.remove_dir(base / "d")
        assert not files.remove_dir(base / "none")

    kinds = [operation.kind for operation in record(tmp_path, steps)]
    assert kinds == ["make_dir", "create", "write", "sync", "link"]


def test_a_change_elsewhere_is_refused(tmp_path):
    (tmp_path / "base").mkdir()
    with pytest.raises(ValueError, match="elsewhere"):
        RecordingFiles(tmp_path / "base").make_dir(tmp_path / "elsewhere")


def test_an_unsynced_directory_keeps_no_entries(tmp_path):
    operations = record(tmp_path, write_two)
    assert left(operations, "synced", tmp_path) == {}
    assert left([*operations, Operation(kind="sync_dir", path=".")], "synced", tmp_path) == {
        "d": None,
        "d/a": b"onetwo",
        "d/b": b"bb",
    }


def test_an_unsynced_file_is_empty_zeros_or_whole(tmp_path):
    def steps(files, base):
        fd = files.create(base / "a")
        files.write(fd, [b"123"], 2, base / "a")
        os.close(fd)
        files.sync_dir(base)

    operations = record(tmp_path, steps)
    assert left(operations, "synced", tmp_path) == {"a": b""}
    assert left(operations, "journalled", tmp_path) == {"a": b"\0\0\0\0\0"}
    assert left(operations, "killed", tmp_path) == {"a": b"\0\x00123"}


def test_a_synced_part_survives_where_the_rest_is_zeros(tmp_path):
    operations = [*record(tmp_path, write_two), Operation(kind="sync_dir", path=".")]
    assert left(operations, "journalled", tmp_path)["d/a"] == b"onetwo\0\0\0\0"
    assert left(operations, "killed", tmp_path)["d/a"] == b"onetwomore"


def test_a_file_survives_by_either_name(tmp_path):
    def steps(files, base):
        files.make_dir(base / "d")
        files.make_dir(base / "e")
        files.sync_dir(base)
        files.create_file(base / "d" / "a", b"aa")
        files.link(base / "d" / "a", base / "e" / "b")
        files.sync_dir(base / "e")
        files.unlink(base / "d" / "a")

    operations = record(tmp_path, steps)
    assert left(operations, "synced", tmp_path) == {"d": None, "e": None, "e/b": b"aa"}


def test_a_removal_that_was_not_synced_comes_back(tmp_path):
    def steps(files, base):
        files.make_dir(base / "d")
        files.create_file(base / "d" / "a", b"aa")
        files.sync_dir(base / "d")
        files.sync_dir(base)
        files.unlink(base / "d" / "a")
        files.remove_dir(base / "d")

    operations = record(tmp_path, steps)
    assert left(operations, "synced", tmp_path) == {"d": None, "d/a": b"aa"}
    assert left(operations, "killed", tmp_path) == {}
    assert left([*operations, Operation(kind="sync_dir", path=".")], "synced", tmp_path) == {}


def test_a_descriptor_used_again_is_another_file(tmp_path):
    def steps(files, base):
        files.make_dir(base / "d")
        first = files.create(base / "a")
        os.close(first)
        files.sync_dir(base)  # opens the directory with the same descriptor
        second = files.create(base / "b")
        assert second == first
        files.write(second, [b"b"], 0, base / "b")
        files.sync(second, base / "b")
        os.close(second)

    operations = record(tmp_path, steps)
    assert [(o.kind, o.path, o.file) for o in operations if o.kind != "make_dir"] == [
        ("create", "a", 0),
        ("sync_dir", ".", -1),
        ("create", "b", 1),
        ("write", "b", 1),
        ("sync", "b", 1),
    ]


def test_scattered_stays_between_the_least_and_everything(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)
    for name in "abcdefgh":
        files.create_file(base / name, name.encode())
    found = [left(files.operations, "scattered", tmp_path, seed=seed) for seed in range(20)]
    assert len({tuple(sorted(entries)) for entries in found}) > 10
    assert all(entries.items() <= content(base).items() for entries in found)
    files.sync_dir(base)
    assert left(files.operations, "scattered", tmp_path) == content(base)


def test_torn_writes_add_up(tmp_path):
    operations = record(tmp_path, write_two)
    torn = tear(operations)
    assert [o.data for o in torn if o.kind == "write"] == [b"one", b"two", b"mo", b"re", b"b", b"b"]
    assert left(torn, "killed", tmp_path) == left(operations, "killed", tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_on_a_disk_already_is_durable(tmp_path, mode):
    base = tmp_path / "base"
    (base / "d" / "e").mkdir(parents=True)
    (base / "d" / "a").write_bytes(b"aa")
    (base / "d" / "e" / "b").hardlink_to(base / "d" / "a")
    (base / "c").write_bytes(b"aa")
    replay(existing(base), tmp_path / "copy", mode)
    assert content(tmp_path / "copy") == content(base)
    assert links(tmp_path / "copy") == links(base) == [["c"], ["d/a", "d/e/b"]]


def test_a_kill_leaves_what_is_on_the_real_disk(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)
    with small.create(base / "ds", files=files) as writer:
        small.fill(writer)
    replay(files.operations, tmp_path / "copy", "killed")
    assert content(tmp_path / "copy") == content(base)
    assert links(tmp_path / "copy") == links(base)


def test_operations_of_many_threads_are_in_one_order(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)

    def work(number):
        chance = random.Random(number)
        for step in range(40):
            path = base / f"{number}-{step}"
            files.create_file(path, bytes([number]) * chance.randrange(1, 50))
            if chance.random() < 0.5:
                files.link(path, base / f"{number}-{step}-again")
            if chance.random() < 0.5:
                files.unlink(path)
            files.sync_dir(base)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replay(files.operations, tmp_path / "copy", "killed")
    assert content(tmp_path / "copy") == content(base)
    assert links(tmp_path / "copy") == links(base)
