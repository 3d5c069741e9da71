"""Which process of how many this is: as told, or as launchers such as torchrun say in the environment."""

from __future__ import annotations

import os
from operator import index
from typing import NamedTuple, SupportsIndex

from kvformat.errors import make_error
from kvformat.spec import limits

__all__ = ["World", "whole", "world_of"]


class World(NamedTuple):
    """Rank of a process, counted from 0, and how many there are."""

    rank: int
    size: int


def world_of(rank: int | None = None, world_size: int | None = None) -> World:
    """As given; else from ``RANK`` and ``WORLD_SIZE``; else 0 of 1.

    Raises
    ------
    UsageError
        E081 for what makes no sense, and where several processes would take themselves for rank 0.
    """
    found = []
    for name, given, default in (("RANK", rank, "0"), ("WORLD_SIZE", world_size, "1")):
        text: object = os.environ.get(name, default) if given is None else given
        try:
            found.append(int(text) if isinstance(text, str) else whole(text))
        except (TypeError, ValueError):
            raise make_error("E081", f"{name.lower()} is an integer; found {text!r}") from None
    if not 0 <= found[0] < found[1] <= limits.MAX_INTEGER:
        raise make_error(
            "E081",
            f"rank {found[0]} of a world of {found[1]}, where ranks count from 0: give rank and world_size, "
            "or set RANK and WORLD_SIZE",
        )
    if found[1] > 1 and rank is None and "RANK" not in os.environ:
        # Else every process would take itself for rank 0, and do the same work.
        raise make_error(
            "E081", f"a world of {found[1]}, but of which rank this is nothing says: give rank, or set RANK"
        )
    return World(found[0], found[1])


def whole(value: object) -> int:
    """An ``int`` of what is one, numpy's included; TypeError for anything else."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError
    return int(index(value))
