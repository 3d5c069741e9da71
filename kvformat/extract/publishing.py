"""Publishing what all workers of a plan made: one of them does, once it is proved."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from kvformat.errors import ConflictError
from kvformat.extract.assignment import Movement
from kvformat.extract.plan import Plan
from kvformat.extract.progress import Progress
from kvformat.extract.standing import CLOCK, LONGEST_WAIT_S, SHORTEST_WAIT_S, Clock, Known
from kvformat.write.sealing import seal
from kvformat.write.worker_state import WorkerState, is_alive
from kvformat.write.workshop import Workshop

__all__ = ["seal_in_turn"]


def seal_in_turn(
    workshop: Workshop,
    plan: Plan,
    *,
    allow_skips: bool,
    report: Progress,
    known: Known | None = None,
    clock: Clock = CLOCK,
) -> str | None:
    """Publish what all workers made: the first of them that lives does, and the others wait for it.

    They do not wait for ever: after a while, the next one takes the first for one that hangs, and publishes too.
    Shards of earlier runs that no worker of this one looked at are hashed first.

    Returns
    -------
    str or None
        The dataset id; None where a shard turned out damaged, or is gone, and must be made again.

    Raises
    ------
    KVFormatError
        As for :func:`kvformat.write.sealing.seal`.
    """
    unproved = set() if known is None else known.unproved
    movement = Movement(clock.now)
    pause_s = SHORTEST_WAIT_S
    workshop.report(replace(workshop.state, phase="seal", shard=None))
    while True:
        root = workshop.root()
        if root is not None:
            return hashlib.sha256(root).hexdigest()
        if _leads(workshop, movement):
            if not _prove(workshop, unproved, allow_skips=allow_skips, report=report):
                return None
            try:
                return seal(workshop, plan, allow_skips=allow_skips)
            except ConflictError as error:
                if error.code != "E119" or len(workshop.finished()) >= plan.num_shards:
                    raise
                return None
        clock.wait(pause_s)
        pause_s = min(2 * pause_s, LONGEST_WAIT_S)


def _prove(workshop: Workshop, unproved: set[int], *, allow_skips: bool, report: Progress) -> bool:
    """Look again at the shards for which no worker that is there vouches; whether all of them may stay."""
    own = workshop.state
    vouching = {
        worker.state.rank
        for worker in workshop.workers()
        if worker.state.proved and worker.state.world_size == own.world_size and is_alive(worker)
    }
    left = [ordinal for ordinal in sorted(unproved) if ordinal % own.world_size not in vouching - {own.rank}]
    if left:
        report.phase("prove")
    for ordinal in left:
        if not workshop.check(ordinal, allow_skips=allow_skips):
            return False
        unproved.discard(ordinal)
    return True


def _leads(workshop: Workshop, movement: Movement) -> bool:
    """Whether no worker before this one is at the same. If two believe it, they publish the same."""
    own = _place(workshop.state)
    getting_on = [  # all are looked at: several may hang
        movement.gets_on(worker.state)
        for worker in workshop.workers()
        if worker.state.phase == "seal" and _place(worker.state) < own and is_alive(worker)
    ]
    return not any(getting_on)


def _place(state: WorkerState) -> tuple[int, str]:
    return state.rank, state.token
