"""Page-locked memory that is used round and round."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["Piece", "PinnedRing"]

_ALIGNMENT = 4096


class Piece(NamedTuple):
    """Memory taken from a ring: uint8 ``[nbytes]``, and its range there; None where it lies beside the ring."""

    memory: torch.Tensor
    extent: tuple[int, int] | None


class PinnedRing:
    """Gives out memory that comes back in the order it was taken.

    Page-locking costs about as much as copying, so it is done once, when the first piece is taken. What finds no room
    gets memory of its own. Where pieces of at most ``p`` bytes are in use, ``b`` bytes together, a ring of ``b + p``
    always has room.

    Parameters
    ----------
    nbytes
        Size of the ring.
    pinned
        Makes page-locked memory: uint8, ``[nbytes]``.
    """

    def __init__(self, nbytes: int, pinned: Callable[[int], torch.Tensor]) -> None:
        self._nbytes = nbytes // _ALIGNMENT * _ALIGNMENT
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._taken: deque[tuple[int, int]] = deque()
        self._head = 0

    def take(self, nbytes: int) -> Piece:
        """Memory of so many bytes, page-aligned within the ring. Never waits."""
        size = max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT
        with self._lock:
            start = self._place(size)
            if start is None:
                return Piece(self._pinned(max(nbytes, 1))[:nbytes], None)
            if self._memory is None:
                self._memory = self._pinned(self._nbytes)
            self._head = start + size
            self._taken.append((start, start + size))
            return Piece(self._memory[start : start + nbytes], (start, start + size))

    def give_back(self, piece: Piece) -> None:
        """Nobody uses the piece any more. Room is made by the piece that was taken first."""
        if piece.extent is not None:
            with self._lock:
                self._taken.remove(piece.extent)

    def _place(self, size: int) -> int | None:
        """Where a piece of this size may begin."""
        if not self._taken:
            return 0 if size <= self._nbytes else None
        tail = self._taken[0][0]
        if self._head <= tail:  # what is in use goes over the end
            return self._head if tail - self._head >= size else None
        if self._nbytes - self._head >= size:
            return self._head
        return 0 if tail >= size else None
