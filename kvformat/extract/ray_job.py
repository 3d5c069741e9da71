"""Extraction by the workers of a Ray cluster: each loads the model once, and makes the shards it is given."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvformat.errors import DatasetExistsError, make_error
from kvformat.extract.identify import tag_of
from kvformat.extract.meter import PipelineTimes
from kvformat.extract.options import ModelOptions, RayOptions, SourceOptions, TargetOptions, WorkOptions
from kvformat.extract.plan import Plan, open_plan
from kvformat.extract.prepare import PlanGiven, Prepared
from kvformat.extract.progress import Progress, Silent
from kvformat.extract.ray_engine import Work, run_with_ray
from kvformat.extract.reasoner import load_extractor, use_threads
from kvformat.extract.recheck import Recheck
from kvformat.extract.tally import Tally
from kvformat.extract.worker import Worker, open_worker
from kvformat.loader.world import World
from kvformat.read.opening import open_dataset
from kvformat.storage.remote import Remote
from kvformat.write.attach import attach_workshop
from kvformat.write.opening import find_runs
from kvformat.write.sealing import seal
from kvformat.write.workshop import Workshop

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["added", "extract_with_ray"]

_SEVERAL = World(0, 2)
"""What each worker takes itself for: one of several, who refuse to work beside another model's."""


def extract_with_ray(
    ready: Prepared,
    source: SourceOptions | PlanGiven,
    place: TargetOptions,
    target: Path | Remote,
    work: WorkOptions,
    ray: RayOptions,
    *,
    report: Progress,
) -> Dataset:
    """Have Ray workers make all shards of a plan, and publish them.

    Shards of an earlier run are looked at again meanwhile; what is damaged, workers make anew.

    A plan that was made for this call is saved below the directory of temporary files, where workers of this machine
    find it; for a cluster of several, give one that lies where all of them find it.

    Raises
    ------
    UsageError
        E081 where this process is one of several: each of them would have all shards made.
    KVFormatError
        As for :func:`kvformat.extract.ray_engine.run_with_ray`, and :func:`kvformat.write.sealing.seal`.
    """
    if work.world.size > 1:
        message = (
            f"this is one process of {work.world.size} (rank and world_size, RANK and WORLD_SIZE), and a Ray cluster "
            "needs one alone, which has its workers make all shards: start it without torchrun"
        )
        raise make_error("E081", message)
    plan = ready.plan
    with ExitStack() as stack:
        path = _path_of(source)
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvformat-plan-"))) / "plan"
            plan.save(path)
        report.phase("extract", tokens=plan.num_tokens, nbytes=plan.nbytes)
        counts = _Counts(plan, report)
        make = partial(
            run_with_ray,
            prepare=partial(_begin, ready.model, ready.revision, str(path.absolute()), place, work),
            num_cpus=ray.num_cpus,
            num_gpus=ray.num_gpus,
            num_workers=ray.num_workers,
            address=ray.address,
            on_done=counts.done,
        )
        with _earlier(target, plan, spool=place.spool) as workshop:
            before = frozenset[int]() if workshop is None else workshop.finished()
            counts.begin(before)
            # One worker begins in any case: only a loaded model tells whether it is that of the staged work.
            tasks = [ordinal for ordinal in range(plan.num_shards) if ordinal not in before] or [plan.num_shards - 1]
            if workshop is None:
                make(tasks)
            else:
                left = sorted(before.difference(tasks))
                with Recheck(workshop, left, allow_skips=work.allow_skips) as recheck:
                    make(tasks)
                    recheck.wait()
                    again = sorted(recheck.missing())
                make(again)
    report.phase("publish")
    with attach_workshop(target, plan, spool=place.spool) as workshop:
        seal(workshop, plan, allow_skips=work.allow_skips)
        workshop.remove()
    found = open_dataset(target)
    counts.end(found)
    return found


@contextmanager
def _earlier(target: Path | Remote, plan: Plan, *, spool: str | os.PathLike[str] | None) -> Iterator[Workshop | None]:
    """A hold on the one run of a plan that is staged; None where there is none, or the workers have to tell which."""
    found = [one for one in find_runs(target, spool=spool) if one.run.plan == plan.digest]
    if len(found) != 1:
        yield None
        return
    with attach_workshop(target, plan, spool=spool) as workshop:
        workshop.report(replace(workshop.state, phase="wait"))  # nobody is to wait for it
        yield workshop


class _Counts:
    """Adds up what the workers of the cluster did, and tells it."""

    def __init__(self, plan: Plan, report: Progress) -> None:
        self._plan = plan
        self._report = report
        self._tally = Tally(plan, report)
        self._times = PipelineTimes()

    def begin(self, before: Collection[int]) -> None:
        """Count shards that are there."""
        self._tally.keep(before)

    def done(self, ordinal: int, times: PipelineTimes) -> None:
        """Count a shard by what a worker says it took: nothing where it was there."""
        self._times = added(self._times, times)
        self._report.times(self._times)
        if times.records:
            tokens, nbytes = self._plan.shard_size(ordinal)
            self._tally.add(ordinal, records=times.records, tokens=tokens, nbytes=nbytes)
            self._tally.settle([ordinal], lost=())
        else:
            self._tally.keep([ordinal])

    def end(self, published: Dataset) -> None:
        """Tell how it stands."""
        self._tally.measure(lambda ordinal: published.index.shard(ordinal).size - self._plan.header_size)


def added(first: PipelineTimes, second: PipelineTimes) -> PipelineTimes:
    """Times of two workers that ran beside each other: their seconds add up, and shares are those of both."""
    counted = [name for name in first.__struct_fields__ if name != "device_timed"]
    sums = {name: getattr(first, name) + getattr(second, name) for name in counted}
    return PipelineTimes(**sums, device_timed=first.device_timed or second.device_timed)


def _path_of(source: SourceOptions | PlanGiven) -> Path | None:
    return None if isinstance(source, SourceOptions | Plan) else Path(os.fspath(source))


class _Last(Silent):
    """Keeps the times it was told last."""

    def __init__(self) -> None:
        self.last = PipelineTimes()

    def times(self, times: PipelineTimes) -> None:
        """Keep them."""
        self.last = times


class _Shards:
    """Makes the shards it is given, and gives back the times of that; in a worker of the cluster."""

    def __init__(self, worker: Worker, kept: _Last) -> None:
        self._worker = worker
        self._kept = kept

    def __call__(self, ordinals: Sequence[int]) -> PipelineTimes:
        self._worker.make(ordinals)
        return self._kept.last


def _begin(model: ModelOptions, revision: str | None, path: str, place: TargetOptions, work: WorkOptions) -> Work:
    """Load the model, in a worker of the cluster."""
    plan = open_plan(path)
    use_threads(work.threads)
    extractor = load_extractor(model, plan, revision=revision)
    kept = _Last()
    try:
        worker = open_worker(
            extractor,
            plan,
            place.target(),
            WorkOptions(
                world=_SEVERAL,
                accept_batches=work.accept_batches,
                on_error=work.on_error,
                allow_skips=work.allow_skips,
                allow_non_finite=work.allow_non_finite,
            ),
            tag=tag_of(extractor, model),
            report=kept,
            spool=place.spool,
        )
    except DatasetExistsError:  # published meanwhile: whoever sealed it had all shards
        return lambda _ordinals: PipelineTimes()
    return _Shards(worker, kept)
