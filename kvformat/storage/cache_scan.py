"""Looking at all files of a cache: what is taken, what could go first, what killed processes left."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from kvformat.storage.cache_folder import Folder
from kvformat.storage.cache_locks import EXCLUSIVE, try_lock

__all__ = ["ABANDONED_S", "Candidate", "Scan", "drop", "open_any", "same_file", "scan", "sweep"]

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
ABANDONED_S = 24 * 3600.0


class Candidate(NamedTuple):
    """An entry, as it is sorted: the one used longest ago comes first."""

    used_ns: int
    nbytes: int
    path: str


class Scan(NamedTuple):
    """Bytes of all entries and all parts in work, and the entries."""

    used: int
    entries: list[Candidate]


def scan(folder: Folder) -> Scan:
    """Look at everything; the ledger must be locked. Parts no process works on are removed."""
    # Parts first: one that is published meanwhile is then seen here, or among the entries, or by its inode twice.
    parts, _ = sweep(folder)
    used = sum(parts.values())
    found: list[tuple[int, int, str]] = []
    for bucket in _listed(folder.entries):
        if not bucket.is_dir(follow_symlinks=False):
            continue
        for file in _listed(bucket.path):
            if not folder.is_entry(bucket.name, file.name):
                continue
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                if (status.st_dev, status.st_ino) not in parts:
                    used += status.st_size
                found.append((status.st_atime_ns, status.st_size, file.path))
    # A time to come says nothing, and would keep an entry until then.
    now = time.time_ns()
    return Scan(used, [Candidate(at if at <= now else 0, nbytes, path) for at, nbytes, path in found])


def sweep(folder: Folder) -> tuple[dict[tuple[int, int], int], int]:
    """Remove parts no process works on; the ledger must be locked.

    Returns
    -------
    By device and inode, bytes of the parts in work; bytes of those removed.
    """
    alive, removed = {}, 0
    for file in _listed(folder.parts):
        if not folder.is_part(file.name):
            continue
        try:
            status = file.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        gone = drop(file.path, abandoned_s=ABANDONED_S)
        if gone is None:
            alive[status.st_dev, status.st_ino] = status.st_size
        else:
            removed += gone
    return alive, removed


def drop(path: str, *, abandoned_s: float = 0.0) -> int | None:
    """Remove a file that no process has locked; its bytes, or None where it stays.

    Where files cannot be locked, one stays that was written to less than ``abandoned_s`` ago.
    """
    try:
        fd = open_any(path)
    except OSError:
        return None
    try:
        held = try_lock(fd, EXCLUSIVE)
        status = os.fstat(fd)
        if held is False or (held is None and abs(time.time() - status.st_mtime) < abandoned_s):
            return None
        if not same_file(path, status.st_dev, status.st_ino):  # another has taken its name since
            return None
        os.unlink(path)
    except OSError:
        return None
    finally:
        os.close(fd)
    # With a second name it was published, and killed was only who should have taken the first away.
    return status.st_size if status.st_nlink == 1 else 0


def open_any(path: str) -> int:
    """Open a file to lock it: for writing, as some file systems demand, or else for reading."""
    try:
        return os.open(path, os.O_RDWR | _FLAGS)
    except PermissionError:
        return os.open(path, os.O_RDONLY | _FLAGS)


def same_file(path: str, device: int, inode: int) -> bool:
    """Whether a path still leads to a file that is held open."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (device, inode)


def _listed(path: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        yield from entries
