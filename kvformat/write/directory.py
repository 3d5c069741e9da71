"""The directory of a dataset in the making, and the staging directory in it."""

from __future__ import annotations

from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.storage.local_write import LocalFiles
from kvformat.write.folders import Folders
from kvformat.write.staging import Plan, Staging

__all__ = ["Directory"]

_ATTEMPTS = 100


class Directory:
    """Makes what is missing of the way to a dataset, and remembers it for :meth:`remove`."""

    def __init__(self, files: LocalFiles, root: Path) -> None:
        self._files = files
        self._root = root
        self._folders = Folders(files)

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
                self._folders.make(self._root)
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
        self._folders.remove()
