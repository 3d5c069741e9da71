"""A directory or an object store in memory, and how workers of a plan are opened there."""

from __future__ import annotations

from pathlib import Path

import kvformat
from kvformat.testing.memory_store import MemoryStore
from tests.write.make import tree
from tests.write.planning import opened, remote, run_of

__all__ = ["Place"]


class Place:
    """Where the tests of one kind of target look."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.store = MemoryStore()
        self.directory = directory / "ds"
        self.spool = directory / "spool"
        self.target = self.directory if kind == "local" else remote(self.store)

    def close(self):
        if self.kind == "remote":
            self.target.close()

    def opened(self, plan, **options):
        if self.kind == "remote":
            options.setdefault("spool", self.spool)
        return opened(self.target, plan, **options)

    def names(self):
        """Names of everything, relative to the dataset."""
        if self.kind == "remote":
            return sorted(self.store.objects)
        return sorted(name for name in tree(self.directory) if (self.directory / name).is_file())

    def shards(self):
        """Names of shards that are kept, by ordinal."""
        return [name for name in self.names() if name.endswith((".shard", ".safetensors")) and "index/" not in name]

    def read(self, name):
        return self.store.objects[name] if self.kind == "remote" else (self.directory / name).read_bytes()

    def write(self, name, data):
        if self.kind == "remote":
            self.store.objects[name] = data
        else:
            (self.directory / name).write_bytes(data)

    def delete(self, name):
        if self.kind == "remote":
            del self.store.objects[name]
        else:
            (self.directory / name).unlink()

    def receipt(self, plan, ordinal):
        key = run_of(plan).key
        return f".staging/{key}{'' if self.kind == 'remote' else '-workers'}/{ordinal:08d}.json"

    def whole(self, tmp_path):
        """The published dataset, verified."""
        location = self.directory
        if self.kind == "remote":
            location = tmp_path / "downloaded"
            for name, data in self.store.objects.items():
                path = location / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        report = kvformat.verify(location)
        assert (report.ok, report.level, report.findings) == (True, 4, ())
        return kvformat.open(location, expected_id=report.id)
