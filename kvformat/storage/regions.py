"""Memory of fetched bytes, used again once nothing refers to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["Region", "Regions"]

_HUGE_PAGE = 2 << 20
_STEPS = 8
"""Sizes between two powers of two: so a region is at most an eighth larger than what it was asked for."""


class Region(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """``[nbytes]`` uint8. Whatever shares its memory keeps it: views, memoryviews, tensors."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        """Stands where a mapping's does: all of it is here."""


class Regions:
    """Gives out memory, and keeps what came back for the next who asks.

    Fresh memory costs more than what is copied into it: a page fault for every page, one after the other for all
    threads of a process.

    Parameters
    ----------
    keep_nbytes
        Bytes kept at most; what comes back beyond that goes to the system.
    """

    def __init__(self, keep_nbytes: int) -> None:
        self._keep = keep_nbytes
        self._begin()

    def take(self, nbytes: int) -> Region:
        """Memory of ``nbytes`` bytes with any content; OSError where there is none."""
        if self._process != os.getpid():
            self._begin()  # what the parent keeps is not ours, nor its lock
        size = _rounded(nbytes)
        with self._lock:
            self._sort()
            kept = self._free.get(size)
            whole = kept.pop() if kept else None
            if whole is not None:
                self._kept -= size
        if whole is None:
            whole = _fresh(size)
        # Whatever is made of the region refers to this, whose base is no array: numpy passes arrays over.
        used = np.frombuffer(whole.data, dtype=np.uint8, count=nbytes)
        weakref.finalize(used, _give_back, weakref.ref(self), self._returned, whole).atexit = False
        return used.view(Region)

    def see_to(self, returned: deque[NDArray[np.uint8]]) -> None:
        """See to what was returned now, where that can be done without waiting for anybody."""
        if returned is self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort()
            finally:
                self._lock.release()

    def _sort(self) -> None:
        """See to what was returned. Who returns waits for no lock: it may be a garbage collection that holds it."""
        while self._returned:
            whole = self._returned.popleft()
            if self._kept + len(whole) > self._keep:
                self._drop(len(whole))
            if self._kept + len(whole) <= self._keep:
                self._free.setdefault(len(whole), []).append(whole)
                self._kept += len(whole)

    def _drop(self, nbytes: int) -> None:
        """Let go of other sizes, which nobody asked for lately as it seems."""
        for size in [size for size in self._free if size != nbytes]:
            while self._free[size] and self._kept + nbytes > self._keep:
                self._free[size].pop()
                self._kept -= size
            if not self._free[size]:
                del self._free[size]

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._kept = 0


def _give_back(regions: weakref.ref[Regions], returned: deque[NDArray[np.uint8]], whole: NDArray[np.uint8]) -> None:
    returned.append(whole)
    found = regions()
    if found is not None:
        found.see_to(returned)


def _rounded(nbytes: int) -> int:
    step = max(mmap.PAGESIZE, (1 << max(nbytes - 1, 0).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step


def _fresh(nbytes: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError, AttributeError):  # not every kernel has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
