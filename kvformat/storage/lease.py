"""Leases on directories: held by one live process, gone with it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvformat.storage.faults import translate

__all__ = ["DirectoryLease", "exclusive"]

_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL})
_POLL_S = 0.05


class DirectoryLease:
    """An advisory lock on a directory itself, so that no lock file is left behind.

    Attributes
    ----------
    supported
        False where the file system has no such locks; then the lease excludes nobody.
    """

    def __init__(self, fd: int, *, supported: bool) -> None:
        self._fd = fd
        self.supported = supported

    @classmethod
    def take(cls, path: Path) -> DirectoryLease | None:
        """Take the lease without waiting; None where another live process holds it."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise translate(error, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return cls(fd, supported=False)
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise translate(error, path) from error
        return cls(fd, supported=True)

    def release(self) -> None:
        """Give the lease back; more than once is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def exclusive(path: Path, *, timeout_s: float, refusal: Callable[[], Exception]) -> Iterator[DirectoryLease]:
    """Hold the lease of a directory for a block, waiting at most ``timeout_s`` for it."""
    deadline = time.monotonic() + timeout_s
    while (lease := DirectoryLease.take(path)) is None:
        if time.monotonic() > deadline:
            raise refusal()
        time.sleep(_POLL_S)
    try:
        yield lease
    finally:
        lease.release()
