"""Directories made on the way to somewhere, and removed again as far as they are empty."""

from __future__ import annotations

from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles

__all__ = ["Folders"]


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
            if self._make(one):
                self._files.sync_dir(one.parent)
            else:
                self._made.pop()

    def _make(self, folder: Path) -> bool:
        try:
            return self._files.make_dir(folder)
        except KVFormatError as error:
            if error.code == "E002" and folder.parent.is_dir():
                message = "no directory can be made here: choose a location on a file system that takes files"
                raise make_error("E207", message, path=folder) from error
            raise

    def sync(self, folder: Path) -> None:
        """Sync a directory that need not be ours to open: a killed writer may have made an entry in it."""
        try:
            self._files.sync_dir(folder)
        except KVFormatError as error:
            if error.code != "E207":
                raise

    def remove(self) -> None:
        """Remove the directories this object made, as far as they are empty."""
        for path in reversed(self._made):
            self._files.remove_dir(path)
