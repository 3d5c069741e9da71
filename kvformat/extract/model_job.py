"""The job of a worker from its options on: what is staged is held, the model loaded, and the dataset made."""

from __future__ import annotations

from pathlib import Path

from kvformat.extract.finished import check_context, check_directory, check_names
from kvformat.extract.held import LettingGo, hold_of
from kvformat.extract.identify import tag_of
from kvformat.extract.options import ModelOptions, PlanOptions, RayOptions, SourceOptions, TargetOptions, WorkOptions
from kvformat.extract.plan_job import make_dataset
from kvformat.extract.prepare import PlanGiven, Prepared, prepare, space_for
from kvformat.extract.progress import Progress
from kvformat.extract.reasoner import load_extractor, use_threads
from kvformat.extract.size import require_space
from kvformat.interfaces import Extractor
from kvformat.read.dataset import Dataset
from kvformat.write.run import RunIdentity

__all__ = ["run_model"]


def run_model(
    model: ModelOptions,
    source: SourceOptions | PlanGiven,
    options: PlanOptions,
    place: TargetOptions,
    work: WorkOptions,
    report: Progress,
    ray: RayOptions | None,
) -> Dataset:
    """Prepare, hold what is staged, load the model, and make the dataset; as :func:`kvformat.extract.run`, by options.

    Raises
    ------
    KVFormatError
        As there.
    """
    target = place.target()
    space = place.space(target)
    several = work.world.size > 1
    report.phase("read")
    if not isinstance(target, Path):
        check_directory(space)  # of the spool
    ready = prepare(model, source, options, target, probe=True)
    check_names(ready.plan.schema, work.allow_non_finite)
    if ready.finished is not None:
        check_context(ready.finished, _loaded(ready, work, report))
        return ready.finished
    require_space(space_for(ready, place, target, in_work=several), space)
    with hold_of(ready.plan, target, work, spool=place.spool) as hold:
        if ray is not None:
            from kvformat.extract.ray_job import extract_with_ray

            return extract_with_ray(ready, source, place, target, work, ray, report=LettingGo(report, hold))
        extractor = _loaded(ready, work, report)

        def before(run: RunIdentity) -> None:
            # Other weights continue nothing: what was counted above may have to be written again.
            require_space(space_for(ready, place, target, key=run.key, in_work=several), space)

        return make_dataset(
            extractor,
            ready.plan,
            target,
            work,
            tag=tag_of(extractor, ready.model),
            spool=place.spool,
            report=report,
            before=before,
            hold=hold,
        )


def _loaded(ready: Prepared, work: WorkOptions, report: Progress) -> Extractor:
    report.phase("load")
    use_threads(work.threads)
    return load_extractor(ready.model, ready.plan, revision=ready.revision)
