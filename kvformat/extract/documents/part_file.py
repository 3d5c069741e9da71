"""The file a documents file is written to before it has its name, held by a lock as long as its writer lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.mounts import prefers_pread

__all__ = ["create_part", "remove_leftovers"]

_RANDOM_NBYTES = 8
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def create_part(files: LocalFiles, target: Path) -> tuple[Path, int]:
    """Create ``.NAME.<16 hex>.part`` beside a target of that name, and hold it.

    Returns
    -------
    tuple
        Path, and a descriptor with an exclusive lock, where the file system has such locks. The lock is given back
        when the descriptor is closed or the process ends, however it does.

    Raises
    ------
    StorageError
        E200, E203, E207.
    """
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(_RANDOM_NBYTES)}.part")
        fd = files.create(path)
        with contextlib.suppress(OSError):  # no such locks; then nobody takes the file for a leftover either
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_named(fd, path):
            return path, fd
        os.close(fd)  # taken for a leftover before it was held


def remove_leftovers(files: LocalFiles, target: Path) -> None:
    """Remove the parts of killed writers of a target: those that nobody holds.

    On network and FUSE mounts nothing is removed: a lock may reach no further than one machine there, and the part of
    a writer on another one would seem to be held by nobody. What cannot be removed is left.
    """
    if prefers_pread(target.parent):
        return
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _RANDOM_NBYTES}}}\.part")
    try:
        left = [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]
    except OSError:
        return
    for path in left:
        with contextlib.suppress(OSError, KVFormatError):
            _remove_unheld(files, path)


def _remove_unheld(files: LocalFiles, path: Path) -> None:
    fd = os.open(path, _OPEN)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between its creation and its lock a part is held by nobody. Its writer notices that it lost its name.
        if _is_named(fd, path):
            files.unlink(path)
    finally:
        os.close(fd)


def _is_named(fd: int, path: Path) -> bool:
    """Whether a path leads to the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except OSError:
        return False
