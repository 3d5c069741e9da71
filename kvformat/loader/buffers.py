"""Memory of batches, used again once nothing refers to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error

if TYPE_CHECKING:
    import torch

__all__ = ["BufferPool", "Lease"]

_PAGE = mmap.PAGESIZE
_SPACE_NBYTES = 1 << 36
"""Address space set aside. Its pages cost memory from when they are first written to."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_RECENT = 32
"""Leases after which memory that none of them needed goes back to the system."""


class Lease:
    """A piece of memory, for as long as any tensor made of it is referred to.

    Attributes
    ----------
    array
        ``[nbytes]`` uint8, to copy into. It does not keep the memory: tensors do.
    """

    __slots__ = ("_owner", "array")

    def __init__(self, array: NDArray[np.uint8], owner: memoryview | torch.Tensor) -> None:
        self.array = array
        self._owner = owner

    def tensor(self, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Bytes from ``start`` on as a tensor. When the last one goes that shares the storage, so does the lease."""
        import torch

        if isinstance(self._owner, torch.Tensor):
            return self._owner[start : start + nbytes].view(dtype).view(shape)
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        # torch refers to the view as long as the storage lives, and the view can be watched.
        return torch.frombuffer(self._owner, dtype=dtype, offset=start, count=nbytes // dtype.itemsize).view(shape)


class _Arena:
    """Address space of which ranges are taken, the lowest that fits, and given back.

    Attributes
    ----------
    returned
        Ranges given back by whoever let go of them last. That may happen in a garbage collection while the pool's lock
        is held, so it takes no lock: appending to a deque is one step.
    touched
        End of what was ever written to and not given back to the system.
    asked
        Bytes to keep, as :meth:`BufferPool.trim` was told last and nobody has seen to yet. An iteration is closed, and
        so trims, in a garbage collection too: that takes no lock either.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = _map(nbytes)
        self.nbytes = len(self.memory)
        self.touched = 0
        self.returned: deque[tuple[int, int]] = deque()
        self.asked: int | None = None
        self._free = [(0, self.nbytes)]
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

    def take_back(self, keep: int) -> None:
        """Make free what was returned; what is free behind ``keep`` bytes, and rarely used, goes to the system.

        Where more was :attr:`asked` for, all that is free behind that goes, used lately or not.
        """
        asked, self.asked = self.asked, None
        if asked is not None:
            self._recent.clear()
            self._recent.append(asked)  # or the next lease would trim further
        elif not self.returned:
            return
        ranges = self._free
        while self.returned:
            ranges.append(self.returned.popleft())
        ranges.sort()
        merged: list[tuple[int, int]] = []
        for start, end in ranges:
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged
        self._trim(max((keep, *self._recent)))

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


class _State:
    """What a pool has in one process."""

    def __init__(self, keep: int, space: int) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.arena: _Arena | None = None
        if keep:
            for nbytes in (space, 4 * keep):
                # Without address space, every lease is a mapping of its own.
                with contextlib.suppress(OSError):
                    self.arena = _Arena(nbytes)
                    break


class BufferPool:
    """Memory that batches are packed into. Fresh memory costs several times a copy, so it is used again.

    A batch holds its memory until its last tensor, view or array of it included, is dropped; only then it is given out
    again. So nothing a consumer still refers to is ever overwritten. Consume batches one by one: who keeps many pays
    for fresh memory each time. Safe in threads; after a fork the child begins with an empty pool.

    Pinned memory comes from torch's caching host allocator, which keeps it too, and which waits for copies to a device
    that are still under way.

    Parameters
    ----------
    keep_nbytes
        About so many bytes are kept while nobody uses them; more while the last leases needed more.
    pin_memory
        Page-locked memory, for copies to a CUDA device.
    space_nbytes
        Address space to set aside. What does not fit there is taken from the system, and not kept.

    Attributes
    ----------
    fresh_nbytes
        Bytes that had to be taken from the system so far.
    """

    def __init__(self, keep_nbytes: int, *, pin_memory: bool = False, space_nbytes: int = _SPACE_NBYTES) -> None:
        if keep_nbytes < 0:
            raise make_error("E081", f"keep_nbytes must be at least 0, found {keep_nbytes}")
        # What is pinned, torch keeps.
        self._keep = 0 if pin_memory else keep_nbytes // _PAGE * _PAGE
        self._space = space_nbytes
        self._pin = pin_memory
        self._state = _State(self._keep, self._space)
        self.fresh_nbytes = 0

    @property
    def kept_nbytes(self) -> int:
        """Bytes taken from the system, and used by nobody now."""
        state = self._usable_state()
        with state.lock:
            arena = state.arena
            if arena is None:
                return 0
            arena.take_back(self._keep)
            return max(0, arena.touched - arena.in_use)

    def trim(self, nbytes: int = 0) -> None:
        """Keep no more than ``keep_nbytes``, or ``nbytes`` if that is more, whatever was needed lately.

        Does not wait: where the pool is in use just now, the next lease sees to it.
        """
        state = self._usable_state()
        arena = state.arena
        if arena is None:
            return
        arena.asked = max(self._keep, -(-nbytes // _PAGE) * _PAGE)
        if state.lock.acquire(blocking=False):
            try:
                arena.take_back(self._keep)
            finally:
                state.lock.release()

    def lease(self, nbytes: int) -> Lease:
        """Memory of ``nbytes`` bytes; its content is whatever it was.

        Raises
        ------
        UsageError
            E081 where memory cannot be page-locked.
        StorageError
            E204 where the system gives none.
        """
        if self._pin:
            pinned = _pinned(max(nbytes, 1))
            return Lease(pinned.numpy()[:nbytes], pinned)
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        state = self._usable_state()
        with state.lock:
            arena = state.arena
            start = None
            if arena is not None:
                arena.take_back(self._keep)
                start = arena.take(size)
            if arena is None or start is None:
                self.fresh_nbytes += size
            elif start + size > arena.touched:
                self.fresh_nbytes += start + size - max(start, arena.touched)
                arena.touched = start + size
        if arena is None or start is None:
            try:
                memory = _map(size)
            except OSError as error:
                message = (
                    f"{error.strerror}: {size:,} bytes for a batch: make batches smaller, or fewer of them at once"
                )
                raise make_error("E204", message) from error
            return Lease(np.frombuffer(memory, dtype=np.uint8, count=nbytes), memoryview(memory))
        view = memoryview(arena.memory)[start : start + size]
        weakref.finalize(view, arena.returned.append, (start, start + size)).atexit = False
        return Lease(np.frombuffer(arena.memory, dtype=np.uint8, count=nbytes, offset=start), view)

    def _usable_state(self) -> _State:
        """The state of this process. A fork may have left the parent's lock taken, and its memory is not ours."""
        state = self._state
        if state.process != os.getpid():
            state = self._state = _State(self._keep, self._space)
        return state


def _map(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _pinned(nbytes: int) -> torch.Tensor:
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise make_error("E081", "no memory can be page-locked: without a CUDA device leave pin_memory out") from error
