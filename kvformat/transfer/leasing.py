"""The lease of a directory that is there only while someone works in it."""

from __future__ import annotations

from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.lease import DirectoryLease
from kvformat.write.folders import Folders

__all__ = ["take_lease"]

_ATTEMPTS = 100


def take_lease(folders: Folders, path: Path) -> DirectoryLease | None:
    """Make a directory that is there only while someone works in it, and take its lease; None where another has it."""
    for attempt in range(_ATTEMPTS):
        try:
            folders.make(path)
            before = _inode(path)
            lease = DirectoryLease.take(path)
            if lease is None:
                return None
            if before is not None and before == _inode(path):
                return lease
            lease.release()  # of a directory its last user removed meanwhile
        except KVFormatError as error:
            if error.code != "E002" or attempt == _ATTEMPTS - 1:
                raise
    raise make_error("E117", "the directory is removed again and again: another process is at work", path=path)


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None
