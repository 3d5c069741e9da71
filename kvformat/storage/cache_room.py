"""Room in a cache: reserved before the first byte comes, made by dropping what was used longest ago."""

from __future__ import annotations

import contextlib
import heapq
import os

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.cache_entry import Entry
from kvformat.storage.cache_folder import Folder
from kvformat.storage.cache_ledger import Ledger, LedgerBusy, Page
from kvformat.storage.cache_scan import Scan, drop, same_file, scan, sweep
from kvformat.storage.faults import translated

__all__ = ["Room"]

_MANY = 4096
_SPARE_SHIFT = 3


class Room:
    """The bytes of a cache. They are taken by parts, from the moment these have a size, and by entries.

    Everything that changes them happens under the lock of the ledger, and in such an order that a process killed in
    between leaves the ledger too high, never too low. Looking at all files puts it right.

    Parameters
    ----------
    folder
        The directory.
    max_nbytes
        Most bytes.
    min_free_nbytes
        Bytes of the file system that stay free.
    timeout_s
        Longest wait for the ledger.

    Attributes
    ----------
    crowded_until
        Until this time of the monotonic clock it is not worth while to wait for room: that was done in vain.
    """

    def __init__(self, folder: Folder, *, max_nbytes: int, min_free_nbytes: int, timeout_s: float) -> None:
        self._folder = folder
        self._limit = max_nbytes
        self._floor = min_free_nbytes
        self._ledger = Ledger(folder.ledger, timeout_s=timeout_s)
        self.crowded_until = 0.0

    def tidy(self) -> None:
        """Remove parts that killed processes left; what cannot be removed now waits for the next look at all files."""
        with contextlib.suppress(LedgerBusy), self._ledger.locked() as page, translated(self._folder.path):
            used = page.used
            _, removed = sweep(self._folder)
            if used is not None and removed:
                page.used = max(0, used - removed)

    def reserve(self, fd: int, nbytes: int, path: str) -> bool:
        """Give an empty part of this process its size; False where there is no room now.

        Raises
        ------
        StorageError
            E210 where there never will be.
        """
        if nbytes > self._limit:
            raise make_error(
                "E210",
                f"{nbytes} bytes have to be held at once, and max_nbytes of the cache in {self._folder.path} is "
                f"{self._limit}: raise it to at least {nbytes}",
                path=path,
            )
        try:
            with self._ledger.locked() as page, translated(self._folder.path, needed_nbytes=nbytes):
                # A part that a killed process left has its size already.
                more = nbytes - os.fstat(fd).st_size
                used = page.used
                if used is None or used + more > self._limit or self._lacking(more) > 0:
                    used = self._make(page, more)
                    if used is None:
                        return False
                page.used = used + max(0, more)
                os.ftruncate(fd, nbytes)
                if more < 0:
                    page.used = used + more
        except LedgerBusy:
            return False
        return True

    def make(self, nbytes: int) -> bool:
        """Drop entries of so many bytes, where the file system is full before the limit is reached."""
        try:
            with self._ledger.locked() as page, translated(self._folder.path):
                found = scan(self._folder)
                dropped, _ = self._drop(found, nbytes)
                page.used = found.used - dropped
        except LedgerBusy:
            return False
        return dropped > 0

    def release(self, fd: int, part: str) -> None:
        """Remove a part of this process, and give its bytes back."""
        status = os.fstat(fd)
        try:
            with self._ledger.locked() as page:
                if same_file(part, status.st_dev, status.st_ino):
                    os.unlink(part)
                    used = page.used
                    if used is not None:
                        page.used = max(0, used - status.st_size)
        except (
            LedgerBusy,
            KVFormatError,
            OSError,
        ):  # the ledger is too high now, and the next look at all files puts it right
            if same_file(part, status.st_dev, status.st_ino):
                with contextlib.suppress(OSError):
                    os.unlink(part)

    def remove(self, entry: Entry, nbytes: int) -> None:
        """Remove a damaged entry of so many bytes, unless another took its place; LedgerBusy where it has to stay."""
        with self._ledger.locked() as page, translated(entry.own):
            if same_file(entry.own, entry.identity.device, entry.identity.inode):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.own)
                used = page.used
                if used is not None:
                    page.used = max(0, used - min(nbytes, entry.identity.nbytes))

    def _lacking(self, more: int) -> int:
        """Bytes by which the file system would have less than the floor."""
        try:
            found = os.statvfs(self._folder.path)
        except FileNotFoundError:  # somebody removed the whole directory
            raise LedgerBusy from None
        return self._floor + more - found.f_bavail * found.f_frsize

    def _make(self, page: Page, more: int) -> int | None:
        """Drop entries until ``more`` bytes fit: the bytes taken then, or None where they do not."""
        found = scan(self._folder)
        needed = max(found.used + more - self._limit, self._lacking(more))
        # With many entries a look at all of them is dear: some more are dropped, so that the next is far off.
        spare = self._limit >> _SPARE_SHIFT if needed > 0 and len(found.entries) > _MANY else 0
        dropped, enough = self._drop(found, needed, spare)
        used = found.used - dropped
        if not enough:
            page.used = used
            return None
        return used

    @staticmethod
    def _drop(found: Scan, needed: int, spare: int = 0) -> tuple[int, bool]:
        """Drop what nobody uses, what was used longest ago first: bytes dropped, and whether they are enough."""
        if needed <= 0:
            return 0, True
        heap = found.entries
        heapq.heapify(heap)
        dropped = 0
        while heap and (dropped < needed or dropped + heap[0].nbytes <= needed + spare):
            dropped += drop(heapq.heappop(heap).path) or 0
        return dropped, dropped >= needed
