"""How many bytes of a cache are taken: one number in a small file, under a lock of its own."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator

from kvformat.storage.cache_locks import EXCLUSIVE, try_lock, unlock
from kvformat.storage.faults import translate

__all__ = ["Ledger", "LedgerBusy", "Page"]

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FORM = struct.Struct("<QQ")  # the number, and its complement
_ALL = (1 << 64) - 1
_FIRST_PAUSE_S = 0.0001
_LAST_PAUSE_S = 0.02
_IMPATIENT_S = 60.0
_IMPATIENT_TIMEOUT_S = 0.1


class LedgerBusy(Exception):  # noqa: N818 -- never leaves the cache
    """The lock could not be had in time."""


class Page:
    """The ledger while it is locked; ``status`` is its file's from then."""

    def __init__(self, fd: int, status: os.stat_result) -> None:
        self._fd = fd
        self._status = status
        self._written = False

    @property
    def used(self) -> int | None:
        """Bytes taken, or more where a process was killed; None where only looking at the files can tell."""
        data = os.pread(self._fd, _FORM.size + 1, 0)
        if len(data) != _FORM.size:
            return None
        number, complement = _FORM.unpack(data)
        # A crash of the machine can bring back what was written before: then it can be too little.
        if number != complement ^ _ALL or (not self._written and self._status.st_mtime < _started_at()):
            return None
        return int(number)

    @used.setter
    def used(self, number: int) -> None:
        os.pwrite(self._fd, _FORM.pack(number, number ^ _ALL), 0)
        if self._status.st_size > _FORM.size:
            os.ftruncate(self._fd, _FORM.size)
        self._written = True


class Ledger:
    """The ledger of a cache.

    Parameters
    ----------
    path
        Its file; made where it is missing.
    timeout_s
        Longest wait for the lock; for a minute after one in vain, the next are much shorter.
    """

    def __init__(self, path: str, *, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._impatient_until = 0.0

    @contextlib.contextmanager
    def locked(self) -> Iterator[Page]:
        """Hold the lock for a block; :class:`LedgerBusy` where another has it for too long."""
        fd, status = self._lock()
        try:
            yield Page(fd, status)
        finally:
            unlock(fd)
            os.close(fd)

    def _lock(self) -> tuple[int, os.stat_result]:
        began = time.monotonic()
        timeout_s = self._timeout_s
        if began < self._impatient_until:
            timeout_s = min(timeout_s, _IMPATIENT_TIMEOUT_S)
        pause = _FIRST_PAUSE_S
        while True:
            try:
                fd = os.open(self._path, _FLAGS, 0o666)
            except FileNotFoundError:  # somebody removed the whole directory
                raise LedgerBusy from None
            except OSError as error:
                raise translate(error, self._path) from error
            try:
                if try_lock(fd, EXCLUSIVE) is not False:
                    status = os.fstat(fd)
                    if status.st_nlink:  # else it was removed before it was locked
                        return fd, status
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            now = time.monotonic()
            if now - began > timeout_s:
                self._impatient_until = now + _IMPATIENT_S
                raise LedgerBusy
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)


def _started_at() -> float:
    """When the machine started, by its clock of today."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.time() - time.clock_gettime(clock)
