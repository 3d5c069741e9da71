"""Giving an open file another name, or its content to another file."""

from __future__ import annotations

import os
from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.storage.local_read import OpenFile
from kvformat.storage.local_write import LocalFiles

__all__ = ["keep"]

_BLOCK_NBYTES = 8 << 20


def keep(file: OpenFile, files: LocalFiles, path: Path) -> None:
    """Make a file that is never written to again appear at ``path`` too, durably; the directory entry is not synced.

    It is linked, where it still has a name, on the same file system, and else copied.
    """
    if _link(file, files, path):
        return
    fd = files.create(path)
    try:
        size = file.identity.nbytes
        for first in range(0, size, _BLOCK_NBYTES):
            files.write(fd, [file.read(first, min(_BLOCK_NBYTES, size - first))], first, path)
        files.sync(fd, path)
    finally:
        os.close(fd)


def _link(file: OpenFile, files: LocalFiles, path: Path) -> bool:
    source = Path(file.path)
    try:
        linked = _is_named(file, source) and files.link(source, path)
    except KVFormatError as error:
        if error.code != "E201":
            raise
        return False
    if linked and not _is_named(file, path):  # another file took the name meanwhile
        files.unlink(path)
        return False
    return linked


def _is_named(file: OpenFile, path: Path) -> bool:
    """Whether a path leads to this very file."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (file.identity.device, file.identity.inode)
