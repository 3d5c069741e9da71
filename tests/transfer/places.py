"""Places a dataset is copied between: directories, and object stores in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvformat
from kvformat.storage.remote import Remote
from kvformat.testing.memory_store import MemoryStore

ROUTES = [("local", "local"), ("local", "remote"), ("remote", "local"), ("remote", "remote")]


class Place:
    """A location of either kind, whose files a test may look at and change."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.url = f"memory://bucket/{path.name}"
        self.store = MemoryStore(self.url)

    @property
    def location(self) -> Any:
        """What copies are asked for."""
        return self.path if self.kind == "local" else self.remote()

    def remote(self, store: Any = None) -> Remote:
        """The object store, or another one in its place, with a client of its own."""
        return Remote(self.url, connect=lambda *_args, **_options: store or self.store)

    def full(self, name: str) -> str:
        """Path or URL of a file, as errors state it."""
        return f"{self.path if self.kind == 'local' else self.url}/{name}"

    def files(self) -> dict[str, bytes]:
        """Everything there."""
        if self.kind == "remote":
            return dict(self.store.objects)
        return tree(self.path)

    def put(self, name: str, data: bytes) -> None:
        """Make or replace a file, as something else than a copy does."""
        if self.kind == "remote":
            self.store.objects[name] = data
            return
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(data)

    def change(self, name: str, how: Callable[[bytearray], object]) -> None:
        """Edit a file."""
        data = bytearray(self.files()[name])
        how(data)
        self.put(name, bytes(data))

    def remove(self, name: str) -> None:
        """Remove a file."""
        if self.kind == "remote":
            del self.store.objects[name]
        else:
            (self.path / name).unlink()


def tree(path: Path) -> dict[str, bytes]:
    """Files below a directory, by relative path."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def filled(kind: str, dataset: Path, path: Path) -> Place:
    """A place that holds a copy of a dataset, made without the code under test."""
    place = Place(kind, path)
    for name, data in tree(dataset).items():
        place.put(name, data)
    return place


def named(dataset: Path) -> dict[str, str]:
    """One file of each kind, by kind."""
    names = sorted(tree(dataset))
    kinds = ("manifest", "index", "files", "shards")
    return {"root": "kvformat.json"} | {kind: next(n for n in names if n.startswith(f"{kind}/")) for kind in kinds}


def copied(source: Place, target: Place, **options: Any) -> kvformat.CopyReport:
    """Copy with two threads, whatever the machine has."""
    return kvformat.copy(source.location, target.location, **{"threads": 2, **options})
