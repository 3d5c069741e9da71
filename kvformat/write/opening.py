"""Joining the workers of a run, or beginning it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.paths import ROOT
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.write.finisher import MOST_WAITING
from kvformat.write.found import FoundRun, refuse_other_plans, work_beside
from kvformat.write.local_shared import LocalShared
from kvformat.write.local_workers import find_runs as find_local
from kvformat.write.planned import Planned
from kvformat.write.remote_publish import read_root
from kvformat.write.remote_shared import RemoteShared
from kvformat.write.remote_workers import find_runs as find_remote
from kvformat.write.run import RunIdentity, SameFile, run_differs
from kvformat.write.shared import Shared
from kvformat.write.spool import SpoolFiles
from kvformat.write.spool_places import spool_directory
from kvformat.write.worker_state import Phase, WorkerState
from kvformat.write.workshop import Workshop

__all__ = ["find_runs", "open_workshop", "place_of"]


def open_workshop(
    target: Path | Remote,
    run: RunIdentity,
    planned: Planned,
    *,
    covered: Mapping[str, bytes],
    rank: int = 0,
    world_size: int = 1,
    phase: Phase = "start",
    spool: str | os.PathLike[str] | None = None,
    max_waiting_nbytes: int | None = None,
    same_file: SameFile | None = None,
    files: LocalFiles | None = None,
    keep_open: bool = True,
    published: bool = False,
    since: WorkerState | None = None,
    clock: Callable[[], float] = time.time,
) -> Workshop:
    """Join the workers of a run, or begin it: whatever earlier runs of the same key finished is continued.

    Parameters
    ----------
    target
        Directory of the dataset, made where it does not exist, or its URL.
    covered
        Covered files by label, those that ``run`` names.
    rank, world_size
        Which worker this is, of how many. Only told to others: no worker waits for another.
    phase
        What it begins with.
    spool
        Of an object store, as for :func:`kvformat.create`.
    max_waiting_nbytes
        Most bytes of complete shards that wait for helper threads; three full shards unless given.
    same_file
        Whether two contents of a covered file, the staged one and one's own, mean the same although their bytes
        differ; then the staged one counts.
    files
        Operations that change the disk; tests inject their own.
    keep_open
        Leave the client of an object store to the caller.
    published
        Also where a dataset is published already.
    since
        What this worker said of itself earlier, while it loaded its model: it has been there since.
    clock
        Seconds since 1970.

    Raises
    ------
    DatasetExistsError
        E100 where a dataset is published there.
    ConflictError
        E117 where workers of another plan are at work at the same location, or ``kvformat clean`` is.
    IdentityError
        E120 where the staged run is another one, or ``planned`` is not its plan; where workers of the same plan live
        that make another run; and, with several workers, where anything of such a run is staged. Beside what one left
        that lives no more, a single worker begins anew, see :attr:`Workshop.beside`.
    FormatError
        Whatever a reader would refuse of the manifest.
    KVFormatError
        E116, E200, E201, E203, E207 to E209.
    """
    if not 0 <= rank < world_size:
        raise make_error("E081", f"rank must be 0 to world_size - 1, found {rank} of {world_size}")
    if planned.digest != run.plan:
        raise run_differs([f"plan ({planned.digest} here, {run.plan} there)"], place_of(target))
    run.draft(place_of(target), covered)
    now = clock()
    state = WorkerState.of_this_process(rank, world_size, phase=phase, now=now)
    if not published:
        _require_free(target)
    refuse_other_plans(find_runs(target, spool=spool), run.plan, place_of(target), since=since, now=now)
    shared: Shared
    if isinstance(target, Path):
        local = files or LocalFiles()
        shared = LocalShared.open(target, run, covered, state, files=local, same_file=same_file)
    else:
        base = spool_directory(spool)
        local = files or SpoolFiles()
        shared = RemoteShared.open(target, run, covered, state, base=base, files=local, same_file=same_file)
    try:
        if not published:
            _require_free(target)  # the last ones of a run may have left meanwhile
        found = shared.found()
        refuse_other_plans(found, run.plan, place_of(target), since=since or state, now=now)
        others = work_beside(shared.run, found)
        for other in others:
            if other.same_plan and (world_size > 1 or other.num_alive):
                raise run_differs(list(other.differences), other.place)
    except BaseException:
        with contextlib.suppress(KVFormatError, OSError):  # the first failure says more
            shared.remove(unpublished=True)
        raise
    waiting = MOST_WAITING * (run.shard_nbytes + run.header_size)
    return Workshop(
        shared,
        planned,
        state,
        beside=others,
        max_waiting_nbytes=waiting if max_waiting_nbytes is None else max_waiting_nbytes,
        clock=clock,
        close=lambda: None if keep_open or isinstance(target, Path) else target.close(),
    )


def place_of(target: Path | Remote) -> Path | str:
    """Path or URL, for messages."""
    return target if isinstance(target, Path) else target.path("")


def _require_free(target: Path | Remote) -> None:
    if isinstance(target, Path):
        with translated(target):
            there = (target / ROOT).exists()
    else:
        there = read_root(target) is not None
    if there:
        raise make_error("E100", "a dataset is here already; choose another location", path=place_of(target))


def find_runs(target: Path | Remote, *, spool: str | os.PathLike[str] | None = None) -> list[FoundRun]:
    """Runs whose work is staged at a location, without disturbing it."""
    if isinstance(target, Path):
        return find_local(target)
    return find_remote(target, base=spool_directory(spool))
