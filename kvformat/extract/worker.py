"""A loaded model at the place where the shards of a plan are made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from kvformat.errors import KVFormatError, KVFormatWarning, make_error
from kvformat.extract.batch_check import Batches, check_batches, choose_batches
from kvformat.extract.identify import identity_of, needs_hashing, same_file
from kvformat.extract.options import WorkOptions
from kvformat.extract.plan import Plan
from kvformat.extract.progress import Progress
from kvformat.extract.publishing import seal_in_turn
from kvformat.extract.standing import Known
from kvformat.extract.tally import Tally
from kvformat.extract.working import make_shards
from kvformat.interfaces import Extractor
from kvformat.storage.remote import Remote
from kvformat.write.holding import Hold
from kvformat.write.opening import open_workshop
from kvformat.write.run import RunIdentity, listed
from kvformat.write.workshop import Workshop

__all__ = ["Worker", "open_worker"]

_MOST_NAMED = 4


class Worker:
    """Makes shards, and publishes. Made by :func:`open_worker`, used as a context manager."""

    def __init__(
        self,
        workshop: Workshop,
        plan: Plan,
        extractor: Extractor,
        *,
        batches: Batches,
        work: WorkOptions,
        report: Progress,
        tally: Tally,
    ) -> None:
        self._workshop = workshop
        self._plan = plan
        self._extractor = extractor
        self._batches = batches
        self._work = work
        self._report = report
        self._known = Known()
        self._tally = tally

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._workshop.__exit__(kind, error, traceback)

    def make(self, only: Collection[int] | None = None) -> None:
        """Make shards until all of the plan are finished, by whomever; or just ``only`` those.

        Raises
        ------
        KVFormatError
            Whatever extractor and storage raise. Finished shards stay staged.
        """
        make_shards(
            self._workshop,
            self._plan,
            self._extractor,
            world=self._work.world,
            allow_non_finite=self._work.allow_non_finite,
            batches=self._batches,
            on_error=self._work.on_error,
            allow_skips=self._work.allow_skips,
            report=self._report,
            known=self._known,
            tally=self._tally,
            only=only,
        )

    def publish(self) -> str | None:
        """Publish what all workers made; the dataset id. Then the staged work is removed by the last one to leave.

        None where a shard turned out damaged meanwhile: :meth:`make` it again, and then publish.

        Raises
        ------
        KVFormatError
            As for :func:`kvformat.write.sealing.seal`.
        """
        self._report.phase("publish")
        found = seal_in_turn(
            self._workshop, self._plan, allow_skips=self._work.allow_skips, report=self._report, known=self._known
        )
        if found is None:
            return None
        try:
            self._workshop.remove()
        except KVFormatError as error:
            message = f"published, but staged work stays ({error.message}); `kvformat clean` removes it"
            warnings.warn(KVFormatWarning(message, code="W002", path=error.path), stacklevel=2)
        return found


def open_worker(
    extractor: Extractor,
    plan: Plan,
    target: Path | Remote,
    work: WorkOptions,
    *,
    tag: str,
    report: Progress,
    spool: str | os.PathLike[str] | None = None,
    tally: Tally | None = None,
    hold: Hold | None = None,
    before: Callable[[RunIdentity], None] = lambda _run: None,
) -> Worker:
    """Join the workers of a plan with a loaded model.

    Documents are computed together where a trial shows that this changes nothing, or that is accepted by name.

    Parameters
    ----------
    tag
        What the values depend on besides plan, schema and context.
    tally
        Counts shards for whoever asks afterwards.
    hold
        On what is staged of the plan; let go once this worker has its own.
    before
        Told the run before anything is written.

    Raises
    ------
    DatasetExistsError
        E100 where a dataset is published already.
    KVFormatError
        As for :func:`kvformat.write.opening.open_workshop`.
    """
    if extractor.schema != plan.schema:
        raise make_error("E081", "the plan was made with another schema than the extractor's: plan with that one")
    if needs_hashing(extractor):
        report.phase("identify")
    batches = Batches(together=False, recorded="single")
    if plan.batch_size > 1:
        report.phase("check")
        batches = choose_batches(check_batches(extractor, plan), accept=work.accept_batches)
    run, covered = identity_of(extractor, plan, tag=tag, batches=batches.recorded)
    before(run)
    report.phase("extract", tokens=plan.num_tokens, nbytes=plan.nbytes)
    workshop = open_workshop(
        target,
        run,
        plan,
        covered=covered,
        rank=work.world.rank,
        world_size=work.world.size,
        spool=spool,
        same_file=same_file,
        since=None if hold is None else hold.since,
    )
    if hold is not None:
        hold.release()
    if work.world.rank == 0:
        _tell_beside(workshop)
    tally = Tally(plan, report) if tally is None else tally
    return Worker(workshop, plan, extractor, batches=batches, work=work, report=report, tally=tally)


def _tell_beside(workshop: Workshop) -> None:
    """Warn of finished shards that are left as they are: a forgotten option is noticed before hours are spent."""
    for other in workshop.beside:
        if other.num_finished:
            shards = "1 finished shard" if other.num_finished == 1 else f"{other.num_finished:,} finished shards"
            differences = listed(other.differences, most=_MOST_NAMED)
            message = (
                f"{shards} of another run are staged here, and not continued: {differences}. This run makes all of "
                "it; to go on with that one, interrupt and give its options; `kvformat status` shows what is left, "
                "`kvformat clean` removes it"
            )
            warnings.warn(KVFormatWarning(message, code="W002", path=str(other.place)), stacklevel=2)
