"""The directory of a dataset in the making, and the staging directory in it."""

from __future__ import annotations

from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.write.staging import Plan, Staging

__all__ = ["Directory"]

_ATTEMPTS = 100


class Directory:
    """Makes what is missing of the way to a dataset, and remembers it for :meth:`remove`."""

    def __init__(self, files: LocalFiles, root: Path) -> None:
        self._files = files
        self._root = root
        self._made: list[Path] = []

    def stage(self, plan: Plan, *, resume: bool) -> tuple[Staging, bool]:
        """A staging directory of this plan, and whether an interrupted run left it.

        Raises
        ------
        ConflictError
            E117 where the only ones to resume belong to live writers.
        StorageError
            E207 where a file stands in the way.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self._make()
                found = Staging.resume(self._files, self._root, plan) if resume else None
                if found is not None:
                    return found, True
                return Staging.create(self._files, self._root, plan), False
            except KVFormatError as error:
                # A directory that was there is gone: another writer that failed or finished here removed its own.
                if error.code != "E002" or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError  # the last attempt returns or raises

    def remove(self) -> None:
        """Remove the directories this object made, as far as they are empty."""
        for path in reversed(self._made):
            self._files.remove_dir(path)

    def _make(self) -> None:
        missing = []
        path = self._root
        with translated(path):
            while not path.exists():
                missing.append(path)
                path = path.parent
        if not path.is_dir():
            raise make_error("E207", "a file stands where the dataset's directory is needed", path=path)
        for folder in missing:
            if folder.is_symlink():
                raise make_error("E207", "a symbolic link that leads nowhere stands here: remove it", path=folder)
        if missing:
            self._sync_existing(path.parent)
        for folder in reversed(missing):
            self._made.append(folder)  # before it is made: an interrupt may come in between
            if self._make_one(folder):
                self._files.sync_dir(folder.parent)
            else:
                self._made.pop()

    def _make_one(self, folder: Path) -> bool:
        try:
            return self._files.make_dir(folder)
        except KVFormatError as error:
            if error.code == "E002" and folder.parent.is_dir():
                message = "no directory can be made here: choose a location on a file system that takes files"
                raise make_error("E207", message, path=folder) from error
            raise

    def _sync_existing(self, folder: Path) -> None:
        """Sync what a killed writer may have made an entry in; it need not be ours to open."""
        try:
            self._files.sync_dir(folder)
        except KVFormatError as error:
            if error.code != "E207":
                raise
