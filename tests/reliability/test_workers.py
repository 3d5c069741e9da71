"""Workers killed anywhere, any number of them, in runs of any size: one dataset, and finished shards stay finished."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvformat
from kvformat.storage.remote import Remote
from kvformat.testing.memory_store import MemoryStore
from tests.reliability.racing import run_race
from tests.reliability.working import finish
from tests.write.planning import SmallPlan, make, opened, remote, simple, work

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDS = 17


@pytest.fixture(scope="module")
def plan():
    return SmallPlan(RECORDS)


@pytest.fixture(scope="module")
def identity(tmp_path_factory, plan):
    """Of the dataset as the simple writer makes it."""
    return simple(tmp_path_factory.mktemp("simple") / "ds", plan)


def check_whole(location, identity, **options):
    report = kvformat.verify(location, **options)
    assert report.findings == ()
    assert (report.ok, report.level, report.id, report.records) == (True, 4, identity, RECORDS)


class Process:
    """A worker, and the pipe on which it tells of every operation."""

    def __init__(self, location, **options):
        self._read, write = os.pipe()
        options = {"num_records": RECORDS, **options}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.working", "work", location, str(write), json.dumps(options)],
            pass_fds=[write],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.close(write)

    def follow(self, count=None):
        """Read so many bytes, or all, and say how many there were."""
        seen = 0
        while count is None or seen < count:
            data = os.read(self._read, 1 << 16 if count is None else count - seen)
            if not data:
                break
            seen += len(data)
        return seen

    def kill(self):
        """Kill it; the shards it said it had finished."""
        os.kill(self._process.pid, signal.SIGKILL)
        return self.end((-signal.SIGKILL, 0))

    def end(self, statuses=(0,)):
        os.set_blocking(self._read, True)
        output, errors = self._process.communicate(timeout=120)
        os.close(self._read)
        assert (self._process.returncode in statuses, errors) == (True, b""), errors.decode()
        return {int(line) for line in output.decode().splitlines(keepends=True) if line.endswith("\n")}


@pytest.fixture(scope="module")
def total(tmp_path_factory, identity):
    """How many operations a worker alone has."""
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    process = Process(location)
    seen = process.follow()
    assert process.end() == set(range(9))
    check_whole(location, identity)
    assert not (location / ".staging").exists()
    return seen


# ------------------------------------------------------------------------------------------------------ any world size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_workers_make_one_dataset(tmp_path, plan, identity, world_size):
    """At once, in processes of their own."""
    options = {"processes": world_size, "num_records": RECORDS}
    results = run_race("tests.reliability.working", tmp_path / "ds", options)
    assert {result.get("id") for result in results} <= {identity, None}
    assert {result.get("code") for result in results} <= {None, "E100"}
    assert identity in {result.get("id") for result in results}
    check_whole(tmp_path / "ds", identity)
    assert not (tmp_path / "ds" / ".staging").exists()


@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 1), (2, 5, 2), (4, 3, 2, 1)])
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_each_run_may_be_of_another_size(tmp_path, plan, identity, sizes, kind):
    """Each lets one worker finish a few shards and stops; the last one does the rest."""
    target = tmp_path / "ds" if kind == "local" else remote(MemoryStore())
    chance, finished = random.Random(f"{sizes}"), set()
    for world_size in sizes:
        for rank in range(world_size):
            with opened(target, plan, rank=rank, world_size=world_size, spool=tmp_path / "spool") as workshop:
                assert workshop.finished() == finished
                mine = [o for o in range(rank, plan.num_shards, world_size) if o not in finished]
                make(workshop, plan, mine[: chance.randrange(2)])
                finished |= set(mine[:1]) & workshop.finished()
    assert 0 < len(finished) < plan.num_shards
    result = finish(target, plan, rank=1, world_size=2, spool=tmp_path / "spool", keep_open=False)
    assert (result["id"], set(result["earlier"])) == (identity, finished)


# -------------------------------------------------------------------------------------------------------------- killed


def dying(location, points, shards=0):
    """Workers at once, each killed at an operation of its own after so many shards; those they said were finished."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.reliability.working", "die", location, f"{shards}", f"{point}"),
                json.dumps({"num_records": RECORDS, "rank": rank, "world_size": len(points)}),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, point in enumerate(points)
    ]
    finished = set()
    for output, errors in [process.communicate(timeout=120) for process in processes]:
        assert errors == b"", errors.decode()
        finished |= {int(line) for line in output.decode().splitlines(keepends=True) if line.endswith("\n")}
    assert {process.returncode for process in processes} <= {0, -signal.SIGKILL}
    return finished


def kill_and_resume(location, points, plan, identity, chance, shards=0):
    """Workers that are killed, then a run of another size, which finds what was finished; how much that was."""
    finished = dying(location, points, shards)
    if not (location / "kvformat.json").exists():
        others = chance.randrange(1, 4)
        result = finish(location, plan, rank=chance.randrange(others), world_size=others)
        assert result["id"] == identity
        assert finished <= set(result["earlier"])  # what was finished stays finished
    check_whole(location, identity)
    return finished


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_workers_lose_no_finished_shard(tmp_path, plan, identity, total, world_size):
    chance = random.Random(world_size)
    seen = []
    for number in range(4):
        points = [chance.randrange(number * total // 4, (number + 1) * total // 4) + 1 for _ in range(world_size)]
        seen.append(kill_and_resume(tmp_path / f"{number}" / "ds", points, plan, identity, chance))
    assert any(seen)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_killed_at_many_points(tmp_path, plan, identity, total, world_size):
    """With none, a few and all of their shards finished; who has none left takes on others', and publishes."""
    chance = random.Random(world_size)
    share = plan.num_shards // world_size
    shard = total // plan.num_shards
    for number in range(12):
        location = tmp_path / f"{number}" / "ds"
        shards = number * (share + 1) // 12
        points = [chance.randrange(2 * shard if shards == share else shard) + 1 for _ in range(world_size)]
        finished = kill_and_resume(location, points, plan, identity, chance, shards)
        # Who has finished its own may die of another's, before it tells of it.
        assert len(finished) >= min(shards, share - 1) * world_size


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, plan, identity, total):
    """Each run is let a little further; shards that are finished are never begun again."""
    location, finished, runs = tmp_path / "ds", set(), 0
    while not (location / "kvformat.json").exists():
        runs += 1
        again = dying(location, [10 + total * runs // 40] * (1 + runs % 3))
        assert not again & finished
        finished |= again
        assert runs < 100
    assert runs > 1
    check_whole(location, identity)


def test_what_a_killed_worker_had_in_work_is_swept(tmp_path, plan, identity, total):
    """By the next one that joins, while others are at work too."""
    location = tmp_path / "ds"
    with opened(location, plan, rank=1, world_size=2) as other:
        mine = other.begin(8)
        process = Process(location, rank=0, world_size=2)
        process.follow(40)
        process.kill()
        left = {path.name for path in other.place.iterdir()}
        assert any(name.endswith(".part") for name in left - {mine.path.name})
        assert [worker.liveness for worker in other.workers()] == ["dead", "live"]
        with opened(location, plan, rank=0, world_size=2) as again:
            parts = [path for path in other.place.iterdir() if path.name.endswith(".part")]
            assert parts == [mine.path]
            assert [worker.liveness for worker in again.workers()] == ["live", "live"]
        mine.discard()
        work(other, plan)
    assert finish(location, plan)["id"] == identity
    assert not (location / ".staging").exists()


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_operation_on_a_store(tmp_path, after):
    plan = SmallPlan(5)
    identity = simple(tmp_path / "simple", plan)
    options = {"after": after, "num_records": 5}
    arguments = [sys.executable, "-m", "tests.reliability.working", "kills", tmp_path, json.dumps(options)]
    done = subprocess.run(arguments, capture_output=True, cwd=REPOSITORY, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    results = json.loads(done.stdout)
    assert [result["count"] for result in results] == list(range(1, len(results) + 1))
    assert len(results) > 25
    for result in results:
        assert ("id" in result) != ("code" in result)
        assert result.get("id", identity) == identity
        assert result.get("code", "E100") == "E100"
        assert result["spools"] == 0 or "code" in result
        report = kvformat.verify(tmp_path / f"{result['count']}" / "ds")
        assert (report.ok, report.id, report.findings) == (True, identity, ())
    earlier = [len(result["earlier"]) for result in results if "earlier" in result]
    assert set(earlier) == {0, 1, 2, 3}


# -------------------------------------------------------------------------------------------------------------- racing


@pytest.mark.parametrize("attempt", range(2))
def test_workers_and_sealers_at_once(tmp_path, plan, identity, attempt):
    results = run_race("tests.reliability.working", tmp_path / "ds", {"processes": 6, "num_records": RECORDS})
    assert {result.get("code") for result in results} <= {None, "E100"}
    assert {result["id"] for result in results if "id" in result} == {identity}
    check_whole(tmp_path / "ds", identity)
    assert not (tmp_path / "ds" / ".staging").exists()


def test_sealers_at_once(tmp_path, plan, identity):
    with opened(tmp_path / "ds", plan) as workshop:
        work(workshop, plan)
    options = {"processes": 4, "num_records": RECORDS, "act": "seal"}
    results = run_race("tests.reliability.working", tmp_path / "ds", options)
    assert [result.get("id") for result in results] == [identity] * 4, results
    check_whole(tmp_path / "ds", identity)
    assert not (tmp_path / "ds" / ".staging").exists()


def s3_options(s3, tmp_path, **more):
    url, storage_options = s3
    return url, {"num_records": RECORDS, "storage_options": storage_options, "spool": str(tmp_path / "spool"), **more}


def test_workers_over_s3(s3, tmp_path, plan, identity):
    url, options = s3_options(s3, tmp_path, processes=3)
    results = run_race("tests.reliability.working", url, options)
    assert {result.get("code") for result in results} <= {None, "E100"}, results
    assert {result["id"] for result in results if "id" in result} == {identity}
    check_whole(url, identity, storage_options=options["storage_options"])
    assert list((tmp_path / "spool").iterdir()) == []


def test_sealers_at_once_over_s3(s3, tmp_path, plan, identity):
    url, options = s3_options(s3, tmp_path, processes=4, act="seal")
    target = Remote(url, storage_options=options["storage_options"])
    with opened(target, plan, spool=tmp_path / "spool") as workshop:
        work(workshop, plan)
    target.close()
    results = run_race("tests.reliability.working", url, options)
    assert [result.get("id") for result in results] == [identity] * 4, results
    check_whole(url, identity, storage_options=options["storage_options"])
    names = [stat.name for stat in target.list(".staging/")]
    target.close()
    assert names == []
