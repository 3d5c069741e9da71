"""A clock for tests of waiting."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """Time passes where somebody sleeps.

    Attributes
    ----------
    slept
        Seconds asked for, one after the other.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += max(seconds, 1e-6)
