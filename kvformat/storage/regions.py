"""Memory of fetched bytes, used again once nothing refers to it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

import numpy as np

from kvformat.storage.arena import PAGE, Arena, fresh_mapping, open_arena

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
        About so many bytes are kept while nobody uses them; more while the last regions needed more.
    """

    def __init__(self, keep_nbytes: int) -> None:
        self._keep = -(-keep_nbytes // PAGE) * PAGE
        self._begin()

    @property
    def kept_nbytes(self) -> int:
        """Bytes taken from the system, and used by nobody now."""
        self._need_own()
        with self._lock:
            arena = self._arena
            if arena is None:
                return 0
            self._take_back(arena)
            return max(0, arena.touched - arena.in_use)

    def take(self, nbytes: int) -> Region:
        """Memory of ``nbytes`` bytes with any content; OSError where there is none."""
        self._need_own()
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        with self._lock:
            arena, start = self._arena, None
            if arena is not None:
                arena.take_back(self._keep)
                start = arena.take(size)
                if start is not None:
                    arena.touch(start + size)
        # Whatever is made of the region refers to this, whose base is no array: numpy passes arrays over.
        if arena is None or start is None:
            return np.frombuffer(fresh_mapping(size), dtype=np.uint8, count=nbytes).view(Region)
        used = np.frombuffer(arena.memory, dtype=np.uint8, count=nbytes, offset=start)
        weakref.finalize(used, _give_back, weakref.ref(self), arena.returned, (start, start + size)).atexit = False
        return used.view(Region)

    def see_to(self, returned: deque[tuple[int, int]]) -> None:
        """See to what was returned now, where that can be done without waiting for anybody."""
        arena = self._arena
        if arena is not None and returned is arena.returned and self._lock.acquire(blocking=False):
            try:
                self._take_back(arena)
            finally:
                self._lock.release()

    def _take_back(self, arena: Arena) -> None:
        arena.take_back(self._keep)
        if not arena.in_use:  # whatever was needed lately, nobody is at work now
            arena.asked = self._keep
            arena.take_back(self._keep)

    def _need_own(self) -> None:
        if self._process != os.getpid():
            self._begin()  # what the parent keeps is not ours, nor its lock

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._arena = open_arena(self._keep)


def _give_back(regions: weakref.ref[Regions], returned: deque[tuple[int, int]], extent: tuple[int, int]) -> None:
    # Who returns waits for no lock: it may be a garbage collection that holds it.
    returned.append(extent)
    found = regions()
    if found is not None:
        found.see_to(returned)
