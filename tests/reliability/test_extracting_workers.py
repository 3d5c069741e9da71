"""Extractions by several processes, killed at any moment or given NaN: one dataset in the end, or the same error."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvformat
from kvformat.errors import KVFormatError
from kvformat.extract import Plan, Tokeniser, extract_plan, make_plan, open_plan
from kvformat.extract.progress import Silent
from kvformat.storage.local_write import LocalFiles
from kvformat.write import opening
from tests.extract.arithmetic import Arithmetic
from tests.models import write_documents
from tests.reliability.racing import race, run_race

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = "tests.reliability.test_extracting_workers"
RECORDS = 26
KILLS = 30
_VERBS = frozenset({"create", "link", "make_dir", "remove_dir", "sync", "sync_dir", "unlink", "write"})


# ----------------------------------------------------------------------------------------- what runs in the processes


class Steps:
    """Kills the process at its ``last`` step: before an operation on the disk, or when a record is done."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)


class Disk(LocalFiles):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __getattribute__(self, name: str) -> Any:
        if name in _VERBS:
            self._steps.step()
        return super().__getattribute__(name)


class Records(Silent):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        self._steps.step()


def extract(plan: str, out: str, rank: int, world_size: int, last: int | None = None) -> dict[str, Any]:
    """Be a worker; what became of it, and how many steps that took."""
    steps = Steps(last)
    opening.LocalFiles = lambda: Disk(steps)  # type: ignore[attr-defined,misc,assignment]
    planned = open_plan(plan)
    try:
        dataset = extract_plan(
            Arithmetic(wrong=(255,)), planned, out, rank=rank, world_size=world_size, progress=Records(steps)
        )
    except KVFormatError as error:
        return {"code": error.code, "record": error.record, "layer": error.layer, "kind": type(error).__name__}
    return {"id": dataset.id, "steps": steps.count}


def run_workers(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Workers at once, each in a fork of its own, each to die at its point; what became of them, by rank."""
    points = order.pop("points")
    forks = []
    for rank, last in enumerate(points):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                result = extract(**order, rank=rank, world_size=len(points), last=last)
                os.write(write, json.dumps(result).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        forks.append((pid, read))
    found = []
    for pid, read in forks:
        with os.fdopen(read) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found.append({"status": status, **(json.loads(text) if text else {})})
    return found


def main() -> None:
    """``serve``: orders on standard input, a line each, answered by lines. ``race OUT OPTIONS``: workers at once."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)  # no helper threads of torch's: they would be missing in a forked process
    if sys.argv[1] == "serve":
        for line in sys.stdin:
            sys.stdout.write(json.dumps(run_workers(json.loads(line))) + "\n")
            sys.stdout.flush()
        return
    out, options = sys.argv[2], json.loads(sys.argv[3])

    def work(number: int, wait: Callable[[], None]) -> dict[str, Any]:
        wait()
        return extract(options["plan"], out, number, options["processes"])

    sys.stdout.write(json.dumps(race(options["processes"], work)))


# --------------------------------------------------------------------------------------------------------------- tests


def plan_of(directory: Path, *, poisoned: int | None = None) -> Plan:
    lines = [
        {"id": f"r{number}", "token_ids": [255 if number == poisoned else number] * (1 + number % 3)}
        for number in range(RECORDS)
    ]
    documents = write_documents(directory / "d.jsonl", lines)
    plan = make_plan(documents, Tokeniser(None), schema=Arithmetic.schema, shard_nbytes=32 << 10)
    plan.save(directory / "plan")
    return plan


class Server:
    """Forks workers of a plan; see :func:`main`."""

    def __init__(self, plan: Path) -> None:
        self._plan = plan
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def run(self, out: Path, points: list[int | None]) -> list[dict[str, Any]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"plan": str(self._plan), "out": str(out), "points": points}) + "\n")
        stdin.flush()
        found: list[dict[str, Any]] = json.loads(stdout.readline())
        return found

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                stack.callback(pipe.close)
        assert self._process.wait(60) == 0


def receipts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob(".staging/*-workers/" + "[0-9]" * 8 + ".json")}


def check_whole(out: Path, identity: str) -> None:
    report = kvformat.verify(out)
    assert (report.ok, report.id, report.records, report.findings) == (True, identity, RECORDS, ())


def kill_until_published(server: Server, out: Path, identity: str, total: int, chance: random.Random) -> list[str]:
    """Runs of one to three workers, killed and run again by others, the last one undisturbed; states at each kill."""
    seen = []
    for attempt in range(3):
        world_size = chance.randrange(1, 4)
        points: list[int | None] = [
            chance.randrange(1, total // world_size) if attempt < 2 else None for _ in range(world_size)
        ]
        before = receipts(out)
        found = server.run(out, points)
        assert {one["status"] for one in found} <= {0, -signal.SIGKILL}, found
        assert {one["id"] for one in found if "id" in one} <= {identity}, found
        published, after = (out / "kvformat.json").exists(), receipts(out)
        # One that comes when others have published cannot tell an unknown context from another one.
        assert {one["code"] for one in found if "code" in one} <= ({"E100", "E118"} if published else set()), found
        if not published:
            assert before.items() <= after.items()  # what was finished stays finished
            with pytest.raises(kvformat.DatasetNotFoundError):
                kvformat.open(out)
        state = "published" if published else "some shards" if after else "no shard"
        seen += [state] * sum(one["status"] == -signal.SIGKILL for one in found)
        if published:
            break
    check_whole(out, identity)
    return seen


@pytest.mark.slow
def test_workers_killed_at_thirty_points_make_the_undisturbed_dataset(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.num_shards >= 10
    identity = extract_plan(Arithmetic(wrong=(255,)), plan, tmp_path / "undisturbed", rank=0, world_size=1).id
    server, chance = Server(tmp_path / "plan"), random.Random(0)
    try:
        [alone] = server.run(tmp_path / "alone", [None])
        assert alone["id"] == identity
        assert alone["steps"] > 5 * RECORDS, "operations on the disk count too"
        seen: Counter[str] = Counter()
        for number in range(2 * KILLS):
            if seen.total() >= KILLS:
                break
            seen.update(kill_until_published(server, tmp_path / f"{number}", identity, alone["steps"], chance))
    finally:
        server.close()
    assert seen.total() >= KILLS, seen
    assert seen["some shards"] > KILLS // 3, seen  # the points are spread


@pytest.mark.parametrize("poisoned", [0, 1, RECORDS - 1])
def test_every_worker_is_told_of_a_document_that_gives_nan(tmp_path: Path, poisoned: int) -> None:
    """None of them stalls, and none publishes: whoever comes to it last finds the same."""
    plan_of(tmp_path, poisoned=poisoned)
    options = {"processes": 2, "plan": str(tmp_path / "plan")}
    results = run_race(MODULE, str(tmp_path / "ds"), options)
    error = {"code": "E104", "record": f"r{poisoned}", "layer": 1, "kind": "InputError"}
    assert results == [error, error]
    with pytest.raises(kvformat.DatasetNotFoundError):
        kvformat.open(tmp_path / "ds")


if __name__ == "__main__":
    main()
