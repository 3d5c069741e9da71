"""Objects through any fsspec package, by the few of its methods that mean the same everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvformat.storage.store import Buffer, MissingFault, ShortFault, Stat, UnsupportedFault
from kvformat.storage.store_faults import plain_etag

__all__ = ["AsyncFiles", "Page", "SyncFiles"]


class Page(NamedTuple):
    """Part of a listing, and what asks for the next part; None at the end."""

    stats: list[Stat]
    token: str | None


class SyncFiles:
    """A blocking file system: Hugging Face, SFTP and others.

    Parameters
    ----------
    filesystem
        An instance of this store alone, without a listings cache.
    url
        Of the directory.
    """

    def __init__(self, filesystem: Any, url: str) -> None:
        self._fs = filesystem
        self._root = filesystem._strip_protocol(url).rstrip("/")  # noqa: SLF001 -- fsspec's own hook for paths
        self._info_options = {"refresh": True} if _takes(filesystem.info, "refresh") else {}

    def read(self, name: str, start: int, stop: int) -> Buffer:
        """Bytes from ``start`` to ``stop``; fewer at the end of the object."""
        try:
            return self._fs.cat_file(self._path(name), start=start, end=stop)  # type: ignore[no-any-return]
        except (IndexError, ValueError) as error:  # what some packages do beyond the end
            raise ShortFault(f"{name}: {error}") from error

    def read_all(self, name: str, max_nbytes: int) -> bytes:
        """All of it, or one byte more than allowed."""
        nbytes = self.stat(name).nbytes
        return bytes(self.read(name, 0, min(nbytes, max_nbytes + 1))) if nbytes else b""

    def stat(self, name: str) -> Stat:
        """From the file system's info."""
        return _stat(name, self._fs.info(self._path(name), **self._info_options))

    def write(self, name: str, data: Buffer, *, create: bool) -> None:
        """Make an object."""
        options = _create_options(self._fs.pipe_file) if create else {}
        self._make_parents(name)
        self._fs.pipe_file(self._path(name), bytes(data), **options)

    def write_file(self, name: str, path: Path) -> None:
        """Make an object of a local file."""
        self._make_parents(name)
        self._fs.put_file(str(path), self._path(name))

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._fs.rm_file(self._path(name))

    def page(self, prefix: str, token: str | None) -> Page:  # noqa: ARG002 -- one page only
        """All at once."""
        folder = prefix.rpartition("/")[0]
        try:
            found = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            found = {}
        return _page(found, self._root, prefix)

    def close(self) -> None:
        """Nothing to close that all packages know."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parents(self, name: str) -> None:
        """Object stores have no directories; SFTP and its like do."""
        parent = self._path(name).rpartition("/")[0]
        if parent:
            self._fs.makedirs(parent, exist_ok=True)


class AsyncFiles:
    """A file system of coroutines: gcsfs, adlfs and others. As :class:`SyncFiles`."""

    def __init__(self, filesystem: Any, url: str) -> None:
        self._fs = filesystem
        self._root = filesystem._strip_protocol(url).rstrip("/")  # noqa: SLF001 -- fsspec's own hook for paths
        self._info_options = {"refresh": True} if _takes(filesystem._info, "refresh") else {}  # noqa: SLF001

    async def read(self, name: str, start: int, stop: int) -> Buffer:
        """See :class:`SyncFiles`."""
        try:
            return await self._fs._cat_file(self._path(name), start=start, end=stop)  # type: ignore[no-any-return]  # noqa: SLF001
        except (IndexError, ValueError) as error:
            raise ShortFault(f"{name}: {error}") from error

    async def read_all(self, name: str, max_nbytes: int) -> bytes:
        """See :class:`SyncFiles`."""
        nbytes = (await self.stat(name)).nbytes
        return bytes(await self.read(name, 0, min(nbytes, max_nbytes + 1))) if nbytes else b""

    async def stat(self, name: str) -> Stat:
        """See :class:`SyncFiles`."""
        return _stat(name, await self._fs._info(self._path(name), **self._info_options))  # noqa: SLF001

    async def write(self, name: str, data: Buffer, *, create: bool) -> None:
        """See :class:`SyncFiles`."""
        options = _create_options(self._fs._pipe_file) if create else {}  # noqa: SLF001
        await self._fs._pipe_file(self._path(name), bytes(data), **options)  # noqa: SLF001

    async def write_file(self, name: str, path: Path) -> None:
        """See :class:`SyncFiles`."""
        await self._fs._put_file(str(path), self._path(name))  # noqa: SLF001

    async def remove(self, name: str) -> None:
        """See :class:`SyncFiles`."""
        await self._fs._rm_file(self._path(name))  # noqa: SLF001

    async def page(self, prefix: str, token: str | None) -> Page:  # noqa: ARG002 -- one page only
        """See :class:`SyncFiles`."""
        folder = prefix.rpartition("/")[0]
        try:
            found = await self._fs._find(self._path(folder), detail=True)  # noqa: SLF001
        except FileNotFoundError:
            found = {}
        return _page(found, self._root, prefix)

    async def close(self) -> None:
        """Nothing to close that all packages know; fsspec closes sessions when the instance goes."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _stat(name: str, info: dict[str, Any]) -> Stat:
    nbytes = info.get("size")
    if info.get("type") == "directory" or nbytes is None:
        raise MissingFault(f"{name}: no object of a known size")
    return Stat(name, int(nbytes), plain_etag(info.get("ETag") or info.get("etag")))


def _page(found: dict[str, dict[str, Any]], root: str, prefix: str) -> Page:
    stats = []
    for path, info in found.items():
        name = path.removeprefix(root).lstrip("/")
        if name.startswith(prefix) and info.get("type") != "directory":
            stats.append(_stat(name, info))
    return Page(sorted(stats), None)


def _create_options(pipe_file: Callable[..., Any]) -> dict[str, Any]:
    """How the package makes an object only where none is: a parameter it names, for any others go unheeded."""
    if _takes(pipe_file, "mode"):
        return {"mode": "create"}  # gcsfs: ifGenerationMatch=0
    if _takes(pipe_file, "overwrite"):
        return {"overwrite": False}  # adlfs: If-None-Match
    raise UnsupportedFault("this file system package makes no object on condition")


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
