"""Operating system errors as kvformat errors, by what the caller can do about them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvformat.errors import KVFormatError, make_error

__all__ = ["translate", "translated"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


def translate(error: OSError, path: str | os.PathLike[str], *, needed_nbytes: int | None = None) -> KVFormatError:
    """The kvformat error for an operating system error: E002, E003, E200, E203, E204 or E207."""
    text = error.strerror or str(error)
    if error.errno in _FULL:
        need = "" if needed_nbytes is None else f"{needed_nbytes:,} bytes are needed, "
        return make_error("E200", f"{text}: {need}{_free(path)}free space and resume", path=path)
    if error.errno == errno.EFBIG:
        need = "" if needed_nbytes is None else f"{needed_nbytes:,} bytes are needed, and "
        limit = "a limit on the size of one file, not the free space, is reached"
        remedy = "raise `ulimit -f`, write smaller shards, or choose a file system that takes larger files"
        return make_error("E200", f"{text}: {need}{limit}: {remedy}", path=path)
    if error.errno in _MISSING:
        return make_error("E002", "the file is missing: restore it from a copy of the dataset", path=path)
    if error.errno == errno.ELOOP:
        return make_error("E003", "a symbolic link stands here: replace it by the file itself", path=path)
    if error.errno == errno.ENXIO:
        return make_error("E003", "a socket or a device stands here: replace it by the file itself", path=path)
    if error.errno in _DENIED:
        return make_error("E207", f"{text}: check owner and mode", path=path)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return make_error(
            "E204", f"{text}: lower `max_open_files`, or raise `ulimit -n` or vm.max_map_count", path=path
        )
    return make_error("E203", f"{text}: check the storage and try again", path=path)


@contextmanager
def translated(path: str | os.PathLike[str], *, needed_nbytes: int | None = None) -> Iterator[None]:
    """Raise operating system errors of the block as kvformat errors."""
    try:
        yield
    except KVFormatError:
        raise
    except OSError as error:
        raise translate(error, path, needed_nbytes=needed_nbytes) from error


def _free(path: str | os.PathLike[str]) -> str:
    for parent in (Path(path), *Path(path).parents):
        try:
            return f"{shutil.disk_usage(parent).free:,} are free; "
        except OSError:
            continue
    return ""
