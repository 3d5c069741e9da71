"""Leases on directories, and files that tell whether their process lives: held by live processes, gone with them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvformat.storage.faults import translate

__all__ = ["DirectoryLease", "HeldFile", "exclusive", "is_held"]

_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES})
_DRAFT = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
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
    def take(cls, path: Path, *, shared: bool = False) -> DirectoryLease | None:
        """Take the lease without waiting; None where another live process holds it.

        Parameters
        ----------
        shared
            Any number of processes hold a shared lease at once, and nobody else an exclusive one meanwhile.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise translate(error, path) from error
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return cls(fd, supported=False)
            os.close(fd)
            if error.errno in _BUSY:
                return None
            raise translate(error, path) from error
        return cls(fd, supported=True)

    def holds(self, path: Path) -> bool:
        """Whether this directory is still the one at a path: it may have been removed before the lease was taken."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(path))
        except OSError:
            return False

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


class HeldFile:
    """A small file that one process replaces whole, now and then, and holds a lock on as long as it lives.

    Nothing is synced: after a crash of the machine nobody asks for it. Not for several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def replace(self, data: bytes) -> None:
        """Put this content in its place."""
        draft = self.path.with_name(f"{self.path.name}.part")
        try:
            fd = os.open(draft, _DRAFT, 0o666)
        except OSError as error:
            raise translate(error, draft) from error
        try:
            # Locked before it has its name: whoever finds it there finds it held.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, data, 0)
            os.rename(draft, self.path)
        except BaseException as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(draft)
            if isinstance(error, OSError):
                raise translate(error, draft) from error
            raise
        self._close()
        self._fd = fd

    def remove(self) -> None:
        """Remove the file; more than once is harmless."""
        with contextlib.suppress(OSError):
            if self._fd >= 0:
                os.unlink(self.path)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_held(path: Path) -> bool | None:
    """Whether the process that wrote a :class:`HeldFile` lives; None where the file system has no such locks.

    On some file systems locks reach no further than one machine: False is sure only of a process on this one.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise translate(error, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return False
        except OSError as error:
            if error.errno in _BUSY:
                return True
            if error.errno in _UNSUPPORTED:
                return None
            raise translate(error, path) from error
        finally:
            os.close(fd)
        # It was replaced meanwhile: the old file is free, the new one may be held.
