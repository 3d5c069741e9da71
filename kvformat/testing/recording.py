"""A local directory that remembers every change a writer makes, and what a crash may leave of them.

Example
-------
>>> files = RecordingFiles(tmp_path)  # doctest: +SKIP
>>> with kvformat.create(tmp_path / "ds", filesystem=files, ...) as writer: ...  # doctest: +SKIP
>>> replay(files.operations[:40], other_path, "synced")  # doctest: +SKIP
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvformat.storage.local_write import Buffer, LocalFiles

__all__ = ["MODES", "Kind", "Mode", "Operation", "RecordingFiles", "existing", "replay", "tear"]

Kind = Literal["make_dir", "create", "write", "sync", "sync_dir", "link", "unlink", "remove_dir"]
Mode = Literal["synced", "killed", "journalled", "scattered"]
MODES: tuple[Mode, ...] = ("synced", "killed", "journalled", "scattered")


class Operation(Struct, frozen=True, kw_only=True):
    """One change that was made.

    Attributes
    ----------
    path
        Relative to the directory under watch, which itself is ``.``.
    file
        Number of the file created, written or synced: names come and go, and descriptors are used again.
    source
        For ``link``, the name the file had already.
    offset, data
        For ``write``.
    """

    kind: Kind
    path: str
    file: int = -1
    source: str = ""
    offset: int = 0
    data: bytes = b""


class RecordingFiles(LocalFiles):
    """Does everything for real, and lists it. Calls of several threads are listed in the order they took effect.

    Parameters
    ----------
    base
        Directory under watch; a change elsewhere is a ``ValueError``.
    history
        Operations that led to what ``base`` holds now: those of a run before this one, or :func:`existing`.
    """

    def __init__(self, base: Path, *, history: Sequence[Operation] = ()) -> None:
        self._base = base
        self._operations = list(history)
        self._next = 1 + max((operation.file for operation in history), default=-1)
        self._open: dict[int, tuple[int, Path]] = {}
        self._lock = threading.RLock()

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations so far that succeeded and changed something, the history included."""
        with self._lock:
            return tuple(self._operations)

    def make_dir(self, path: Path) -> bool:
        """See :class:`LocalFiles`; recorded where the directory is new."""
        with self._lock:
            made = super().make_dir(path)
            if made:
                self._record(Operation(kind="make_dir", path=self._name(path)))
            return made

    def create(self, path: Path) -> int:
        """See :class:`LocalFiles`."""
        with self._lock:
            fd = super().create(path)
            self._open[fd] = (self._next, path)
            self._record(Operation(kind="create", path=self._name(path), file=self._next))
            self._next += 1
            return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int, path: Path) -> int:
        """See :class:`LocalFiles`; the bytes are recorded too."""
        with self._lock:
            count = super().write(fd, buffers, offset, path)
            data = b"".join(bytes(buffer) for buffer in buffers)
            self._record(
                Operation(kind="write", path=self._name(path), file=self._open[fd][0], offset=offset, data=data)
            )
            return count

    def sync(self, fd: int, path: Path) -> None:
        """See :class:`LocalFiles`."""
        with self._lock:
            super().sync(fd, path)
            number, created = self._open.get(fd, (-1, None))
            if created == path:  # a directory is synced by this call too, maybe with a closed file's descriptor
                self._record(Operation(kind="sync", path=self._name(path), file=number))

    def sync_dir(self, path: Path) -> None:
        """See :class:`LocalFiles`; recorded where it is the directory under watch, or below."""
        with self._lock:
            super().sync_dir(path)
            if path.is_relative_to(self._base):
                self._record(Operation(kind="sync_dir", path=self._name(path)))

    def link(self, source: Path, target: Path) -> bool:
        """See :class:`LocalFiles`; recorded where the name is new."""
        with self._lock:
            made = super().link(source, target)
            if made:
                self._record(Operation(kind="link", path=self._name(target), source=self._name(source)))
            return made

    def unlink(self, path: Path) -> None:
        """See :class:`LocalFiles`; recorded where there was a file."""
        with self._lock:
            there = os.path.lexists(path)
            super().unlink(path)
            if there:
                self._record(Operation(kind="unlink", path=self._name(path)))

    def remove_dir(self, path: Path) -> bool:
        """See :class:`LocalFiles`; recorded where the directory went."""
        with self._lock:
            removed = super().remove_dir(path)
            if removed:
                self._record(Operation(kind="remove_dir", path=self._name(path)))
            return removed

    def _record(self, operation: Operation) -> None:
        self._operations.append(operation)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._base).as_posix()


def tear(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The same operations with every write of two bytes or more in two halves, as a crash may see it."""
    torn: list[Operation] = []
    for operation in operations:
        half = len(operation.data) // 2
        if operation.kind == "write" and half:
            torn.append(replace(operation, data=operation.data[:half]))
            torn.append(replace(operation, data=operation.data[half:], offset=operation.offset + half))
        else:
            torn.append(operation)
    return tuple(torn)


def existing(directory: Path) -> tuple[Operation, ...]:
    """Operations that make what a directory holds now, all of it durable."""
    operations: list[Operation] = []
    seen: dict[int, str] = {}
    for folder, folders, names in os.walk(directory):
        folders.sort()
        here = Path(folder)
        operations += [
            Operation(kind="make_dir", path=(here / name).relative_to(directory).as_posix()) for name in folders
        ]
        for name in sorted(names):
            path = here / name
            relative, inode = path.relative_to(directory).as_posix(), path.stat().st_ino
            if inode in seen:
                operations.append(Operation(kind="link", path=relative, source=seen[inode]))
                continue
            number = len(seen)
            seen[inode] = relative
            operations += [
                Operation(kind="create", path=relative, file=number),
                Operation(kind="write", path=relative, file=number, data=path.read_bytes()),
                Operation(kind="sync", path=relative, file=number),
            ]
    folders = [".", *(operation.path for operation in operations if operation.kind == "make_dir")]
    operations += [Operation(kind="sync_dir", path=path) for path in folders]
    return tuple(operations)


def replay(operations: Sequence[Operation], target: Path, mode: Mode, *, seed: int = 0) -> None:
    """Build, in an empty directory, what a crash right after these operations may leave.

    Parameters
    ----------
    operations
        All operations since the directory under watch was empty.
    target
        Directory that stands for it; made where it is missing.
    mode
        ``synced``: the least a file system may keep. A directory has the entries it had when it was synced last, a
        file the bytes it had when it was synced last; what was removed since is back.
        ``killed``: everything. The process died, the machine did not.
        ``journalled``: all entries, but of what was written since a file's last sync only its size; zeros stand there.
        ``scattered``: of what was not synced each entry, removal and write is kept or lost on its own, by chance.
    seed
        Which chance.
    """
    disk = _Disk()
    for operation in operations:
        disk.apply(operation)
    target.mkdir(parents=True, exist_ok=True)
    _Builder(mode, random.Random(f"{seed}")).build(disk.top, target)  # noqa: S311 - chance, not secrecy


_T = TypeVar("_T")
Change = tuple[str, "_File | _Folder | None"]


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    """Since the last sync."""

    def content(self, kept: Sequence[tuple[int, bytes]]) -> bytes:
        content = bytearray(self.durable)
        for offset, data in kept:
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        return bytes(content)

    def sync(self) -> None:
        self.durable, self.writes = self.content(self.writes), []


@dataclass(eq=False)
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    """Since the last sync."""

    def change(self, name: str, node: _File | _Folder | None) -> None:
        self.changes.append((name, node))
        _apply(self.now, name, node)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.now), []


class _Disk:
    """What is in the system's memory, and what is on the medium."""

    def __init__(self) -> None:
        self.top = _Folder()
        self._files: dict[int, _File] = {}

    def apply(self, operation: Operation) -> None:
        """Follow one operation."""
        if operation.kind == "write":
            self._files[operation.file].writes.append((operation.offset, operation.data))
        elif operation.kind == "sync":
            self._files[operation.file].sync()
        elif operation.kind == "sync_dir":
            self._folder(operation.path).sync()
        else:
            folder, _, name = operation.path.rpartition("/")
            self._folder(folder).change(name, self._made(operation))

    def _made(self, operation: Operation) -> _File | _Folder | None:
        if operation.kind == "make_dir":
            return _Folder()
        if operation.kind == "create":
            return self._files.setdefault(operation.file, _File())
        if operation.kind == "link":
            folder, _, name = operation.source.rpartition("/")
            return self._folder(folder).now[name]
        return None

    def _folder(self, path: str) -> _Folder:
        folder = self.top
        for name in path.split("/"):
            if name not in ("", "."):
                node = folder.now[name]
                if not isinstance(node, _Folder):
                    raise ValueError(f"{path}: {name} is a file")
                folder = node
        return folder


class _Builder:
    """Writes what is left of a disk. A file keeps all its names."""

    def __init__(self, mode: Mode, chance: random.Random) -> None:
        self._mode = mode
        self._chance = chance
        self._built: dict[int, Path] = {}

    def build(self, folder: _Folder, path: Path) -> None:
        """Everything below a directory that exists."""
        for name, node in sorted(self._entries(folder).items()):
            at = path / name
            if isinstance(node, _Folder):
                at.mkdir()
                self.build(node, at)
            elif id(node) in self._built:
                at.hardlink_to(self._built[id(node)])
            else:
                at.write_bytes(self._content(node))
                self._built[id(node)] = at

    def _entries(self, folder: _Folder) -> dict[str, _File | _Folder]:
        if self._mode == "synced":
            return folder.durable
        if self._mode != "scattered":
            return folder.now
        entries = dict(folder.durable)
        for name, node in self._kept(folder.changes):
            _apply(entries, name, node)
        return entries

    def _content(self, file: _File) -> bytes:
        if self._mode == "synced":
            return file.durable
        if self._mode == "killed":
            return file.content(file.writes)
        if self._mode == "journalled":
            return file.durable.ljust(len(file.content(file.writes)), b"\0")
        return file.content(list(self._kept(file.writes)))

    def _kept(self, items: Sequence[_T]) -> Iterator[_T]:
        return (item for item in items if self._chance.random() < 0.5)


def _apply(entries: dict[str, _File | _Folder], name: str, node: _File | _Folder | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node
