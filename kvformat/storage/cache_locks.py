"""Locks on the files of a cache: never waited for by the system, gone with the process."""

from __future__ import annotations

import errno
import fcntl

__all__ = ["EXCLUSIVE", "SHARED", "try_lock", "unlock"]

EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB
SHARED = fcntl.LOCK_SH | fcntl.LOCK_NB
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES})


def try_lock(fd: int, kind: int) -> bool | None:
    """Lock an open file: True if it is now held, False if another holds it, None where files cannot be locked."""
    try:
        fcntl.flock(fd, kind)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def unlock(fd: int) -> None:
    """Let go for all descriptors of this open file: one that a fork copied would otherwise hold on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:  # no locks here
        return
