"""What a worker carries from making shards to publishing them: how time passes for it, and what it knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["CLOCK", "LONGEST_WAIT_S", "SHORTEST_WAIT_S", "Clock", "Known"]

SHORTEST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
"""Between two looks at what other workers do: longer each time."""


class Clock(NamedTuple):
    """How time passes: seconds that only grow, and waiting for some to pass. Tests bring their own."""

    now: Callable[[], float] = time.monotonic
    wait: Callable[[float], object] = time.sleep


CLOCK = Clock()


class Known:
    """What a worker knows of shards that were finished when it came.

    Attributes
    ----------
    proved
        Those that were looked at again by this worker, or finished under its eyes.
    unproved
        The others: whether they are what their receipts say, other workers may have found out.
    """

    def __init__(self) -> None:
        self.proved: set[int] = set()
        self.unproved: set[int] = set()
