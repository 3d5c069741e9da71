"""Copies that end before they are done: nothing wrong is there, nothing is left over, and the same call goes on."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

import kvformat
from kvformat.errors import KVFormatError, StorageError
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.local_read import LocalReader
from kvformat.storage.local_write import LocalFiles
from kvformat.testing.faults import FaultyFiles
from kvformat.testing.memory_store import MemoryStore
from kvformat.testing.recording import MODES, RecordingFiles, replay
from kvformat.transfer.contents import contents_of
from kvformat.transfer.copying import run
from kvformat.transfer.local_target import LocalTarget
from kvformat.transfer.remote_target import RemoteTarget
from tests.transfer.killing import location, stopped_after
from tests.transfer.places import ROUTES, Place, copied, tree


def check_left(goal: Place, dataset: Path) -> int:
    """Whatever is there is whole, and has its final name; returns its bytes."""
    left = goal.files()
    assert left.items() <= tree(dataset).items()
    assert "kvformat.json" not in left
    return sum(map(len, left.values()))


class Stop(BaseException):
    """As Ctrl-C, which may come from anywhere."""


# --------------------------------------------------------------------------------------------- exceptions and Ctrl-C


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop, ZeroDivisionError])
def test_stopped_at_every_step_and_gone_on(error, route, source, target, dataset, spool, tmp_path) -> None:
    origin = source(route[0])
    steps: list[int] = []
    copied(origin, Place(route[1], tmp_path / "undisturbed"), progress=lambda *_: steps.append(0))
    for stop in range(1, len(steps)):
        goal = Place(route[1], tmp_path / "sets" / f"{stop}")
        calls = 0

        def interrupt(_done: int, _total: int, stop: int = stop) -> None:
            nonlocal calls
            calls += 1
            if calls >= stop:
                raise error

        with pytest.raises(error):
            copied(origin, goal, progress=interrupt)
        assert list(spool.glob("*")) == []
        kept = check_left(goal, dataset)
        if not kept and route[1] == "local":
            assert not (tmp_path / "sets").exists()
        report = copied(origin, goal)
        assert (report.skipped_nbytes, report.copied_nbytes) == (kept, report.nbytes - kept)
        assert goal.files() == tree(dataset)
        if route[1] == "local":
            shutil.rmtree(tmp_path / "sets")


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_what_is_there_is_counted_and_not_moved_again(route, source, target, dataset) -> None:
    origin, goal = source(route[0]), target(route[1])
    files = tree(dataset)
    shards = sorted(name for name in files if name.startswith("shards/"))
    for name in shards[:5]:
        goal.put(name, files[name])
    calls: list[tuple[int, int]] = []
    goal.store.calls.clear()
    report = copied(origin, goal, progress=lambda done, total: calls.append((done, total)))
    assert report.skipped_nbytes == sum(len(files[name]) for name in shards[:5])
    assert calls[-1] == (report.nbytes, report.nbytes)
    assert not {name for call, name in goal.store.calls if call == "put"} & set(shards[:5])


# ------------------------------------------------------------------------------------------------------------ faults


def into(directory: Path, dataset: Path, files: LocalFiles) -> None:
    origin = LocalReader(dataset, use_mmap=True)
    contents = contents_of(origin)
    run(origin, LocalTarget(directory, contents, files=files), contents, threads=2)


@pytest.mark.parametrize("kind", ["make_dir", "create", "write", "sync", "sync_dir", "link", "unlink"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EPERM])
def test_every_operation_fails_once_or_from_then_on(kind, error, other, tmp_path) -> None:
    codes = set()
    for lasting in (False, True):
        for nth in range(100):
            goal = Place("local", tmp_path / "sets" / f"{lasting}-{nth}")
            files = FaultyFiles(kind, nth=nth, error=error, lasting=lasting)
            try:
                into(goal.path, other, files)
            except KVFormatError as caught:
                codes.add(caught.code)
                if not lasting and kind != "unlink" and (goal.path / "kvformat.json").exists():
                    assert kind == "sync_dir"  # of the directory that has the root already: whole, if not durable
                elif not (goal.path / "kvformat.json").exists() and kind != "unlink":
                    check_left(goal, other)
            if not files.failed:
                break
            into_again = kvformat.copy(other, goal.path, threads=2)
            assert into_again.nbytes == sum(map(len, tree(other).values()))
            left = {name: data for name, data in goal.files().items() if not name.startswith(".staging/")}
            assert left == tree(other)
        else:
            pytest.fail("it never ends")
    expected = {"make_dir": {"E200", "E203", "E207"}, "link": {"E200", "E201", "E203"}}
    everywhere = {"sync": {"E202"}, "sync_dir": {"E202"}, "unlink": set()}
    assert codes <= everywhere.get(kind, expected.get(kind, {"E200", "E203", "E207"}))
    assert bool(codes) == (kind != "unlink")


def test_a_full_disk_is_told_with_numbers(dataset, tmp_path) -> None:
    with pytest.raises(
        StorageError, match=r"[0-9,]+ bytes are needed, [0-9,]+ are free; free space and resume"
    ) as got:
        into(tmp_path / "target", dataset, FaultyFiles("write", nth=4, error=errno.ENOSPC))
    assert got.value.code == "E200"
    assert not (tmp_path / "target" / ".staging").exists()


def test_a_full_spool_is_told_and_emptied(dataset, source, target, tmp_path) -> None:
    origin, goal = source("remote"), target("remote")
    from kvformat.storage.readers import reader_of

    reader = reader_of(origin.location)
    contents = contents_of(reader)
    files = FaultyFiles("write", nth=4, error=errno.ENOSPC)
    with pytest.raises(StorageError, match="bytes are needed") as caught:
        run(reader, RemoteTarget(goal.remote(), contents, spool=tmp_path, files=files), contents, threads=2)
    assert caught.value.code == "E200"
    assert list(tmp_path.glob("*-*")) == []
    check_left(goal, dataset)


class Refusing(MemoryStore):
    """Has no preconditions."""

    def create(self, name: str, data: object, *, timeout_s: float) -> None:
        self.objects[name] = bytes(data)  # type: ignore[call-overload]


def test_a_store_without_preconditions_is_refused_before_anything_is_uploaded(source, target) -> None:
    goal = target("remote")
    with pytest.raises(StorageError) as caught:
        kvformat.copy(source("local").location, goal.remote(Refusing(goal.url)))
    assert caught.value.code == "E209"
    assert goal.files() == {}


# --------------------------------------------------------------------------------------------------- crashes and kills


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_crash_after_every_operation(mode, other, tmp_path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)
    into(base / "sets" / "target", other, files)
    seen = {False: 0, True: 0}
    for count in range(len(files.operations) + 1):
        disk = tmp_path / f"{count}"
        replay(files.operations[:count], disk, mode, seed=count)
        goal = disk / "sets" / "target"
        whole = (goal / "kvformat.json").exists()
        seen[whole] += 1
        if not whole:
            kvformat.copy(other, goal, threads=2)
        report = kvformat.verify(goal)
        assert (report.ok, report.id) == (True, kvformat.open(other).id), (count, report.findings)
        if not whole:
            assert tree(goal) == tree(other)
        shutil.rmtree(disk)
    assert all(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_killed_again_and_again(route, dataset, tmp_path, spool) -> None:
    """Each run is let further than the one before."""
    origin, goal = tmp_path / "source", tmp_path / "target"
    shutil.copytree(dataset, origin)
    places = zip(route, (origin, goal), strict=True)
    names = [str(path) if kind == "local" else f"memory://{path}" for kind, path in places]
    runs = 0
    while not (goal / "kvformat.json").exists():
        runs += 1
        status = stopped_after(2 * runs, *names, cache=tmp_path / "cache")
        assert status or (goal / "kvformat.json").exists()
        for name, data in tree(goal).items() if goal.exists() else ():
            assert name.startswith(".staging/") or tree(dataset)[name] == data
    assert runs > 5
    assert kvformat.copy(*map(location, names)).already_there
    assert tree(goal) == tree(dataset)
    assert route[1] == "remote" or not (goal / ".staging").exists()
    assert list(spool.glob("*")) == []


def test_what_a_copy_left_that_was_killed_behind_its_commit_is_removed(dataset, tmp_path) -> None:
    goal = tmp_path / "target"
    identity = kvformat.copy(dataset, goal).id
    staging = goal / ".staging" / f"copy-{identity[:16]}"
    staging.mkdir(parents=True)
    (staging / "root.0123abcd.part").write_bytes(b"x")
    lease = DirectoryLease.take(staging)
    assert kvformat.copy(dataset, goal).already_there
    assert staging.exists()  # a copy is at work
    lease.release()
    assert kvformat.copy(dataset, goal).already_there
    assert tree(goal) == tree(dataset)
    assert not (goal / ".staging").exists()
