"""Extraction by the workers of a Ray cluster: each loads the model once, and makes the shards it is given."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvformat.errors import DatasetExistsError
from kvformat.extract.identify import tag_of
from kvformat.extract.options import ModelOptions, RayOptions, SourceOptions, TargetOptions, WorkOptions
from kvformat.extract.plan import Plan, open_plan
from kvformat.extract.prepare import PlanGiven, Prepared
from kvformat.extract.progress import Progress, Silent
from kvformat.extract.ray_engine import Work, run_with_ray
from kvformat.extract.reasoner import load_extractor, use_threads
from kvformat.extract.worker import Worker, open_worker
from kvformat.loader.world import World
from kvformat.read.opening import open_dataset
from kvformat.storage.remote import Remote
from kvformat.write.attach import attach_workshop
from kvformat.write.sealing import seal

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["extract_with_ray"]

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

    A plan that was made for this call is saved below the directory of temporary files, where workers of this machine
    find it; for a cluster of several, give one that lies where all of them find it.

    Raises
    ------
    KVFormatError
        As for :func:`kvformat.extract.ray_engine.run_with_ray`, and :func:`kvformat.write.sealing.seal`.
    """
    plan = ready.plan
    with ExitStack() as stack:
        path = _path_of(source)
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvformat-plan-"))) / "plan"
            plan.save(path)
        report.phase("extract", tokens=plan.num_tokens, nbytes=plan.nbytes)

        def done(ordinal: int) -> None:
            tokens, nbytes = plan.shard_size(ordinal)
            report.advance(tokens=tokens, nbytes=nbytes, computed=True)

        run_with_ray(
            range(plan.num_shards),
            partial(_begin, ready.model, ready.revision, str(path.absolute()), place, work),
            num_cpus=ray.num_cpus,
            num_gpus=ray.num_gpus,
            num_workers=ray.num_workers,
            address=ray.address,
            on_done=done,
        )
    report.phase("publish")
    with attach_workshop(target, plan, spool=place.spool) as workshop:
        seal(workshop, plan, allow_skips=work.allow_skips)
        workshop.remove()
    return open_dataset(target)


def _path_of(source: SourceOptions | PlanGiven) -> Path | None:
    return None if isinstance(source, SourceOptions | Plan) else Path(os.fspath(source))


class _Shards:
    """Makes the shards it is given; in a worker of the cluster."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, ordinals: Sequence[int]) -> None:
        self._worker.make(ordinals)


def _begin(model: ModelOptions, revision: str | None, path: str, place: TargetOptions, work: WorkOptions) -> Work:
    """Load the model, in a worker of the cluster."""
    plan = open_plan(path)
    use_threads(work.threads)
    extractor = load_extractor(model, plan, revision=revision)
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
            report=Silent(),
            spool=place.spool,
        )
    except DatasetExistsError:  # published meanwhile: whoever sealed it had all shards
        return lambda _ordinals: None
    return _Shards(worker)
