"""The distribution of token lengths: counted exactly, drawn as bars."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

__all__ = ["Bin", "Lengths", "bars", "lengths_of"]

_BINS = 10
_BLOCKS = " ▏▎▍▌▋▊▉█"


class Bin(Struct, frozen=True, kw_only=True):
    """Records of ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    records: int


class Lengths(Struct, frozen=True, kw_only=True):
    """Token lengths of all records. A quantile is the length that so many records do not exceed (nearest rank)."""

    shortest: int
    median: int
    mean: float
    p95: int
    longest: int
    bins: tuple[Bin, ...]


def lengths_of(parts: Iterable[NDArray[np.uint32]]) -> Lengths:
    """Count lengths part by part. There is at least one record."""
    values: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    counts: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    for part in parts:
        more_values, more_counts = np.unique(part, return_counts=True)
        merged, places = np.unique(np.concatenate((values, more_values.astype(np.int64))), return_inverse=True)
        summed = np.zeros(len(merged), dtype=np.int64)
        np.add.at(summed, places, np.concatenate((counts, more_counts)))
        values, counts = merged, summed
    ranks = np.cumsum(counts)
    total = int(ranks[-1])

    def quantile(tenthousandths: int) -> int:
        rank = -(-total * tenthousandths // 10_000)
        return int(values[np.searchsorted(ranks, rank)])

    return Lengths(
        shortest=int(values[0]),
        median=quantile(5000),
        mean=float((values * counts).sum() / total),
        p95=quantile(9500),
        longest=int(values[-1]),
        bins=tuple(
            Bin(first=first, last=last, records=int(counts[(values >= first) & (values <= last)].sum()))
            for first, last in _edges(int(values[0]), int(values[-1]))
        ),
    )


def bars(bins: Iterable[Bin], *, width: int, blocks: bool = True) -> list[str]:
    """One line a bin: its range, its records, a bar of at most ``width`` columns.

    Parameters
    ----------
    blocks
        Draw with block characters, an eighth of a column fine; otherwise with ``#``.
    """
    bins = tuple(bins)
    most = max(found.records for found in bins)
    ranges = [f"{b.first:,}" if b.first == b.last else f"{b.first:,} - {b.last:,}" for b in bins]
    counts = [f"{b.records:,}" for b in bins]
    left, right = max(map(len, ranges)), max(map(len, counts))
    return [
        f"{text:>{left}}  {count:>{right}}  {_bar(found.records, most, width, blocks=blocks)}".rstrip()
        for found, text, count in zip(bins, ranges, counts, strict=True)
    ]


def _bar(records: int, most: int, width: int, *, blocks: bool) -> str:
    if not blocks:
        return "#" * max(round(records * width / most), records > 0)
    eighths = max(round(records * width * 8 / most), records > 0)
    return _BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _edges(shortest: int, longest: int) -> list[tuple[int, int]]:
    """Ranges that cover everything: of equal width, or doubling where lengths differ by more than a factor of 16."""
    if longest > 16 * max(shortest, 1):
        firsts = [1 << bit for bit in range(max(shortest, 1).bit_length() - 1, longest.bit_length())]
        if shortest == 0:
            firsts[0] = 0
        return list(zip(firsts, [first - 1 for first in firsts[1:]] + [2 * firsts[-1] - 1], strict=True))
    step = -(-(longest - shortest + 1) // _BINS)
    return [(first, first + step - 1) for first in range(shortest, longest + 1, step)]
