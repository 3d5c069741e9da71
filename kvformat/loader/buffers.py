"""Memory of batches, used again once nothing refers to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.storage.arena import PAGE, SPACE_NBYTES, ArenaState, fresh_mapping

if TYPE_CHECKING:
    import torch

__all__ = ["BufferPool", "Lease"]


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

    def __init__(self, keep_nbytes: int, *, pin_memory: bool = False, space_nbytes: int = SPACE_NBYTES) -> None:
        if keep_nbytes < 0:
            raise make_error("E081", f"keep_nbytes must be at least 0, found {keep_nbytes}")
        # What is pinned, torch keeps.
        self._keep = 0 if pin_memory else keep_nbytes // PAGE * PAGE
        self._pin = pin_memory
        self._state = ArenaState(self._keep, space_nbytes)
        self.fresh_nbytes = 0

    @property
    def kept_nbytes(self) -> int:
        """Bytes taken from the system, and used by nobody now."""
        state = self._state = self._state.current()
        with state.lock:
            arena = state.arena
            if arena is None:
                return 0
            arena.take_back(self._keep)
            return arena.resident - arena.in_use

    def trim(self, nbytes: int = 0) -> None:
        """Keep no more than ``keep_nbytes``, or ``nbytes`` if that is more, whatever was needed lately.

        Does not wait: where the pool is in use just now, the next lease sees to it.
        """
        state = self._state = self._state.current()
        arena = state.arena
        if arena is None:
            return
        arena.asked = max(self._keep, -(-nbytes // PAGE) * PAGE)
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
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        state = self._state = self._state.current()
        with state.lock:
            arena, taken = state.arena, None
            if arena is not None:
                arena.take_back(self._keep)
                taken = arena.take(size)
            self.fresh_nbytes += size if taken is None else taken.fresh
        if arena is None or taken is None:
            try:
                memory = fresh_mapping(size)
            except OSError as error:
                message = (
                    f"{error.strerror}: {size:,} bytes for a batch: make batches smaller, or fewer of them at once"
                )
                raise make_error("E204", message) from error
            return Lease(np.frombuffer(memory, dtype=np.uint8, count=nbytes), memoryview(memory))
        start, end = taken.start, taken.start + size
        view = memoryview(arena.memory)[start:end]
        state.give_back(view, (start, end))
        return Lease(np.frombuffer(arena.memory, dtype=np.uint8, count=nbytes, offset=start), view)


def _pinned(nbytes: int) -> torch.Tensor:
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise make_error("E081", "no memory can be page-locked: without a CUDA device leave pin_memory out") from error
