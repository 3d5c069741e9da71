"""Which layers a consumer is likely to ask for next. Pure: no tensors, no devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Generic, TypeVar

__all__ = ["Sweep"]

Unit = TypeVar("Unit", bound=Hashable)


class Sweep(Generic[Unit]):
    """A walk over layers, up or down, whose last step is expected to repeat.

    Where that leads out of the range, the walk is expected to turn. So a forward pass, the backward pass after it and
    a walk over every second layer all find the next layer prepared, the first access and a turn on the way excepted.

    Parameters
    ----------
    units
        For each position, in the order of the layers, what has to be on the device for it. Positions with equal data
        have equal units, which are held once.
    depth
        Most units to hold.
    """

    def __init__(self, units: Sequence[Unit], *, depth: int) -> None:
        self._units = tuple(units)
        self._depth = depth
        self._position: int | None = None
        self._step = 1

    def visit(self, position: int) -> list[Unit]:
        """Units to hold while ``position`` is used, its own first, then those that are expected soonest."""
        if self._position is not None and position != self._position:
            self._step = position - self._position
        self._position = position
        step, end = self._step, len(self._units)
        ahead = range(position, end if step > 0 else -1, step)
        behind = range(position - step, -1 if step > 0 else end, -step)
        wanted: dict[Unit, None] = {}
        for other in chain(ahead, behind):
            wanted[self._units[other]] = None
            if len(wanted) == self._depth:
                break
        return list(wanted)
