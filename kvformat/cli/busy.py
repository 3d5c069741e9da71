"""Whether a model on the CPU computed with more threads than were free, which can take many times as long."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from kvformat.extract import PipelineTimes

__all__ = ["Machine", "hint"]


class Machine(NamedTuple):
    """Cores this process may use, and the load average of the last minute."""

    cores: int
    load: float

    @classmethod
    def now(cls) -> Self:
        """As it is; without load where nobody knows."""
        try:
            load = os.getloadavg()[0]
        except OSError:
            load = 0.0
        return cls(len(os.sched_getaffinity(0)), load)


def hint(before: Machine, *, threads: int, spent: PipelineTimes) -> str | None:
    """What to try where others had at least half of the cores before, and the model more threads than were left.

    Parameters
    ----------
    threads
        With which the model computed, on the CPU.
    spent
        Its times: where something else than the model limits, there is nothing to try.
    """
    limit = spent.limit
    free = max(1, int(before.cores - before.load))
    if limit is None or limit.steps[0] != "model" or before.load < before.cores / 2 or threads <= free:
        return None
    return (
        f"hint: the machine was busy when this began (load {before.load:.1f} on {before.cores} cores), and the model "
        f"computed with {threads} threads, which then wait for each other: --threads {free} may be many times as fast"
    )
