"""Directories a copy makes on its way, and removes again as far as they are empty; leases on them."""

from __future__ import annotations

from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.local_write import LocalFiles

__all__ = ["Folders", "take_lease"]

_ATTEMPTS = 100


class Folders:
    """Makes what is missing of a path, durably, and remembers it for :meth:`remove`."""

    def __init__(self, files: LocalFiles) -> None:
        self._files = files
        self._made: list[Path] = []

    def make(self, folder: Path) -> None:
        """Make a directory with its parents.

        Raises
        ------
        StorageError
            E207 where something else stands in the way.
        """
        missing = []
        path = folder
        with translated(path):
            while not path.exists():
                if path.is_symlink():
                    raise make_error("E207", "a symbolic link that leads nowhere stands here: remove it", path=path)
                missing.append(path)
                path = path.parent
        if not path.is_dir():
            raise make_error("E207", "a file stands where a directory is needed", path=path)
        if missing:
            self.sync(path.parent)
        for one in reversed(missing):
            self._made.append(one)  # before it is made: an interrupt may come in between
            if self._files.make_dir(one):
                self._files.sync_dir(one.parent)
            else:
                self._made.pop()

    def sync(self, folder: Path) -> None:
        """Sync a directory that need not be ours to open, where another may have made an entry."""
        try:
            self._files.sync_dir(folder)
        except KVFormatError as error:
            if error.code != "E207":
                raise

    def remove(self) -> None:
        """Remove the directories this object made, as far as they are empty."""
        for path in reversed(self._made):
            self._files.remove_dir(path)


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
