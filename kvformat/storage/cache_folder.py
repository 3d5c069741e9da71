"""The directory of a cache: what its files are called, and how it is told from a directory that is somebody else's."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import zlib

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translated

__all__ = ["Folder", "foreign"]

_MARKER = "kvformat-cache-1"
_LEDGER = "ledger"
_LEDGER_NBYTES = 16
_MARKER_TEXT = b"""This directory is a cache of kvformat. While no process uses it, it may be removed as a whole.
"""
_KEY = re.compile(r"[0-9a-zA-Z._-]{1,200}\Z")
_ENTRY = re.compile(r"([0-9a-zA-Z._-]{1,200})\.entry\Z")
_PART = re.compile(r"([0-9a-f]{3})-([0-9a-zA-Z._-]{1,200})(?:~[0-9a-f]{16})?\.part\Z")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Folder:
    """Names of a cache's files. Entries lie in 4,096 directories by a hash of their key; parts are few.

    Parameters
    ----------
    path
        Absolute path of the directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries = f"{path}/entries"
        self.parts = f"{path}/parts"
        self.ledger = f"{path}/{_LEDGER}"

    def entry(self, key: str) -> str:
        """Path of a finished entry."""
        if not _KEY.match(key):
            raise make_error("E081", f"a cache key has 1 to 200 of the characters 0-9 a-z A-Z . _ -, found {key!r}")
        return f"{self.entries}/{_bucket(key)}/{key}.entry"

    def part(self, key: str) -> str:
        """Path of an entry in the making, the same for all processes, which lock it."""
        return f"{self.parts}/{_bucket(key)}-{key}.part"

    def own_part(self, key: str) -> str:
        """As :meth:`part`, for one process alone, where files cannot be locked."""
        return f"{self.parts}/{_bucket(key)}-{key}~{secrets.token_hex(8)}.part"

    @staticmethod
    def is_entry(bucket: str, name: str) -> bool:
        """Whether a file of this name in this directory of entries can only be an entry."""
        found = _ENTRY.match(name)
        return found is not None and _bucket(found[1]) == bucket

    @staticmethod
    def is_part(name: str) -> bool:
        """Whether a file of this name among the parts can only be one."""
        found = _PART.match(name)
        return found is not None and _bucket(found[2]) == found[1]

    def prepare(self) -> None:
        """Make the directory, or see that it is a cache's.

        Raises
        ------
        StorageError
            E211 where it is another's; E207 where it may not be written; E200, E203.
        """
        with translated(self.path):
            try:
                os.makedirs(self.path, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise make_error("E211", "a file stands where a directory is needed", path=self.path) from None
            except FileNotFoundError:
                raise make_error("E211", "no directory can be made here: choose another", path=self.path) from None
            self._mark()
            for path in (self.entries, self.parts):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise foreign(path)
                if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                    raise make_error("E207", "the cache may not be written here: check owner and mode", path=path)

    def _mark(self) -> None:
        marker = f"{self.path}/{_MARKER}"
        try:
            found = os.lstat(marker)
        except FileNotFoundError:
            # The marker is made before anything else, so whoever made something here made that first. Where a cache
            # is removed while it is used, the ledger may come again before it.
            others = [name for name in os.listdir(self.path) if name != _LEDGER or not self._is_ledger()]
            if others and _MARKER not in others:
                raise make_error("E211", self._refusal(others), path=self.path) from None
            with contextlib.suppress(FileExistsError):
                fd = os.open(marker, _CREATE, 0o666)
                try:
                    os.write(fd, _MARKER_TEXT)
                finally:
                    os.close(fd)
            found = os.lstat(marker)
        if not stat.S_ISREG(found.st_mode):
            raise foreign(marker)

    def _is_ledger(self) -> bool:
        found = os.lstat(f"{self.path}/{_LEDGER}")
        return stat.S_ISREG(found.st_mode) and found.st_size <= _LEDGER_NBYTES

    @staticmethod
    def _refusal(others: list[str]) -> str:
        versions = sorted(name for name in others if name.startswith(_MARKER.rpartition("-")[0]))
        if versions:
            return (
                f"another version of kvformat made this cache ({versions[0]}, expected {_MARKER}): choose another "
                "directory, or remove this one"
            )
        shown = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
        return f"the directory is no cache and not empty ({shown}): choose one that is empty or does not exist"


def foreign(path: str) -> KVFormatError:
    """E211 for what stands in the place of a cache's file and is none."""
    return make_error("E211", "this was not made by the cache: remove it, or choose another directory", path=path)


def _bucket(key: str) -> str:
    return f"{zlib.crc32(key.encode()) & 0xFFF:03x}"
