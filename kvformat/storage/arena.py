"""Address space whose pages are used again once nothing refers to them."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGE", "SPACE_NBYTES", "Arena", "ArenaState", "Extent", "Taken", "fresh_mapping", "open_arena"]

PAGE = mmap.PAGESIZE
SPACE_NBYTES = 1 << 36
"""Address space set aside. Its pages cost memory from when they are first written to."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGE = 2 << 20
_RECENT = 32
"""Ranges taken after which memory that none of them needed goes back to the system."""
_SHARE = 8
"""Of address space that is limited, and left, one part in so many is set aside at most."""

Extent = tuple[int, int]
"""Start and end."""


class Taken(NamedTuple):
    """A range that was taken.

    Attributes
    ----------
    fresh
        Bytes of it that have to come from the system.
    """

    start: int
    fresh: int


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
    resident
        Bytes that came from the system, and did not go back: those in use, and what is kept.
    in_use
        Bytes taken.
    returned
        Ranges given back by whoever let go of them last. That may happen in a garbage collection while the owner's
        lock is held, so it takes no lock: appending to a deque is one step.
    asked
        Bytes to keep, as the owner was told last and nobody has seen to yet. An iteration is closed, and so trims, in
        a garbage collection too: that takes no lock either.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = fresh_mapping(nbytes)
        self.nbytes = len(self.memory)
        self.resident = self.in_use = 0
        self.returned: deque[Extent] = deque()
        self.asked: int | None = None
        self._free = _Extents(self.nbytes)
        self._cold = _Extents(self.nbytes)  # without memory behind it
        # Ends of what was taken lately. Whoever needs more than is kept needs it for each batch, and fresh memory
        # costs more than what is copied into it.
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def take(self, nbytes: int) -> Taken | None:
        """A range that is written to from now on, or None where there is no room."""
        start = self._free.first(nbytes)
        if start is None:
            return None
        end = start + nbytes
        self._free.remove(start, end)
        fresh = self._cold.remove(start, end)
        self.resident += fresh
        self.in_use += nbytes
        self._recent.append(end)
        return Taken(start, fresh)

    def take_back(self, keep: int, *, beside: bool = False) -> None:
        """Make free what was returned; free memory beyond ``keep`` bytes goes to the system, the highest first.

        Parameters
        ----------
        keep
            Bytes in use and free together, and more while the last ranges lay higher; where more was :attr:`asked`
            for, so many, whatever was needed lately.
        beside
            ``keep`` bytes are kept beside those in use instead, whatever was needed lately.
        """
        asked, self.asked = self.asked, None
        if asked is not None:
            self._recent.clear()
            self._recent.append(asked)  # or the next one would trim further
        elif not self.returned:
            return
        while self.returned:
            start, end = self.returned.popleft()
            self._free.add(start, end)
            self.in_use -= end - start
        self._trim(self.in_use + keep if beside else max((keep, *self._recent)))

    def forsake(self) -> None:
        """Keep nothing: nobody is going to take anything."""
        self._recent.clear()
        self.asked = 0
        self.take_back(0)

    def drop(self, start: int, end: int) -> None:
        """Give memory back to the system. Safe in threads."""
        with contextlib.suppress(OSError, AttributeError):
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _trim(self, most: int) -> None:
        if self.resident <= most:
            return
        for start, end in reversed(self._free.all()):
            for begin, stop in reversed(self._cold.gaps(start, end)):
                part = max(begin, stop - (self.resident - most))
                if part < stop:
                    self.drop(part, stop)
                    self._cold.add(part, stop)
                    self.resident -= stop - part
            if self.resident <= most:
                return


class _Extents:
    """Ranges, ascending, none touching another; all of ``nbytes`` at first."""

    def __init__(self, nbytes: int) -> None:
        self._ranges: list[Extent] = [(0, nbytes)]

    def all(self) -> list[Extent]:
        return [*self._ranges]

    def first(self, nbytes: int) -> int | None:
        """Start of the lowest that has so many bytes."""
        return next((start for start, end in self._ranges if end - start >= nbytes), None)

    def add(self, start: int, end: int) -> None:
        """What is not among them."""
        ranges = self._ranges
        at = bisect_left(ranges, (start, end))
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at and ranges[at - 1][1] == start:
            at -= 1
            start = ranges.pop(at)[0]
        ranges.insert(at, (start, end))

    def remove(self, start: int, end: int) -> int:
        """What is among them; how many bytes these are."""
        ranges, removed = self._ranges, 0
        at = max(0, bisect_right(ranges, start, key=lambda extent: extent[0]) - 1)
        while at < len(ranges) and ranges[at][0] < end:
            begin, stop = ranges[at]
            if stop <= start:
                at += 1
                continue
            left = [(a, b) for a, b in ((begin, min(start, stop)), (max(end, begin), stop)) if a < b]
            ranges[at : at + 1] = left
            removed += stop - begin - sum(b - a for a, b in left)
            at += len(left)
        return removed

    def gaps(self, start: int, end: int) -> list[Extent]:
        """Parts of a range that are not among them, ascending."""
        found = []
        at = max(0, bisect_right(self._ranges, start, key=lambda extent: extent[0]) - 1)
        for begin, stop in self._ranges[at:]:
            if begin >= end:
                break
            if begin > start:
                found.append((start, begin))
            start = max(start, stop)
        if start < end:
            found.append((start, end))
        return found


class ArenaState:
    """What an owner of memory has in one process.

    Attributes
    ----------
    arena
        None where the system gives no address space: then what is taken is a mapping of its own.
    """

    def __init__(self, keep_nbytes: int, space_nbytes: int = SPACE_NBYTES) -> None:
        self._given = keep_nbytes, space_nbytes
        self._process = os.getpid()
        self.lock = threading.Lock()
        self.arena = open_arena(keep_nbytes, space_nbytes)
        if self.arena is not None:
            weakref.finalize(self, self.arena.forsake).atexit = False

    def current(self) -> ArenaState:
        """The state to use: itself, or another one in a process that was forked from its own.

        What the parent keeps is not the child's, and the lock may have been taken when it was forked.
        """
        return self if self._process == os.getpid() else ArenaState(*self._given)

    def give_back(self, holder: object, extent: Extent, *, keep_beside: int | None = None) -> None:
        """Have a range returned when its holder goes.

        Parameters
        ----------
        keep_beside
            See to it then, where that can be done without waiting, and keep so many bytes beside those in use.
        """
        assert self.arena is not None
        weakref.finalize(holder, _returned, weakref.ref(self), self.arena, extent, keep_beside).atexit = False


def _returned(found: weakref.ref[ArenaState], arena: Arena, extent: Extent, keep_beside: int | None) -> None:
    # Who returns waits for no lock: it may be a garbage collection within what holds it.
    arena.returned.append(extent)
    state = found()
    if state is None:  # nobody takes anything any more, nor keeps account of it
        arena.drop(*extent)
    elif keep_beside is not None and state.lock.acquire(blocking=False):
        try:
            arena.take_back(keep_beside, beside=True)
        finally:
            state.lock.release()


def open_arena(keep_nbytes: int, space_nbytes: int = SPACE_NBYTES) -> Arena | None:
    """An arena, a smaller one where address space is scarce, or None: then what is taken is a mapping of its own."""
    left = _left_nbytes()
    for nbytes in (space_nbytes, 4 * keep_nbytes):
        size = nbytes if left is None else min(nbytes, left // _SHARE // PAGE * PAGE)
        if keep_nbytes and (left is None or size >= keep_nbytes):
            with contextlib.suppress(OSError):
                return Arena(size)
    return None


def _left_nbytes() -> int | None:
    """Address space that is left, or None where there is no limit."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            found.append(limit - int(Path("/proc/self/statm").read_text("ascii").split()[0]) * PAGE)
    with contextlib.suppress(OSError, ValueError, KeyError):
        if int(Path("/proc/sys/vm/overcommit_memory").read_text("ascii")) == 2:
            lines = Path("/proc/meminfo").read_text("ascii").splitlines()
            kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
            found.append((kib["CommitLimit"] - kib["Committed_AS"]) * 1024)
    return max(0, min(found)) if found else None


def fresh_mapping(nbytes: int) -> mmap.mmap:
    """Private memory, in huge pages where the system has them and it is large enough."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if nbytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
