"""Objects in memory and in a local directory, with the exclusive and whole writes that fsspec's own lack."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat as stat_modes
import threading
import uuid
from pathlib import Path
from typing import Any

from kvformat.storage.fsspec_files import Page
from kvformat.storage.store import Buffer, ExistsFault, MissingFault, Stat

__all__ = ["DirectoryFiles", "MemoryFiles"]

_PARTIAL = ".kvformat-partial-"
_MEMORY_LOCK = threading.Lock()


class MemoryFiles:
    """Objects of fsspec's memory file system, which all instances of a process share.

    As :class:`~kvformat.storage.fsspec_files.SyncFiles`.
    """

    def __init__(self, filesystem: Any, url: str) -> None:
        self._fs = filesystem
        self._root = filesystem._strip_protocol(url).rstrip("/")  # noqa: SLF001 -- fsspec's own hook for paths

    def read(self, name: str, start: int, stop: int) -> Buffer:
        """See the class."""
        return self._fs.cat_file(self._path(name), start=start, end=stop)  # type: ignore[no-any-return]

    def read_all(self, name: str, max_nbytes: int) -> bytes:
        """See the class."""
        return bytes(self.read(name, 0, max_nbytes + 1))

    def stat(self, name: str) -> Stat:
        """See the class; the ETag is the MD5, as stores give it for objects put in one piece."""
        data = self._fs.cat_file(self._path(name))
        return Stat(name, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def write(self, name: str, data: Buffer, *, create: bool) -> None:
        """See the class."""
        with _MEMORY_LOCK:
            if create and self._path(name) in self._fs.store:
                raise ExistsFault(name)
            self._fs.pipe_file(self._path(name), bytes(data))

    def write_file(self, name: str, path: Path) -> None:
        """See the class."""
        self.write(name, path.read_bytes(), create=False)

    def remove(self, name: str) -> None:
        """See the class."""
        with _MEMORY_LOCK:
            self._fs.store.pop(self._path(name), None)

    def page(self, prefix: str, token: str | None) -> Page:  # noqa: ARG002 -- one page only
        """See the class."""
        begin = self._path(prefix) if prefix else f"{self._root}/"
        with _MEMORY_LOCK:
            found = {path: file.size for path, file in self._fs.store.items() if path.startswith(begin)}
        return Page(sorted(Stat(path[len(self._root) + 1 :], nbytes) for path, nbytes in found.items()), None)

    def close(self) -> None:
        """Nothing to close."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class DirectoryFiles:
    """Files of a local directory: written under another name first, then renamed, or linked where none may be there.

    As :class:`~kvformat.storage.fsspec_files.SyncFiles`.
    """

    def __init__(self, filesystem: Any, url: str) -> None:
        self._root = filesystem._strip_protocol(url).rstrip("/")  # noqa: SLF001 -- fsspec's own hook for paths

    def read(self, name: str, start: int, stop: int) -> Buffer:
        """See the class."""
        with Path(self._path(name)).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def read_all(self, name: str, max_nbytes: int) -> bytes:
        """See the class."""
        return bytes(self.read(name, 0, max_nbytes + 1))

    def stat(self, name: str) -> Stat:
        """See the class."""
        found = os.stat(self._path(name))
        if not stat_modes.S_ISREG(found.st_mode):
            raise MissingFault(f"{name}: no regular file")
        return Stat(name, found.st_size)

    def write(self, name: str, data: Buffer, *, create: bool) -> None:
        """See the class."""
        with self._partial(name) as partial:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if create:
                os.link(partial, self._path(name))
            else:
                os.replace(partial, self._path(name))

    def write_file(self, name: str, path: Path) -> None:
        """See the class."""
        with self._partial(name) as partial:
            shutil.copyfile(path, partial)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, self._path(name))

    def remove(self, name: str) -> None:
        """See the class."""
        os.unlink(self._path(name))

    def page(self, prefix: str, token: str | None) -> Page:  # noqa: ARG002 -- one page only
        """See the class."""
        stats = []
        for folder, _, files in os.walk(self._root):
            for file in files:
                name = os.path.relpath(os.path.join(folder, file), self._root)
                if name.startswith(prefix) and not file.startswith(_PARTIAL):
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        stats.append(self.stat(name))
        return Page(sorted(stats), None)

    def close(self) -> None:
        """Nothing to close."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _partial(self, name: str) -> Any:
        folder = os.path.dirname(self._path(name))
        os.makedirs(folder, exist_ok=True)
        partial = f"{folder}/{_PARTIAL}{uuid.uuid4().hex}"
        try:
            yield partial
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
