"""The order of training: a pure function of an order key, an epoch and a position (SPEC.md, Annex C)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.loader.permutation import Words, permute, seeds
from kvformat.spec import canonical

__all__ = ["Order", "Over", "Shuffle", "order_key"]

Shuffle = Literal["none", "global", "window"]
Over = Literal["names", "records"]
Numbers = NDArray[np.int64]
_END = 1 << 62


def order_key(options: Mapping[str, Any]) -> bytes:
    """32 bytes from what an order depends on; how it is cut into batches and spread over ranks is no part of it."""
    return hashlib.sha256(b"kvf1/order\0" + canonical.encode(dict(options))).digest()


class Order:
    """Sequence of the items of every epoch.

    Parameters
    ----------
    key
        The order key.
    shuffle
        ``"none"``: as numbered. ``"global"``: permuted as a whole. ``"window"``: shards permuted, and items within
        ``window`` of them at a time.
    lengths
        Items of each source; items are numbered through.
    ends
        For windows: where each shard of a source ends, counted in items of the source, ``[shards]``.
    window
        Shards of a window.
    weights
        For a mix, how often each source is drawn from in a cycle.
    num_samples
        For a mix, items of an epoch.
    """

    def __init__(
        self,
        key: bytes,
        *,
        shuffle: Shuffle,
        lengths: Sequence[int],
        ends: Callable[[int], Numbers],
        window: int = 16,
        weights: Sequence[int] | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._shuffle = shuffle
        self._lengths = list(lengths)
        self._ends = ends
        self._window = window
        self._weights = None if weights is None else np.array(weights, np.int64)
        self._keys = {tag: _tag_key(key, tag) for tag in ("cycle", "items", "shards", "windows")}
        self._sharded: dict[int, Numbers] = {}
        self._windows: dict[tuple[int, int], _Windows] = {}
        total = sum(self._lengths)
        self.length = total if num_samples is None else num_samples
        """Items of an epoch."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sharded": {}, "_windows": {}}

    def items(self, epoch: int, start: int, stop: int) -> Numbers:
        """Numbers of the items at positions ``start`` to ``stop`` of an epoch, ``[stop - start]``."""
        if self._weights is None:
            return self._pass(None, epoch, np.arange(start, stop, dtype=np.int64))
        first = epoch * self.length + start
        if first + self.length > _END:
            raise make_error("E081", f"epoch {epoch} is beyond what a mix of {self.length} samples can count")
        return self._mixed(first, first + stop - start)

    # -- a mix ---------------------------------------------------------------------------------------------------

    def _mixed(self, start: int, stop: int) -> Numbers:
        weights = self._weights
        assert weights is not None
        size = int(weights.sum())
        cycles = np.arange(start // size, -(-stop // size), dtype=np.int64)
        slots = np.tile(np.arange(size, dtype=np.int64), len(cycles))
        if self._shuffle != "none":
            numbers = np.repeat(cycles, size).astype(np.uint64)
            slots = permute(slots, size, seeds(self._keys["cycle"], numbers))
        sources = np.searchsorted(np.cumsum(weights), slots, side="right")
        cut = slice(start - int(cycles[0]) * size, stop - int(cycles[0]) * size)
        found = np.empty(stop - start, np.int64)
        before = 0
        for source, (weight, length) in enumerate(zip(weights.tolist(), self._lengths, strict=True)):
            drawn = (sources == source).astype(np.int64)
            # What was drawn before the first of these cycles is a product; within them, a running sum.
            counts = np.cumsum(drawn) - drawn + int(cycles[0]) * weight
            chosen = drawn[cut] != 0
            draws = counts[cut][chosen]
            found[chosen] = self._passes(source, draws // length, draws % length) + before
            before += length
        return found

    def _passes(self, source: int, passes: Numbers, positions: Numbers) -> Numbers:
        """Items of a source at positions of several of its passes."""
        if self._shuffle == "global":
            seed = seeds(self._keys["items"], passes.astype(np.uint64), source + 1)
            return permute(positions, self._lengths[source], seed)
        items = np.empty(len(positions), np.int64)
        for number in np.unique(passes).tolist():
            part = passes == number
            items[part] = self._pass(source, number, positions[part])
        return items

    # -- one pass over a source, or over all -----------------------------------------------------------------------

    def _pass(self, source: int | None, number: int, positions: Numbers) -> Numbers:
        if self._shuffle == "none":
            return positions
        if self._shuffle == "window":
            return self._windowed(source, number, positions)
        length = sum(self._lengths) if source is None else self._lengths[source]
        return permute(positions, length, self._seed("items", source, number))

    def _windowed(self, source: int | None, number: int, positions: Numbers) -> Numbers:
        slot = -1 if source is None else source
        windows = self._windows.get((slot, number))
        if windows is None:
            for old in [known for known in list(self._windows) if known[0] == slot]:
                self._windows.pop(old, None)  # epochs come one after the other; or several threads come here
            ends = self._shard_ends(source)
            shards = permute(np.arange(len(ends)), len(ends), self._seed("shards", source, number))
            windows = self._windows[slot, number] = _Windows(ends, shards, self._window)
        at = np.searchsorted(windows.ends, positions, side="right")
        starts = windows.ends[at] - windows.sizes[at]
        base = self._seed("windows", source, number)
        inside = permute(positions - starts, windows.sizes[at], seeds(int(base[0]), at.astype(np.uint64)))
        return windows.items(starts + inside)

    def _shard_ends(self, source: int | None) -> Numbers:
        sources = range(len(self._lengths)) if source is None else (source,)
        before, found = 0, []
        for one in sources:
            if one not in self._sharded:
                self._sharded[one] = self._ends(one)
            found.append(self._sharded[one] + before)
            before += self._lengths[one]
        return np.concatenate(found)

    def _seed(self, tag: str, source: int | None, number: int) -> Words:
        return seeds(self._keys[tag], number, 0 if source is None else source + 1)


class _Windows:
    """Shards in the order of one pass, so many at a time.

    Attributes
    ----------
    ends, sizes
        Where each window ends, counted in positions of the pass, and how many items it has, ``[windows]``.
    """

    def __init__(self, ends: Numbers, shards: Numbers, window: int) -> None:
        sizes = np.diff(ends, prepend=0)[shards]
        self._shard_ends = np.cumsum(sizes)
        # From a place in the order of the pass to the item's number.
        self._shift = ends[shards] - self._shard_ends
        last = np.minimum(np.arange(window, len(shards) + window, window), len(shards)) - 1
        self.ends = self._shard_ends[last]
        self.sizes = np.diff(self.ends, prepend=0)

    def items(self, places: Numbers) -> Numbers:
        found: Numbers = places + self._shift[np.searchsorted(self._shard_ends, places, side="right")]
        return found


def _tag_key(key: bytes, tag: str) -> int:
    return int.from_bytes(hashlib.sha256(key + tag.encode("ascii")).digest()[:8], "little")
