"""Joining the workers of a staging directory, which the last of them may be removing."""

from __future__ import annotations

import time
from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.local_write import LocalFiles
from kvformat.write.folders import Folders

__all__ = ["BUSY_TIMEOUT_S", "join", "wait_for_lease"]

_ATTEMPTS = 100
BUSY_TIMEOUT_S = 60.0
_POLL_S = 0.05


def join(files: LocalFiles, root: Path, path: Path, folders: Folders) -> DirectoryLease:
    """Make a staging directory where it is missing, and take a shared lease on it.

    Raises
    ------
    ConflictError
        E117 where somebody holds it alone, such as ``kvformat clean``.
    StorageError
        E207 where it cannot be made.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    for attempt in range(_ATTEMPTS):
        try:
            folders.make(root)
            files.make_dir(path.parent)
            files.make_dir(path)
            lease = wait_for_lease(path, deadline)
        except KVFormatError as error:
            # A directory that was there is gone: others that left removed it.
            if error.code != "E002" or attempt == _ATTEMPTS - 1:
                raise
            continue
        if lease.holds(path):
            return lease
        lease.release()
    raise make_error(
        "E117", "the staging directory is removed again and again: is `kvformat clean` at work?", path=path
    )


def wait_for_lease(path: Path, deadline: float) -> DirectoryLease:
    """Take a shared lease on a directory, waiting until the monotonic clock says ``deadline``.

    Raises
    ------
    ConflictError
        E117 where somebody holds it alone for so long.
    DamageError
        E002 where no directory is there.
    """
    while (lease := DirectoryLease.take(path, shared=True)) is None:
        if time.monotonic() > deadline:
            raise make_error(
                "E117", "the staging directory is held, perhaps by `kvformat clean`: wait for it to end", path=path
            )
        time.sleep(_POLL_S)
    return lease
