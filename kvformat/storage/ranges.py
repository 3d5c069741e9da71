"""Which requests bring which bytes: neighbours together, large runs in equal parts. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Request", "plan_parts", "plan_requests"]

_ALIGN = 4096


class Request(NamedTuple):
    """One ranged request, and what of its answer is wanted.

    Attributes
    ----------
    pieces
        (start in the object, number of bytes), ascending; the first begins and the last ends with the request.
    """

    start: int
    nbytes: int
    pieces: tuple[tuple[int, int], ...]


def plan_requests(wanted: Iterable[tuple[int, int]], *, request_nbytes: int, gap_nbytes: int) -> list[Request]:
    """Requests that bring every byte wanted exactly once, in ascending order.

    Parameters
    ----------
    wanted
        (start, number of bytes), in any order; empty ones are left out.
    request_nbytes
        Most bytes of one request.
    gap_nbytes
        Neighbours no further apart than this come in one request; what lies between them is dropped.

    Raises
    ------
    ValueError
        Where ranges overlap, or a number is negative.
    """
    requests: list[Request] = []
    for run in _runs(wanted, gap_nbytes):
        start, end = run[0][0], sum(run[-1])
        step = _step(end - start, request_nbytes)
        pieces = iter(run)
        piece: tuple[int, int] | None = next(pieces)
        for lower in range(start, end, step):
            taken = []
            while piece is not None and piece[0] < lower + step:
                upper = min(sum(piece), lower + step)
                taken.append((piece[0], upper - piece[0]))
                piece = (upper, sum(piece) - upper) if upper < sum(piece) else next(pieces, None)
            if taken:  # else a gap fills this part
                requests.append(Request(taken[0][0], sum(taken[-1]) - taken[0][0], tuple(taken)))
    return requests


def plan_parts(nbytes: int, *, part_nbytes: int, most_parts: int, align: int = 1 << 20) -> list[tuple[int, int]]:
    """(start, number of bytes) of the parts of an upload; larger than asked for where there would be too many."""
    if nbytes > part_nbytes * most_parts:
        part_nbytes = -(-nbytes // most_parts)
        part_nbytes += -part_nbytes % align
    return [(start, min(part_nbytes, nbytes - start)) for start in range(0, nbytes, part_nbytes)]


def _runs(wanted: Iterable[tuple[int, int]], gap_nbytes: int) -> list[list[tuple[int, int]]]:
    """Neighbours together, ascending."""
    runs: list[list[tuple[int, int]]] = []
    end = 0
    for start, nbytes in sorted(wanted):
        if start < 0 or nbytes < 0:
            raise ValueError(f"a range of {nbytes} bytes from {start}")
        if not nbytes:
            continue
        if runs and start < end:
            raise ValueError(f"ranges overlap: one ends at {end}, the next begins at {start}")
        if runs and start - end <= gap_nbytes:
            _append(runs[-1], start, nbytes)
        else:
            runs.append([(start, nbytes)])
        end = start + nbytes
    return runs


def _append(run: list[tuple[int, int]], start: int, nbytes: int) -> None:
    """Join what touches: one piece of a record's slabs is written at once, not slab by slab."""
    last: Sequence[int] = run[-1]
    if last[0] + last[1] == start:
        run[-1] = (last[0], last[1] + nbytes)
    else:
        run.append((start, nbytes))


def _step(nbytes: int, request_nbytes: int) -> int:
    """Size of the parts of a run: as few as the bound allows, as equal as the alignment allows."""
    step = -(-nbytes // -(-nbytes // request_nbytes))
    return min(step + -step % _ALIGN, request_nbytes)
