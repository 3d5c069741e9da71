"""What a worker reports: every shard counts once, and all of them together are all there is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvformat.cli.progress import Nothing
from kvformat.cli.watch import Watch
from kvformat.errors import KVFormatWarning
from kvformat.extract import Plan, Tokeniser, extract_plan, make_plan
from kvformat.extract.progress import Share, Silent
from kvformat.extract.tally import Tally
from tests.extract.arithmetic import ShallowArithmetic
from tests.models import write_documents

LENGTHS = (40, 3, 60, 1, 25, 7, 90, 2, 33)
"""Of the documents, each a shard: no two are of one size."""


class StopError(Exception):
    """Unlike at an interrupt, all that is complete is kept."""


class Shown(Watch):
    """The watch of the command line, without a display; stops after some records."""

    def __init__(self, stop_after: int = -1) -> None:
        super().__init__(Nothing())
        self._left = stop_after

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        super().advance(tokens=tokens, nbytes=nbytes, computed=computed)
        self._left -= computed
        if not self._left:
            raise StopError

    @property
    def total(self) -> int:
        return self.nbytes + self.resumed_nbytes + self.elsewhere_nbytes


def plan_of(path: Path, *, slots: int = 1) -> Plan:
    lines = [{"id": f"r{n}", "token_ids": [n] * length} for n, length in enumerate(LENGTHS)]
    documents = write_documents(path / "d.jsonl", lines)
    return make_plan(documents, Tokeniser(None), schema=ShallowArithmetic.schema, shard_slots=slots)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(tmp_path)


def interrupted(plan: Plan, out: Path, after: int, **options: Any) -> None:
    with pytest.raises(StopError):
        extract_plan(ShallowArithmetic(**options.pop("extractor", {})), plan, out, progress=Shown(after), **options)


def sizes(plan: Plan, ordinals: Any) -> int:
    return sum(plan.shard_size(ordinal)[1] for ordinal in ordinals)


@pytest.mark.parametrize("world_size", [2, 3])
def test_counts_of_resumed_workers_are_all_there_is(plan: Plan, tmp_path: Path, world_size: int) -> None:
    assert plan.num_shards == len(LENGTHS)
    interrupted(plan, tmp_path / "ds", 4)
    watches = [Shown() for _ in range(world_size)]
    together = threading.Barrier(world_size)
    begun = threading.local()

    def wait(_first: int) -> None:
        if not hasattr(begun, "yes"):  # each is there before any goes on
            begun.yes = True
            together.wait(60)

    def work(rank: int) -> None:
        extractor = ShallowArithmetic(wait)
        extract_plan(extractor, plan, tmp_path / "ds", rank=rank, world_size=world_size, progress=watches[rank])

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(work, range(world_size)))
    for watch in watches:
        assert watch.total == plan.nbytes
        assert watch.records == watch.shards
        assert watch.shards
    kept = {watch.resumed_nbytes for watch in watches}
    assert len(kept) == 1
    assert sum(watch.nbytes for watch in watches) + kept.pop() == plan.nbytes
    assert plan.num_shards - sum(watch.shards or 0 for watch in watches) == 4
    assert watches[0].resumed_nbytes == sizes(plan, range(4))


def test_what_another_worker_finished_first_counts_as_its_own(plan: Plan, tmp_path: Path) -> None:
    """One publishes while the other has its first shard in hand."""
    quick, slow = Shown(), Shown()

    def meanwhile(_first: int) -> None:
        if not quick.extracted:
            extract_plan(ShallowArithmetic(), plan, tmp_path / "ds", rank=1, world_size=2, progress=quick)

    extract_plan(ShallowArithmetic(meanwhile), plan, tmp_path / "ds", rank=0, world_size=2, progress=slow)
    assert (quick.shards, quick.records, quick.nbytes) == (plan.num_shards, plan.num_records, plan.nbytes)
    assert (slow.shards, slow.records, slow.tokens, slow.nbytes) == (0, 0, 0, 0)
    assert slow.elsewhere_nbytes == plan.nbytes


def test_a_damaged_shard_that_is_made_again_is_counted_once(plan: Plan, tmp_path: Path) -> None:
    interrupted(plan, tmp_path / "ds", 5)
    shards = sorted((tmp_path / "ds").glob(".staging/*/*.shard"))
    assert len(shards) == 5
    damaged = shards[2]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    watch = Shown()
    with pytest.warns(KVFormatWarning, match="W006"):
        extract_plan(ShallowArithmetic(), plan, tmp_path / "ds", progress=watch)
    assert watch.resumed_nbytes == sizes(plan, {0, 1, 3, 4})
    assert watch.total == plan.nbytes
    assert watch.shards == plan.num_shards - 4


def test_what_was_skipped_counts_nowhere(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, slots=3)
    options: dict[str, Any] = {"on_error": "skip", "allow_skips": True}
    interrupted(plan, tmp_path / "ds", 5, extractor={"wrong": (0, 8)}, **options)
    watch = Shown()
    found = extract_plan(ShallowArithmetic(wrong=(0, 8)), plan, tmp_path / "ds", progress=watch, **options)
    assert len(found.manifest.skipped) == 2
    stored = [found.index.shard(n).size - plan.header_size for n in range(plan.num_shards)]
    assert watch.resumed_nbytes == sum(stored[:2]) < sizes(plan, range(2))
    assert watch.total == sum(stored) < plan.nbytes


class Told(Silent):
    def __init__(self) -> None:
        self.last = Share()
        self.elsewhere_nbytes = 0

    def elsewhere(self, *, nbytes: int) -> None:
        self.elsewhere_nbytes = nbytes

    def share(self, share: Share) -> None:
        self.last = share


def test_a_twin_is_taken_back(plan: Plan) -> None:
    told = Told()
    tally = Tally(plan, told)
    tally.keep({0})
    for ordinal in (1, 2):
        tally.add(ordinal, tokens=LENGTHS[ordinal], nbytes=plan.shard_size(ordinal)[1])
    tally.settle({1, 2}, lost={2})
    assert (told.last.shards, told.last.records, told.last.tokens) == (1, 1, LENGTHS[1])
    tally.finished({0, 1, 2, 6})
    assert told.elsewhere_nbytes == sizes(plan, {2, 6})
    tally.finished({0, 1, 2})  # one was found damaged
    assert told.elsewhere_nbytes == sizes(plan, {2})
    tally.keep({0, 1, 2})
    tally.tell()
    assert told.last == Share(
        shards=1,
        records=1,
        tokens=LENGTHS[1],
        nbytes=sizes(plan, {1}),
        kept_nbytes=sizes(plan, {0}),
        elsewhere_nbytes=sizes(plan, {2}),
    )


def test_a_shard_that_is_gone_after_it_was_made_is_counted_once(plan: Plan) -> None:
    told = Told()
    tally = Tally(plan, told)
    for _ in range(2):
        tally.add(1, tokens=3, nbytes=4096)
        tally.settle({1}, lost=())
    tally.tell()
    assert (told.last.shards, told.last.records, told.last.tokens, told.last.nbytes) == (1, 1, 3, 4096)


def test_a_report_need_not_know_of_shares(plan: Plan) -> None:
    class Older:
        def phase(self, name: Any, *, tokens: int = 0, nbytes: int = 0) -> None: ...

        def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None: ...

        def elsewhere(self, *, nbytes: int) -> None: ...

        def times(self, times: Any) -> None: ...

    tally = Tally(plan, Older())
    tally.add(1, tokens=3, nbytes=4096)
    tally.tell()
