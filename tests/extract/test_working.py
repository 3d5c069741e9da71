"""Workers of one plan where another one hangs: alive, speaking, and getting no further. No time passes in earnest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import kvformat
from kvformat.extract import Plan, Tokeniser, extract_plan, make_plan
from kvformat.extract.assignment import Movement
from kvformat.extract.batch_check import Batches
from kvformat.extract.identify import identity_of
from kvformat.extract.progress import Silent
from kvformat.extract.publishing import seal_in_turn
from kvformat.extract.standing import Clock
from kvformat.extract.working import make_shards
from kvformat.loader.world import World
from kvformat.write.opening import open_workshop
from kvformat.write.worker_state import STALE_S, Worker, WorkerState
from kvformat.write.workshop import Workshop
from tests.extract.arithmetic import ShallowArithmetic
from tests.models import write_documents

RECORDS = 12
A_SHARD = 4  # records


class Time:
    """Passes only while somebody waits, and then calls ``meanwhile``. A day is for ever."""

    def __init__(self, meanwhile: Callable[[float], object] = lambda _: None) -> None:
        self.seconds = 0.0
        self._meanwhile = meanwhile

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        assert self.seconds < 86_400, "it waits for ever"
        self._meanwhile(self.seconds)

    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, wait=self.wait)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    documents = write_documents(
        tmp_path / "d.jsonl", [{"id": f"r{number}", "token_ids": [number]} for number in range(RECORDS)]
    )
    return make_plan(
        documents, Tokeniser(None), schema=ShallowArithmetic.schema, shard_nbytes=32 << 10, shard_slots=A_SHARD
    )


def joined(plan: Plan, out: Path, rank: int, **options: Any) -> Workshop:
    run, covered = identity_of(ShallowArithmetic(), plan, tag="", batches="single")
    return open_workshop(out, run, plan, covered=covered, rank=rank, world_size=2, **options)


def make(workshop: Workshop, plan: Plan, time: Time, seen: Callable[[int], object] = lambda _: None) -> None:
    make_shards(
        workshop,
        plan,
        ShallowArithmetic(seen),
        world=World(workshop.state.rank, 2),
        allow_non_finite=(),
        batches=Batches(together=False, recorded="single"),
        on_error="fail",
        allow_skips=False,
        report=Silent(),
        clock=time.clock(),
    )


def at(workshop: Workshop, done: int) -> None:
    """Say that so much of shard 0 is done."""
    workshop.report(replace(workshop.state, phase="work", shard=0, shard_records=done, shard_total=A_SHARD))


# ------------------------------------------------------------------------------------------------------------- shards


def test_what_a_hung_worker_has_in_hand_is_made_by_another(plan: Plan, tmp_path: Path) -> None:
    assert plan.num_shards == RECORDS // A_SHARD
    expected = extract_plan(ShallowArithmetic(), plan, tmp_path / "one").id
    time, begun = Time(), {}
    with joined(plan, tmp_path / "ds", 0) as hung, joined(plan, tmp_path / "ds", 1) as worker:
        at(hung, 3)
        make(worker, plan, time, lambda number: begun.setdefault(number // A_SHARD, time.seconds))
        assert [other.liveness for other in worker.workers()] == ["live", "live"]
        assert begun[1] == begun[2] == 0
        assert STALE_S <= begun[0] < 2 * STALE_S
        assert worker.finished() == {0, 1, 2}
        assert seal_in_turn(worker, plan, allow_skips=False, report=Silent(), clock=time.clock()) == expected
    assert kvformat.verify(tmp_path / "ds").ok


def test_a_slow_worker_that_gets_on_is_let_finish(plan: Plan, tmp_path: Path) -> None:
    spoken = iter(range(0, 1_000_000, 10))
    time, begun = Time(lambda seconds: at(slow, 2 if seconds < 200 else 3)), {}
    with (
        joined(plan, tmp_path / "ds", 0, clock=lambda: float(next(spoken))) as slow,
        joined(plan, tmp_path / "ds", 1) as worker,
    ):
        at(slow, 2)
        make(worker, plan, time, lambda number: begun.setdefault(number // A_SHARD, time.seconds))
        assert 200 + STALE_S <= begun[0] < 200 + 2 * STALE_S


# ------------------------------------------------------------------------------------------------------------ sealing


def state_of(rank: int, **more: Any) -> WorkerState:
    common = {"world_size": 3, "host": "h", "pid": 1, "started": 0.0, "updated": 0.0}
    return WorkerState(rank=rank, token=f"{rank:08x}", **(common | more))


class Room:
    """A workshop in which others are at this; nothing is published until ``published_at``."""

    def __init__(self, time: Time, others: list[Worker], published_at: float) -> None:
        self.state = state_of(2)
        self._time, self._others, self._published_at = time, others, published_at

    def report(self, state: WorkerState) -> None:
        self.state = state

    def workers(self) -> list[Worker]:
        heard = [Worker(replace(one.state, updated=self._time.seconds), one.liveness) for one in self._others]
        return [*heard, Worker(self.state, "live")]

    def root(self) -> bytes | None:
        return b"root" if self._time.seconds >= self._published_at else None


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Counts who seals in place of doing so."""
    found = SimpleNamespace(times=0)

    def seal(*_: object, **__: object) -> str:
        found.times += 1
        return "by itself"

    monkeypatch.setattr("kvformat.extract.publishing.seal", seal)
    return found


def sealing(time: Time, others: list[Worker], published_at: float = float("inf")) -> str:
    room: Any = Room(time, others, published_at)
    return seal_in_turn(room, SimpleNamespace(), allow_skips=False, report=Silent(), clock=time.clock())  # type: ignore[arg-type]


def test_a_hung_worker_whose_turn_it_is_keeps_nobody_from_sealing(sealed: SimpleNamespace) -> None:
    time = Time()
    others = [Worker(state_of(0, phase="seal"), "live"), Worker(state_of(1, phase="seal"), "unknown")]
    assert sealing(time, others) == "by itself"
    assert sealed.times == 1
    assert STALE_S <= time.seconds < 2 * STALE_S


def test_one_that_publishes_in_time_is_waited_for(sealed: SimpleNamespace) -> None:
    time = Time()
    found = sealing(time, [Worker(state_of(0, phase="seal"), "live")], published_at=STALE_S / 2)
    assert found == hashlib.sha256(b"root").hexdigest()
    assert sealed.times == 0


@pytest.mark.parametrize(
    "other",
    [
        Worker(state_of(0, phase="seal"), "dead"),
        Worker(state_of(0, phase="work", shard=1), "live"),
        Worker(state_of(3, phase="seal"), "live"),
    ],
)
def test_others_are_not_waited_for_at_all(sealed: SimpleNamespace, other: Worker) -> None:
    time = Time()
    assert sealing(time, [other]) == "by itself"
    assert time.seconds == 0


# ----------------------------------------------------------------------------------------------------------- movement


def test_each_worker_stands_still_on_its_own() -> None:
    now = [0.0]
    movement = Movement(lambda: now[0], patience_s=10)
    first, second = state_of(0, shard=3, shard_records=5), state_of(1, shard=4)
    assert movement.gets_on(first)
    assert movement.gets_on(second)
    now[0] = 9
    second = replace(second, num_tokens=1, updated=9.0)
    assert movement.gets_on(second)
    now[0] = 10
    assert not movement.gets_on(replace(first, updated=10.0))  # speaking is not getting on
    assert movement.gets_on(second)
    now[0] = 19
    assert movement.gets_on(replace(first, shard_records=6))
    assert not movement.gets_on(second)
