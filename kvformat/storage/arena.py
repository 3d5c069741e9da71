"""Address space whose pages are used again once nothing refers to them."""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left
from collections import deque

__all__ = ["PAGE", "SPACE_NBYTES", "Arena", "fresh_mapping", "open_arena"]

PAGE = mmap.PAGESIZE
SPACE_NBYTES = 1 << 36
"""Address space set aside. Its pages cost memory from when they are first written to."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGE = 2 << 20
_RECENT = 32
"""Ranges taken after which memory that none of them needed goes back to the system."""


class Arena:
    """Ranges are taken, the lowest that fits, and given back: of any sizes, so none waits for its like.

    Not safe in threads, but for :attr:`returned` and :attr:`asked`: the owner has a lock. Sizes are whole pages.

    Parameters
    ----------
    nbytes
        Address space; OSError where the system gives none.

    Attributes
    ----------
    memory
        All of it.
    returned
        Ranges given back by whoever let go of them last. That may happen in a garbage collection while the owner's
        lock is held, so it takes no lock: appending to a deque is one step.
    touched
        End of what was ever written to and not given back to the system.
    asked
        Bytes to keep, as the owner was told last and nobody has seen to yet. An iteration is closed, and so trims, in
        a garbage collection too: that takes no lock either.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = fresh_mapping(nbytes)
        self.nbytes = len(self.memory)
        self.touched = 0
        self.returned: deque[tuple[int, int]] = deque()
        self.asked: int | None = None
        self._free = [(0, self.nbytes)]  # ascending, none touching another
        # Ends of what was taken lately. Whoever needs more than is kept needs it for each batch, and fresh memory
        # costs more than what is copied into it.
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def take(self, nbytes: int) -> int | None:
        """Start of a range, or None where there is no room."""
        for at, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._free[at]
                else:
                    self._free[at] = (start + nbytes, end)
                self._recent.append(start + nbytes)
                return start
        return None

    def touch(self, end: int) -> int:
        """Note that memory up to ``end`` is written to; the bytes of it that were not before."""
        fresh = max(0, end - self.touched)
        self.touched += fresh
        return fresh

    def take_back(self, keep: int) -> None:
        """Make free what was returned; what is free behind ``keep`` bytes, and rarely used, goes to the system.

        Where more was :attr:`asked` for, all that is free behind that goes, used lately or not.
        """
        asked, self.asked = self.asked, None
        if asked is not None:
            self._recent.clear()
            self._recent.append(asked)  # or the next one would trim further
        elif not self.returned:
            return
        while self.returned:
            self._add(*self.returned.popleft())
        self._trim(max((keep, *self._recent)))

    def _add(self, start: int, end: int) -> None:
        """A free range, one with those it touches."""
        free = self._free
        at = bisect_left(free, (start, end))
        if at < len(free) and free[at][0] == end:
            end = free.pop(at)[1]
        if at and free[at - 1][1] == start:
            at -= 1
            start = free.pop(at)[0]
        free.insert(at, (start, end))

    def _trim(self, keep: int) -> None:
        start, end = self._free[-1] if self._free else (0, 0)
        begin = max(start, keep)
        if end == self.nbytes and self.touched > begin:
            with contextlib.suppress(OSError, AttributeError):
                self.memory.madvise(mmap.MADV_DONTNEED, begin, self.touched - begin)
            self.touched = begin

    @property
    def in_use(self) -> int:
        """Bytes taken."""
        return self.nbytes - sum(end - start for start, end in self._free)


def open_arena(keep_nbytes: int, space_nbytes: int = SPACE_NBYTES) -> Arena | None:
    """An arena, a smaller one where address space is scarce, or None: then what is taken is a mapping of its own."""
    for nbytes in (space_nbytes, 4 * keep_nbytes):
        with contextlib.suppress(OSError):
            return Arena(nbytes)
    return None


def fresh_mapping(nbytes: int) -> mmap.mmap:
    """Private memory, in huge pages where the system has them and it is large enough."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if nbytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
