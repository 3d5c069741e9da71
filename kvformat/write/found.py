"""Runs whose work is staged at a location: which stand in the way of another one, and which lie beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvformat.errors import make_error
from kvformat.write.at_work import at_work
from kvformat.write.run import RunIdentity, differences
from kvformat.write.worker_state import Worker, WorkerState, is_alive, is_loading

__all__ = ["Beside", "FoundRun", "refuse_other_plans", "work_beside"]


class FoundRun(NamedTuple):
    """Staged work of one run.

    Attributes
    ----------
    num_finished
        Shards there is a receipt for.
    workers
        What its workers said of themselves, whether they live or not.
    """

    place: Path | str
    run: RunIdentity
    num_finished: int
    workers: tuple[Worker, ...]


class Beside(NamedTuple):
    """Staged work that another run cannot continue, and in what the two runs differ."""

    place: Path | str
    same_plan: bool
    num_finished: int
    num_alive: int
    differences: tuple[str, ...]


def work_beside(run: RunIdentity, found: Iterable[FoundRun]) -> tuple[Beside, ...]:
    """Work of other runs that has receipts, or workers that may live.

    Those that only load a model are not counted: of which run they are, they find out themselves.
    """
    beside = []
    for other in found:
        alive = sum(is_alive(worker) and not is_loading(worker.state) for worker in other.workers)
        if other.run.key != run.key and (other.num_finished or alive):
            same = other.run.plan == run.plan
            beside.append(Beside(other.place, same, other.num_finished, alive, tuple(differences(run, other.run))))
    return tuple(beside)


def refuse_other_plans(
    found: Iterable[FoundRun], plan: str, place: Path | str, *, since: WorkerState | None = None, now: float
) -> None:
    """Refuse where workers of another plan live: of the datasets that they and we would make, one only can be there.

    Parameters
    ----------
    since
        Of a worker that has spoken already. Of several that began at the same moment, and see each other, the first
        one stays; else each might be refused because of the others.
    now
        Seconds since 1970.

    Raises
    ------
    ConflictError
        E117.
    """
    for other in found:
        workers = [worker for worker in other.workers if is_alive(worker)]
        if since is not None and _begins(since):
            own = (since.started, since.token)
            workers = [one for one in workers if not _begins(one.state) or (one.state.started, one.state.token) < own]
        elif since is not None:  # whoever begins at the same moment gives way
            workers = []
        if other.run.plan != plan and workers:
            message = (
                f"another plan is being made here: {other.run.plan[:16]}, this one is {plan[:16]}; its "
                f"{at_work(workers, now=now, then='run this again')}; or choose another location"
            )
            raise make_error("E117", message, path=place)


def _begins(state: WorkerState) -> bool:
    return state.phase == "start" or is_loading(state)
