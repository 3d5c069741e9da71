"""A finished entry of a cache, open and pinned."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

from kvformat.errors import KVFormatError
from kvformat.storage.cache_folder import foreign
from kvformat.storage.cache_locks import SHARED, try_lock
from kvformat.storage.faults import translate
from kvformat.storage.local_read import FileIdentity, OpenFile, map_file

__all__ = ["ATIME_KEPT", "NOT_A_FILE", "Busy", "Entry", "open_entry", "touch"]

# The system must not note when a file is read: in its coarse time, that can be before what `touch` noted.
ATIME_KEPT = getattr(os, "O_NOATIME", 0)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.EISDIR})
_NO_MAPPING = frozenset({errno.ENODEV, errno.EACCES, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP})


class Busy(Exception):  # noqa: N818 -- never leaves the cache
    """Another process is about to publish or to drop the entry."""


class Entry(OpenFile):
    """An open file of the cache. It is pinned as long as its descriptor or its mapping lives.

    Attributes
    ----------
    own
        Path of the cached file; ``path`` is that of the origin.
    """

    __slots__ = ("own",)

    def __init__(self, fd: int, path: str, own: str, status: os.stat_result, *, use_mmap: bool) -> None:
        """Takes over ``fd``, unless it raises."""
        # A touch changes ctime: that is left out.
        identity = FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, 0)
        mapped = None
        self._fd = -1
        if use_mmap and status.st_size:
            try:
                mapped = map_file(fd, status.st_size)
            except OSError as error:
                if error.errno not in _NO_MAPPING:
                    raise
        if mapped is not None:
            os.close(fd)  # the mapping has a copy of the descriptor, and so holds the lock
            fd = -1
        self._fd = fd
        self.path = path
        self.identity = identity
        self.mapped = mapped
        self.own = own

    def is_current(self) -> bool:
        """Whether the cache still holds this very file, and nobody wrote to it."""
        try:
            found = os.stat(self.own, follow_symlinks=False)
        except OSError:
            return False
        return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, 0) == self.identity


def open_entry(own: str, nbytes: int, path: str, *, use_mmap: bool) -> Entry | None:
    """Open and pin an entry; None where there is none.

    One of another size than ``nbytes`` is damaged: it comes unmapped, and its identity tells.

    Raises
    ------
    Busy
        It cannot be pinned at this moment.
    KVFormatError
        E211 where something else stands there; E203, E204, E207.
    """
    try:
        try:
            fd = os.open(own, _FLAGS | ATIME_KEPT)
        except PermissionError:  # another user's
            fd = os.open(own, _FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise foreign(own) if error.errno in NOT_A_FILE else translate(error, own) from error
    try:
        if try_lock(fd, SHARED) is False:
            raise Busy
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise foreign(own)
        if status.st_nlink:
            touch(fd, status)
            return Entry(fd, path, own, status, use_mmap=use_mmap and status.st_size == nbytes)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, KVFormatError):
            raise translate(error, own) from error
        raise
    os.close(fd)  # it was dropped before it was locked
    return None


def touch(fd: int, status: os.stat_result) -> None:
    """Note that an entry was used now."""
    with contextlib.suppress(OSError):  # another user's
        os.utime(fd, ns=(time.time_ns(), status.st_mtime_ns))
