"""Micro-batches: independent blocks of an epoch's items, each cut into batches by itself (SPEC.md, C.4).

A block depends on nothing before it, so any batch is found without replaying an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvformat.read.recent import Recent

__all__ = ["BLOCK", "Blocks", "FixedCount", "TokenBudget", "first_fit"]

Numbers = NDArray[np.int64]

BLOCK = 4096
"""Items of a block, but for the last of an epoch; of a fixed count, the multiple of it that reaches this."""

_KEPT = 4


class Blocks(Protocol):
    """How an epoch is cut into blocks, and blocks into batches."""

    num_blocks: int

    def count(self, epoch: int, block: int) -> int:
        """Batches of a block."""
        ...

    def batch(self, epoch: int, block: int, number: int) -> Numbers:
        """Items of a batch, in order."""
        ...


class FixedCount:
    """Batches of so many items; only the last of an epoch may have fewer.

    Parameters
    ----------
    items
        Items at positions ``start`` to ``stop`` of an epoch.
    length
        Items of an epoch.
    batch_size
        Items of a batch.
    drop_last
        Leave out a last batch that has fewer.
    """

    def __init__(
        self, items: Callable[[int, int, int], Numbers], *, length: int, batch_size: int, drop_last: bool
    ) -> None:
        self._items = items
        self._size = batch_size
        self._batches = length // batch_size if drop_last else -(-length // batch_size)
        self._length = length
        self._per_block = -(-BLOCK // batch_size)
        self._kept: tuple[tuple[int, int], Numbers] | None = None
        self.num_blocks = -(-self._batches // self._per_block)

    def count(self, epoch: int, block: int) -> int:  # noqa: ARG002 - the count is the same in every epoch
        """Batches of a block."""
        return min(self._per_block, self._batches - block * self._per_block)

    def batch(self, epoch: int, block: int, number: int) -> Numbers:
        """Items of a batch, in order."""
        kept = self._kept  # once: iterations in other threads may put another block there
        if kept is None or kept[0] != (epoch, block):
            start = block * self._per_block * self._size
            stop = min(start + self._per_block * self._size, self._length)
            self._kept = kept = (epoch, block), self._items(epoch, start, stop)
        return kept[1][number * self._size : (number + 1) * self._size]


class TokenBudget:
    """Batches of at most so many tokens, packed first-fit within a block.

    Parameters
    ----------
    items
        Items at positions ``start`` to ``stop`` of an epoch.
    tokens
        Numbers of tokens of items; refuses what no batch can hold, unless that is to be a batch of its own.
    length
        Items of an epoch.
    max_tokens
        Most tokens of a batch.
    max_records
        Most items of a batch.
    """

    def __init__(
        self,
        items: Callable[[int, int, int], Numbers],
        tokens: Callable[[Numbers], Numbers],
        *,
        length: int,
        max_tokens: int,
        max_records: int | None,
    ) -> None:
        self._items = items
        self._tokens = tokens
        self._length = length
        self._max_tokens = max_tokens
        self._max_records = max_records
        self._kept: Recent[tuple[int, int], list[Numbers]] = Recent(_KEPT)
        self._counts: dict[tuple[int, int], int] = {}
        self.num_blocks = -(-length // BLOCK)

    def count(self, epoch: int, block: int) -> int:
        """Batches of a block: packs it, once."""
        # A step of many ranks looks blocks ahead; their packing need not be kept for it, nor done again.
        found = self._counts.get((epoch, block))
        return len(self._packed(epoch, block)) if found is None else found

    def batch(self, epoch: int, block: int, number: int) -> Numbers:
        """Items of a batch, in order."""
        return self._packed(epoch, block)[number]

    def _packed(self, epoch: int, block: int) -> list[Numbers]:
        found = self._kept.get((epoch, block))
        if found is None:
            items = self._items(epoch, block * BLOCK, min((block + 1) * BLOCK, self._length))
            sizes = self._tokens(items).tolist()
            batches = first_fit(sizes, room=self._max_tokens, most=self._max_records or BLOCK)
            found = [items[batch] for batch in batches]
            self._kept.put((epoch, block), found)
            self._counts[epoch, block] = len(found)
            if len(self._counts) > 2 * self.num_blocks:
                self._counts = {key: count for key, count in list(self._counts.items()) if key[0] == epoch}
        return found


def first_fit(sizes: Sequence[int], *, room: int, most: int) -> list[list[int]]:
    """Positions of ``sizes``, each put into the first batch with room for it, or into a new one.

    A batch is open for up to ``most`` positions. A size above ``room`` becomes a batch of its own.
    """
    batches: list[list[int]] = []
    # A tree of maxima over the rooms of all batches there could be: the first that fits is found from its root.
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    rooms = [room] * (2 * leaves)
    for position, size in enumerate(sizes):
        if size > room:
            node = leaves + len(batches)
            batches.append([position])
            left = 0
        else:
            node = 1
            while node < leaves:
                node *= 2
                if rooms[node] < size:
                    node += 1
            number = node - leaves
            if number == len(batches):
                batches.append([position])
            else:
                batches[number].append(position)
            left = 0 if len(batches[number]) == most else rooms[node] - size
        rooms[node] = left
        while node > 1:
            other = rooms[node ^ 1]
            larger = left if left > other else other  # noqa: FURB136 - `max` takes three times as long
            node >>= 1
            if rooms[node] == larger:
                break
            rooms[node] = left = larger
    return batches
