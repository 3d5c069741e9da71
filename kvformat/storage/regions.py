"""Memory of fetched bytes, used again once nothing refers to it."""

from __future__ import annotations

import numpy as np

from kvformat.storage.arena import PAGE, ArenaState, fresh_mapping

__all__ = ["Region", "Regions"]


class Region(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """``[nbytes]`` uint8. Whatever shares its memory keeps it: views, memoryviews, tensors."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        """Stands where a mapping's does: all of it is here."""


class Regions:
    """Gives out memory, and keeps what came back for the next who asks, whatever size that has.

    Fresh memory costs more than what is copied into it: a page fault for every page, one after the other for all
    threads of a process.

    Parameters
    ----------
    keep_nbytes
        Bytes kept at most while nobody uses them; what comes back beyond that goes to the system at once.
    """

    def __init__(self, keep_nbytes: int) -> None:
        self._keep = -(-keep_nbytes // PAGE) * PAGE
        self._state = ArenaState(self._keep)

    @property
    def kept_nbytes(self) -> int:
        """Bytes taken from the system, and used by nobody now."""
        state = self._state = self._state.current()
        arena = state.arena
        if arena is None:
            return 0
        with state.lock:
            arena.take_back(self._keep, beside=True)
            return arena.resident - arena.in_use

    def take(self, nbytes: int) -> Region:
        """Memory of ``nbytes`` bytes with any content; OSError where there is none."""
        state = self._state = self._state.current()
        arena, taken = state.arena, None
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        if arena is not None:
            with state.lock:
                arena.take_back(self._keep, beside=True)
                taken = arena.take(size)
        # Whatever is made of the region refers to this, whose base is no array: numpy passes arrays over.
        if arena is None or taken is None:
            return np.frombuffer(fresh_mapping(size), dtype=np.uint8, count=nbytes).view(Region)
        used = np.frombuffer(arena.memory, dtype=np.uint8, count=nbytes, offset=taken.start)
        state.give_back(used, (taken.start, taken.start + size), keep_beside=self._keep)
        return used.view(Region)
