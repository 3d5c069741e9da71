"""The job of a worker with a plan and a loaded model: the published dataset of that plan, whoever made it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

from kvformat.errors import DatasetExistsError
from kvformat.extract.finished import check_comparable, check_context, check_plan, check_schema
from kvformat.extract.held import hold_of
from kvformat.extract.options import WorkOptions
from kvformat.extract.plan import Plan
from kvformat.extract.progress import Progress, Silent
from kvformat.extract.tally import Tally
from kvformat.extract.worker import open_worker
from kvformat.interfaces import Extractor
from kvformat.loader.world import world_of
from kvformat.read.dataset import Dataset
from kvformat.read.opening import open_dataset
from kvformat.storage.readers import Location, remote_of
from kvformat.storage.remote import Remote
from kvformat.write.holding import Hold
from kvformat.write.prepared import check_place
from kvformat.write.run import RunIdentity

__all__ = ["extract_plan", "make_dataset"]


def extract_plan(
    extractor: Extractor,
    plan: Plan,
    out: Location,
    *,
    spool: str | os.PathLike[str] | None = None,
    tag: str = "",
    rank: int | None = None,
    world_size: int | None = None,
    accept_batches: bool = False,
    on_error: Literal["fail", "skip"] = "fail",
    allow_skips: bool = False,
    allow_non_finite: Collection[str] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Extract the documents of a plan with any extractor, and publish.

    Parameters
    ----------
    out
        As for :func:`kvformat.extract.run`; a :class:`~kvformat.storage.remote.Remote` for a URL with options of its
        own.
    tag
        Part of the run's identity: runs with different tags never continue each other. Where the context is unknown
        and the extractor has no ``values_digest``, nothing else keeps two models apart: name here what determines the
        values.
    spool, rank, world_size, accept_batches, on_error, allow_skips, allow_non_finite, progress
        As for :func:`kvformat.extract.run`.

    Raises
    ------
    UsageError
        E081 for options that make no sense, and an ``out`` in the directory of a plan.
    KVFormatError
        Whatever extractor and storage raise. Finished shards stay staged, and the same call resumes. On a finished
        dataset it returns that where plan and context are equal, E118 otherwise, as for :func:`kvformat.extract.run`.
    """
    target = remote_of(out)
    if isinstance(target, Path):
        check_place(target, what="a dataset")
    work = WorkOptions(
        world=world_of(rank, world_size),
        accept_batches=accept_batches,
        on_error=on_error,
        allow_skips=allow_skips,
        allow_non_finite=tuple(allow_non_finite),
    )
    with hold_of(plan, target, work, spool=spool) as hold:
        return make_dataset(
            extractor, plan, target, work, tag=tag, spool=spool, report=progress or Silent(), hold=hold
        )


def make_dataset(
    extractor: Extractor,
    plan: Plan,
    target: Path | Remote,
    work: WorkOptions,
    *,
    tag: str,
    spool: str | os.PathLike[str] | None,
    report: Progress,
    hold: Hold,
    before: Callable[[RunIdentity], None] = lambda _run: None,
) -> Dataset:
    """The published dataset; where it is there already, it must be the one this would have made.

    Parameters
    ----------
    hold
        On what is staged of the plan, until its workers are joined.
    tag, spool, report, before
        As for :func:`kvformat.extract.worker.open_worker`.

    Raises
    ------
    KVFormatError
        As for :func:`extract_plan`.
    """
    tally = Tally(plan, report)
    options: dict[str, Any] = {"tag": tag, "spool": spool, "report": report, "before": before, "hold": hold}
    try:
        with open_worker(extractor, plan, target, work, tally=tally, **options) as worker:
            worker.make()
            while worker.publish() is None:
                worker.make()
    except DatasetExistsError:
        found = open_dataset(target)
        _check_same(found, plan)
        # A worker that comes late has no means to compare an unknown context: its plan is that of the others.
        if work.world.size == 1 or extractor.context.kind != "unknown":
            check_comparable(found, "unknown" if extractor.context.kind == "unknown" else "derive")
            check_context(found, extractor)
        tally.finished(range(plan.num_shards))
        tally.tell()
    else:
        found = open_dataset(target)
        if work.world.size > 1:  # another worker may have published it, and not of this plan
            _check_same(found, plan)
    if len(found.manifest.skipped) > len(plan.skipped):
        tally.measure(lambda ordinal: found.index.shard(ordinal).size - plan.header_size)
    return found


def _check_same(dataset: Dataset, plan: Plan) -> None:
    """E118 where a dataset is not what this plan makes."""
    check_schema(dataset, plan.schema)
    check_plan(dataset, plan)
