"""A writing process killed at any moment: no dataset or a whole one, and the next run completes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import kvformat
from tests.reliability import small

REPOSITORY = Path(__file__).resolve().parents[2]
REPEATS = 6
SHARDS = -(-REPEATS * small.NUM_RECORDS // 2)
KILLS = 50


def start(location, mode, *more):
    """A writing process, and the pipe on which it tells of every operation."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.reliability.writing", "write", location, str(write), str(REPEATS), mode, *more],
        pass_fds=[write],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    return process, read


def follow(fd, count=None):
    """Read so many bytes, or all, and say how many there were."""
    seen = 0
    while count is None or seen < count:
        data = os.read(fd, 1 << 16 if count is None else count - seen)
        if not data:
            break
        seen += len(data)
    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Id of the dataset, and how many operations a run has."""
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    process, read = start(location, "new")
    total = follow(read)
    os.close(read)
    assert (process.wait(), process.stderr.read()) == (0, b"")
    process.stderr.close()
    report = kvformat.verify(location)
    assert (report.ok, report.records) == (True, REPEATS * small.NUM_RECORDS)
    return report.id, total


def kill_after(location, count, mode):
    """Start a writer and kill it once it began its ``count``-th operation; whether it was still at work."""
    process, read = start(location, mode)
    try:
        follow(read, count)
        os.kill(process.pid, signal.SIGKILL)  # a process not waited for yet keeps its id, even where it has ended
        status = process.wait()
        process.stderr.close()
    finally:
        os.close(read)
    assert status in (-signal.SIGKILL, 0)
    return status != 0


def check_whole(location, identity):
    report = kvformat.verify(location)
    assert report.findings == ()
    assert (report.ok, report.id, report.records) == (True, identity, REPEATS * small.NUM_RECORDS)
    assert {warning.code for warning in report.warnings} <= {"W002"}
    assert sum(1 for _ in kvformat.open(location).names()) == REPEATS * (small.NUM_RECORDS + 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_at_fifty_points(tmp_path, undisturbed):
    identity, total = undisturbed
    chance = random.Random(0)
    seen = Counter()
    # Points spread over the run, each anywhere in its part of it.
    points = [chance.randrange(n * total // KILLS, (n + 1) * total // KILLS) + 1 for n in range(KILLS)]
    for number, point in enumerate(points):
        location = tmp_path / f"{number}" / "ds"
        location.parent.mkdir()
        killed = kill_after(location, point, "resume" if number % 2 else "new")
        try:
            kvformat.open(location)
        except kvformat.DatasetNotFoundError:
            assert killed
            with small.create(location, resume=True) as writer:
                resumed = writer._replay.num_shards
                small.fill_many(writer, REPEATS)
            assert writer.id == identity
            seen["nothing staged" if resumed == 0 else "all staged" if resumed == SHARDS else "some staged"] += 1
        else:
            seen["published"] += 1
        check_whole(location, identity)
    assert set(seen) == {"nothing staged", "some staged", "all staged", "published"}, seen


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, undisturbed):
    """Each run is let a little further than the one before."""
    identity, total = undisturbed
    location = tmp_path / "ds"
    runs = 0
    while not (location / "kvformat.json").exists():
        runs += 1
        killed = kill_after(location, total * runs // 12, "resume")
        assert killed or (location / "kvformat.json").exists()
    assert runs > 1
    check_whole(location, identity)


@pytest.mark.parametrize("tenth", range(1, 9))
def test_an_interrupted_process_leaves_nothing(tmp_path, undisturbed, tenth):
    """Ctrl-C, unlike a kill, lets a writer clean up."""
    _, total = undisturbed
    process, read = start(tmp_path / "sets" / "ds", "new", f"{total * tenth // 10}")
    follow(read)
    os.close(read)
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() != 0
    assert error.rstrip().endswith(b"KeyboardInterrupt")
    assert small.tree(tmp_path) == {}
