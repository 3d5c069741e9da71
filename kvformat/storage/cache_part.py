"""An entry in the making: a file that one process has locked, until it is published under the entry's name."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from kvformat.storage.cache_entry import ATIME_KEPT, NOT_A_FILE, Entry, touch
from kvformat.storage.cache_folder import Folder, foreign
from kvformat.storage.cache_locks import EXCLUSIVE, SHARED, try_lock
from kvformat.storage.cache_scan import ABANDONED_S, drop, same_file
from kvformat.storage.faults import translate, translated

__all__ = ["InWork", "Part", "claim"]

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.EINVAL})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL})
_MAX_TRIES = 16
_PAUSE_S = 0.0005


class InWork(NamedTuple):
    """Another makes the entry. Changes while that goes on."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


class Part:
    """The part of this thread; nobody else writes to it, or removes it.

    Attributes
    ----------
    fd
        Open for reading and writing, and locked, where files can be locked.
    own
        Its path.
    """

    def __init__(self, fd: int, own: str, folder: Folder) -> None:
        self.fd = fd
        self.own = own
        self._folder = folder

    def allocate(self, nbytes: int, make_room: Callable[[int], bool]) -> None:
        """Take the bytes from the file system; StorageError E200 where it has not got them, and cannot get them."""
        if not nbytes or not hasattr(os, "posix_fallocate"):
            return
        for _ in range(_MAX_TRIES):
            try:
                os.posix_fallocate(self.fd, 0, nbytes)
            except OSError as error:
                if error.errno in _NO_ALLOCATION:
                    return
                if error.errno not in _FULL or not make_room(nbytes):
                    raise translate(error, self._folder.path, needed_nbytes=nbytes) from error
            else:
                return
        raise translate(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self._folder.path, needed_nbytes=nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        """Write all bytes; E200, E203."""
        nbytes = len(view)
        try:
            while view:
                done = os.pwrite(self.fd, view, offset)
                offset += done
                view = view[done:]
        except OSError as error:
            raise translate(error, self._folder.path, needed_nbytes=nbytes) from error

    def file(self, entry: str, path: str, *, use_mmap: bool) -> Entry:
        """What was written, as the entry it will be. Holds the lock as long as it lives."""
        with translated(self.own):
            fd = os.dup(self.fd)
            try:
                return Entry(fd, path, entry, os.fstat(fd), use_mmap=use_mmap)
            except BaseException:
                os.close(fd)
                raise

    def publish(self, entry: str) -> bool:
        """Give it the entry's name, and pin it; False where that is taken: then it is still a part.

        What was meanwhile removed by hand is not published, and can be used all the same.
        """
        with translated(entry):
            for last in (False, True):
                try:
                    self._link(entry)
                    break
                except FileExistsError:
                    return False
                except FileNotFoundError:
                    if last:
                        return True
                    with contextlib.suppress(FileExistsError, FileNotFoundError):
                        os.mkdir(os.path.dirname(entry))
            touch(self.fd, os.fstat(self.fd))
        # The system lets go before it locks anew: one that waits may be in between, for a moment.
        for _ in range(_MAX_TRIES):
            if try_lock(self.fd, SHARED) is not False:
                break
            time.sleep(_PAUSE_S)
        return True

    def close(self) -> None:
        """Let go of it; an :class:`Entry` made of it keeps a descriptor of its own."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def _link(self, entry: str) -> None:
        try:
            os.link(self.own, entry, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(entry):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            os.rename(self.own, entry)  # in the place of an equal one, at worst
        else:
            os.unlink(self.own)


def claim(folder: Folder, key: str) -> Part | InWork:
    """Become the one who makes an entry, or see how far another is. What a killed process left is taken over.

    Raises
    ------
    StorageError
        E211 where something else stands there; E200, E203, E204, E207.
    """
    own = folder.part(key)
    for attempt in count():
        try:
            fd = os.open(own, _FLAGS | ATIME_KEPT, 0o666)
        except FileNotFoundError:  # somebody removed the whole directory
            folder.prepare()
            continue
        except PermissionError as error:
            found = _denied(own)
            if found is not None:
                return found
            if attempt < _MAX_TRIES:
                continue
            raise translate(error, own) from error
        except OSError as error:
            raise foreign(own) if error.errno in NOT_A_FILE else translate(error, own) from error
        kept = False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise foreign(own)
            held = try_lock(fd, EXCLUSIVE)
            if held is None:
                return _unlocked(folder, key, own, status)
            if not held:
                return InWork(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if same_file(own, status.st_dev, status.st_ino):  # else it was published or removed before it was locked
                kept = True
                return Part(fd, own, folder)
        finally:
            if not kept:
                os.close(fd)
    raise AssertionError


def _unlocked(folder: Folder, key: str, shared: str, status: os.stat_result) -> Part:
    """A part that nobody else knows, where files cannot be locked."""
    if status.st_size == 0:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(shared)
    own = folder.own_part(key)
    with translated(own):
        return Part(os.open(own, _FLAGS | os.O_EXCL, 0o666), own, folder)


def _denied(own: str) -> InWork | None:
    """How far another user is whose files this one may not write; None where that user's process is gone."""
    try:
        status = os.stat(own, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if drop(own, abandoned_s=ABANDONED_S) is not None:
        return None
    return InWork(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
