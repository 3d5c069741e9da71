"""One worker of a plan: it makes shards until all of them are there, by whomever they were made."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from kvformat.extract.assignment import Movement, next_shard
from kvformat.extract.batch_check import Batches, effective_groups
from kvformat.extract.meter import PipelineMeter, PipelineTimes
from kvformat.extract.pipeline import INFLIGHT_NBYTES, run_groups
from kvformat.extract.plan import Plan, PlannedDocument
from kvformat.extract.progress import Progress
from kvformat.extract.recheck import Recheck
from kvformat.extract.refused import OnError
from kvformat.extract.sink import ShardSink
from kvformat.extract.standing import CLOCK, LONGEST_WAIT_S, SHORTEST_WAIT_S, Clock, Known
from kvformat.extract.tally import Tally
from kvformat.interfaces import Extractor
from kvformat.loader.world import World
from kvformat.write.record import RecordEncoder
from kvformat.write.worker_state import is_alive
from kvformat.write.workshop import Workshop

__all__ = ["make_shards"]


def make_shards(
    workshop: Workshop,
    plan: Plan,
    extractor: Extractor,
    *,
    world: World,
    allow_non_finite: Collection[str],
    batches: Batches,
    on_error: OnError,
    allow_skips: bool,
    report: Progress,
    known: Known | None = None,
    tally: Tally | None = None,
    only: Collection[int] | None = None,
    clock: Clock = CLOCK,
) -> PipelineTimes:
    """Make shards of a plan; returns when all of them are finished, or another worker published them.

    Shards of earlier runs are looked at again meanwhile, by each worker those that are its own. A shard another worker
    has in hand without getting on counts as one nobody has begun.

    Parameters
    ----------
    batches
        What becomes of the plan's forward groups.
    allow_skips
        Otherwise shards of earlier runs some of whose documents were skipped are made again.
    known, tally
        What an earlier call for the same worker learnt and counted, and this one adds to.
    only
        Just these, and then no more: they are its own.

    Raises
    ------
    KVFormatError
        Whatever extractor and workshop raise. Finished shards stay staged.
    """
    encoder = RecordEncoder(workshop.layout, allow_non_finite=allow_non_finite)
    known = Known() if known is None else known
    tally = Tally(plan, report) if tally is None else tally
    work = _Work(workshop, plan, world, report, known, tally, only=only, clock=clock)
    own = work.own_finished()
    with Recheck(workshop, own, allow_skips=allow_skips) as recheck:
        while True:
            run_groups(
                extractor,
                work.groups(batches, recheck),
                work.sink,
                encoder=encoder,
                max_inflight_nbytes=INFLIGHT_NBYTES,
                on_error=on_error,
                meter=work.meter,
            )
            work.sink.drop()
            workshop.flush()
            work.settle()
            if not work.wait(recheck):
                break
    work.learn(own)
    work.count_all()
    workshop.report(replace(workshop.state, proved=True))
    times = work.meter.times()
    report.times(times)
    return times


class _Work:
    """What this worker knows of the shards of the plan."""

    def __init__(
        self,
        workshop: Workshop,
        plan: Plan,
        world: World,
        report: Progress,
        known: Known,
        tally: Tally,
        *,
        only: Collection[int] | None,
        clock: Clock,
    ) -> None:
        self._workshop = workshop
        self._plan = plan
        self._world = world
        self._report = report
        self._known = known
        self._all_own = only is not None or world.size == 1
        self._wanted = frozenset(range(plan.num_shards) if only is None else only)
        self._before = workshop.finished() & self._wanted
        self._made: set[int] = set()
        self._overtaken: set[int] = set()
        self._clock = clock
        self._looked = clock.now()
        self._movement = Movement(clock.now)
        self.meter = PipelineMeter()
        self.sink = ShardSink(workshop, plan, added=self._added)
        self._tally = tally
        tally.keep(self._before)

    def own_finished(self) -> list[int]:
        """Shards an earlier run finished that this worker looks at again."""
        rank, size = self._world
        unproved = sorted(self._before - self._known.proved)
        return [ordinal for ordinal in unproved if self._all_own or ordinal % size == rank]

    def learn(self, looked_at: Collection[int]) -> None:
        """Note what is proved once all is finished."""
        known = self._known
        known.proved |= {*looked_at, *self._made}
        if self._world.size > 1:
            known.proved |= self._workshop.finished() - self._before
        known.unproved = {*self._before} - known.proved

    def groups(self, batches: Batches, recheck: Recheck) -> Iterator[list[PlannedDocument]]:
        """Forward groups of one shard after the other, as long as there is one to make."""
        while (ordinal := self._choose(recheck)) is not None:
            self.sink.begin(ordinal)
            for group in effective_groups(self._plan.groups(ordinal), batches):
                if self._is_overtaken(ordinal):
                    self._overtaken.add(ordinal)
                    return
                yield [self._plan.document(record) for record in group]
            self._made.add(ordinal)

    def settle(self) -> None:
        """Count what was made and delivered, once nothing is under way."""
        self._tally.settle(self._made, lost=self._workshop.lost | self._overtaken)
        self._overtaken.clear()

    def count_all(self) -> None:
        """Count all that was wanted, which is finished."""
        self._tally.finished(self._wanted)
        self._tally.tell()

    def wait(self, recheck: Recheck) -> bool:
        """Wait until there is a shard to make; False once all are finished."""
        told = False
        pause_s = SHORTEST_WAIT_S
        while True:
            if recheck.running and self._all_known():
                recheck.wait()
            if self._choose(recheck) is not None:
                return True
            if not self._missing(recheck):
                return False
            if not told:
                told = True
                self._report.phase("wait")
                self._workshop.report(replace(self._workshop.state, phase="wait", shard=None))
            self._clock.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_WAIT_S)

    def _choose(self, recheck: Recheck) -> int | None:
        missing = self._missing(recheck)
        if not missing:
            return None
        return next_shard(missing, self._in_hand(), rank=self._world.rank, world_size=self._world.size)

    def _missing(self, recheck: Recheck) -> frozenset[int]:
        """Wanted shards nobody finished, as far as is known; those made here are on their way."""
        if self._world.size == 1:  # nobody else is expected: nothing needs to be looked up
            finished = self._before - frozenset(recheck.missing())
        elif self._workshop.root() is not None:  # others needed this worker no more
            return frozenset()
        else:
            recheck.missing()
            finished = self._workshop.finished()
            self._tally.finished(finished & self._wanted)
        return self._wanted - finished - self._made

    def _is_overtaken(self, ordinal: int) -> bool:
        """Whether another worker finished the shard in hand meanwhile; looked up now and then."""
        now = self._clock.now()
        if self._world.size == 1 or now - self._looked < LONGEST_WAIT_S:
            return False
        self._looked = now
        return ordinal in self._workshop.finished()

    def _all_known(self) -> bool:
        return self._wanted <= self._before | self._made

    def _in_hand(self) -> dict[int, float]:
        """Shards other live workers are at and get on with, and how much of each is done."""
        if self._world.size == 1:
            return {}
        found: dict[int, float] = {}
        for worker in self._workshop.workers():
            state = worker.state
            if state.token == self._workshop.state.token or state.shard is None or not is_alive(worker):
                continue
            if self._movement.gets_on(state):
                part = state.shard_records / max(1, state.shard_total)
                found[state.shard] = max(part, found.get(state.shard, 0.0))
        return found

    def _added(self, ordinal: int, tokens: int, nbytes: int) -> None:
        self._tally.add(ordinal, tokens=tokens, nbytes=nbytes)
        self._report.times(self.meter.times())
