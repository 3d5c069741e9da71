"""A dataset as an editable model in memory, sealed again from any depth: how a dataset gets exactly one defect."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from kvformat.codec import index
from kvformat.codec.shard import encode_header
from kvformat.spec import digests, tables
from kvformat.spec.layout import Layout, Placement
from kvformat.spec.paths import covered_path, manifest_path, part_path, shard_path
from kvformat.spec.schema import Schema
from kvformat.testing.part_file import Array, PartFile, lookup_columns

__all__ = ["LEVELS", "DatasetFiles", "Level", "dump"]

Level = Literal["sums", "record_sums", "shards", "parts", "manifest", "manifest_text", "root"]
LEVELS: tuple[Level, ...] = ("sums", "record_sums", "shards", "parts", "manifest", "manifest_text", "root")
_HEX64 = re.compile("[0-9a-f]{64}")


def dump(value: object) -> bytes:
    """Sorted, dense JSON of any value: canonical where the value allows it, and no complaint where it does not."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


class DatasetFiles:
    """Everything a dataset directory holds.

    Attributes
    ----------
    root, manifest
        Decoded JSON, to be edited; ``root_text`` and ``manifest_text`` are what :meth:`save` writes.
    parts
        By table, its :class:`PartFile` objects.
    covered
        Contents of the covered files, in the order of the manifest's ``files``.
    shards
        Contents of the shards.
    other
        By path, files the dataset does not name.
    actions
        By path, what to do at the end, given the dataset's directory and the file: remove it, or put something odd in
        its place.
    """

    def __init__(self, root_text: bytes, manifest_text: bytes) -> None:
        self.root_text = root_text
        self.manifest_text = manifest_text
        self.root: dict[str, Any] = json.loads(root_text)
        self.manifest: dict[str, Any] = json.loads(manifest_text)
        self.parts: dict[str, list[PartFile]] = {table: [] for table in tables.TABLES}
        self.covered: list[bytearray] = []
        self.shards: list[bytearray] = []
        self.other: dict[str, bytes] = {}
        self.actions: dict[str, Callable[[Path, Path], None]] = {}
        self.layout = Layout(self.schema)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DatasetFiles:
        """Read a valid dataset."""
        directory = Path(path)
        root_text = (directory / "kvformat.json").read_bytes()
        reference = json.loads(root_text)["manifest"]["sha256"]
        found = cls(root_text, (directory / manifest_path(reference)).read_bytes())
        for table in tables.TABLES:
            for entry in found.manifest["index"][table]:
                data = bytearray((directory / part_path(entry["sha256"])).read_bytes())
                found.parts[table].append(found.part_of(table, data, entry))
        found.covered = [
            bytearray((directory / "files" / entry["sha256"]).read_bytes()) for entry in found.manifest["files"]
        ]
        found.shards = [bytearray((directory / name).read_bytes()) for name in found.shard_paths()]
        return found

    def copy(self) -> DatasetFiles:
        """An independent copy."""
        twin = DatasetFiles(self.root_text, self.manifest_text)
        twin.root, twin.manifest = copy.deepcopy(self.root), copy.deepcopy(self.manifest)
        for table, parts in self.parts.items():
            entries = twin.manifest["index"][table]
            twin.parts[table] = [
                twin.part_of(table, bytearray(part.data), entry) for part, entry in zip(parts, entries, strict=True)
            ]
        twin.covered = [bytearray(data) for data in self.covered]
        twin.shards = [bytearray(data) for data in self.shards]
        twin.other, twin.actions = dict(self.other), dict(self.actions)
        return twin

    def part_of(self, table: str, data: bytearray, entry: dict[str, Any]) -> PartFile:
        """A part of this dataset."""
        return PartFile(table, data, entry, num_dims=len(self.manifest["schema"]["dims"]), version=self.version)

    # -- what is there -------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Dataset id of what :meth:`save` writes."""
        return hashlib.sha256(self.root_text).hexdigest()

    @property
    def version(self) -> str:
        """Version the manifest states."""
        version: str = self.manifest["version"]
        return version

    @property
    def schema(self) -> Schema:
        """The manifest's schema, typed; msgspec's ValidationError where it does not fit the types."""
        return msgspec.convert(self.manifest["schema"], Schema, strict=True)

    @property
    def header_size(self) -> int:
        """Start of the data in a shard."""
        size: int = self.manifest["header_size"]
        return size

    def column(self, table: str, name: str) -> Array:
        """A column over all parts; a view to write to where there is one part, else a copy."""
        columns = [part.columns[name] for part in self.parts[table]]
        if not columns:
            return np.empty(0, dtype=np.uint8)
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def shard_paths(self) -> list[str]:
        """Paths of the shards, as the shards table has them."""
        return [shard_path(ordinal, row.tobytes()) for ordinal, row in enumerate(self.column("shards", "sha256"))]

    def part_paths(self, table: str) -> list[str]:
        """Paths of the parts of a table."""
        return [part_path(hashlib.sha256(part.data).hexdigest()) for part in self.parts[table]]

    def manifest_path(self) -> str:
        """Path of the manifest, as the root has it; where the root is beyond that, as its digest demands."""
        try:
            stated = self.root["manifest"]["sha256"]
        except (KeyError, TypeError):
            stated = ""
        if not isinstance(stated, str) or not _HEX64.fullmatch(stated):
            stated = hashlib.sha256(self.manifest_text).hexdigest()
        return manifest_path(stated)

    def names(self) -> list[bytes]:
        """All names, in the order of the names table."""
        found = []
        for part in self.parts["names"]:
            text = part.columns["bytes"].tobytes()
            ends = part.columns["end"].tolist()
            found += [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        return found

    def records_of(self, shard: int) -> range:
        """Numbers of the records of a shard."""
        firsts = [*self.column("shards", "first_record").tolist(), len(self.column("rows", "offset"))]
        return range(firsts[shard], firsts[shard + 1])

    def placement(self, record: int) -> Placement:
        """Layout of a record."""
        return self.layout.place(tuple(self.column("rows", "dims")[record].tolist()))

    def locate(self, record: int) -> tuple[int, int]:
        """Shard of a record, and where the record begins in the file."""
        firsts = self.column("shards", "first_record")
        shard = int(np.searchsorted(firsts, np.uint64(record), side="right")) - 1
        return shard, self.header_size + int(self.column("rows", "offset")[record])

    def tensor(self, record: int, name: str) -> Array:
        """Bytes of a tensor (``sums`` and ``pad`` included), uint8 ``[nbytes]``: a view to write to."""
        shard, start = self.locate(record)
        placement = self.placement(record)
        if name == "pad":
            first, end = placement.end, placement.nbytes
        else:
            placed = placement.tensors[name]
            first, end = placed.offset, placed.offset + placed.nbytes
        return np.frombuffer(memoryview(self.shards[shard])[start + first : start + end], dtype=np.uint8)

    # -- rebuilding ----------------------------------------------------------------------------------------------

    def set_table(self, table: str, columns: Mapping[str, Array], *, cuts: Iterable[int] = ()) -> None:
        """Encode a table anew, in parts that begin at 0 and at each of ``cuts``; counts and first keys follow.

        ``end`` of names is given over the whole table and becomes relative to each part.
        """
        count = len(next(iter(columns.values())))
        bounds = [0, *cuts, count]
        self.parts[table], entries = [], []
        for first, end in pairwise(bounds):
            cut = {name: column[first:end] for name, column in columns.items() if name != "bytes"}
            entry: dict[str, Any] = {"count": end - first, "sha256": "", "size": 0}
            if table == "names":
                begin = int(columns["end"][first - 1]) if first else 0
                stop = int(columns["end"][end - 1])
                cut["end"] = cut["end"] - np.uint64(begin)
                cut["bytes"] = columns["bytes"][begin:stop]
                entry["nbytes"] = stop - begin
            if table in ("document_keys", "name_keys"):
                entry["first_key"] = f"{int(cut['key'][0]):016x}"
            data = bytearray(index.encode(table, cut, version=self.version))
            entries.append(entry)
            self.parts[table].append(self.part_of(table, data, entry))
        self.manifest["index"][table] = entries

    def set_names(self, names: Sequence[tuple[int, int, bytes]], *, cuts: Iterable[int] = ()) -> None:
        """Encode ``names`` anew from rows of (record, input, name), and ``name_keys`` with it."""
        text = b"".join(name for _, _, name in names)
        columns = {
            "record": np.array([record for record, _, _ in names], dtype="<u8"),
            "end": np.cumsum([len(name) for _, _, name in names], dtype="<u8"),
            "input": np.array([given for _, given, _ in names], dtype="<u8"),
            "bytes": np.frombuffer(text, dtype=np.uint8),
        }
        self.set_table("names", columns, cuts=cuts)
        self.set_table("name_keys", lookup_columns([xxhash.xxh3_64_intdigest(name) for _, _, name in names]))

    def table(self, table: str) -> dict[str, Array]:
        """Copies of all columns of a table over all parts, as :meth:`set_table` takes them."""
        found = {name: np.array(self.column(table, name)) for name in self.parts[table][0].columns}
        if table == "names":
            found["end"] = np.cumsum([len(name) for name in self.names()], dtype="<u8")
        return found

    def set_version(self, version: str) -> None:
        """State another minor version everywhere, and seal."""
        columns = {table: self.table(table) for table in tables.TABLES}
        cuts = {table: self._starts(table)[1:] for table in tables.TABLES}
        self.root["version"] = self.manifest["version"] = version
        for table in tables.TABLES:
            self.set_table(table, columns[table], cuts=cuts[table])
        self.write_headers()
        self.reseal("shards")

    def set_document_keys(self) -> None:
        """Encode ``document_keys`` anew from the rows."""
        documents = self.column("rows", "document")
        self.set_table("document_keys", lookup_columns([digests.document_key(row.tobytes()) for row in documents]))

    def write_headers(self) -> None:
        """Write the header of every shard anew, as rows, schema and header size of the manifest demand."""
        old = self.header_size
        layout = Layout(self.schema)
        new = layout.header_size(self.version, self.manifest["shard_slots"])
        for shard, data in enumerate(self.shards):
            placements = [layout.place(self.placement(record).dims) for record in self.records_of(shard)]
            header = encode_header(layout, version=self.version, ordinal=shard, placements=placements, header_size=new)
            self.shards[shard] = bytearray(header) + data[old:]
        self.manifest["header_size"] = new
        self.layout = layout

    def adopt_schema(self) -> bool:
        """Make ``header_size`` and shard headers those of the edited schema, where it still describes the records.

        False, and nothing is changed, where the schema is too broken to lay records out, or lays them out otherwise.
        """
        try:
            layout = Layout(self.schema)
            for record in range(len(self.column("rows", "offset"))):
                placement = self.placement(record)
                if layout.place(placement.dims).nbytes != placement.nbytes or layout.num_sums != self.layout.num_sums:
                    return False
                layout.header(self.version, 0, [layout.place(placement.dims)])
        except (msgspec.ValidationError, ArithmeticError, LookupError, ValueError):
            return False
        self.write_headers()
        return True

    # -- sealing -------------------------------------------------------------------------------------------------

    def reseal(self, level: Level) -> None:
        """Recompute everything that follows from what was edited.

        Parameters
        ----------
        level
            Where to begin. ``sums``: each record's table of sums, from its slabs. ``record_sums``: the rows', from the
            sums. ``shards``: digests and sizes in the shards table, and the total of bytes. ``parts``: digests and
            sizes of parts and covered files in the manifest. ``manifest``: its text, from the decoded object.
            ``manifest_text``: the root's reference, from the text. ``root``: the root's text.
        """
        steps: dict[Level, Callable[[], None]] = {
            "sums": self._seal_sums,
            "record_sums": self._seal_record_sums,
            "shards": self._seal_shards,
            "parts": self._seal_parts,
            "manifest": self._seal_manifest,
            "manifest_text": self._seal_reference,
            "root": self._seal_root,
        }
        for step in LEVELS[LEVELS.index(level) :]:
            steps[step]()

    def _starts(self, table: str) -> list[int]:
        counts = [part.entry["count"] for part in self.parts[table]]
        return [sum(counts[:number]) for number in range(len(counts))]

    def _num_records(self) -> int:
        return len(self.column("rows", "offset"))

    def _seal_sums(self) -> None:
        for record in range(self._num_records()):
            placement = self.placement(record)
            sums = self.tensor(record, "sums").view("<u8")
            for name, first in self.layout.first_sum.items():
                placed = placement.tensors[name]
                data = self.tensor(record, name)
                slabs = next((len(c.layers) for c in self.layout.schema.components if c.name == name), 1)
                for row in range(slabs):
                    slab = data[row * placed.slab_nbytes : (row + 1) * placed.slab_nbytes]
                    sums[first + row] = digests.slab_sum(slab.data)

    def _seal_record_sums(self) -> None:
        record = 0
        for part in self.parts["rows"]:
            for row in range(part.entry["count"]):
                dims = part.columns["dims"][row].tolist()
                digest = digests.record_sum(dims, self.tensor(record, "sums").tobytes())
                part.columns["record_sum"][row] = np.frombuffer(digest, dtype=np.uint8)
                record += 1

    def _seal_shards(self) -> None:
        ordinal = 0
        for part in self.parts["shards"]:
            for row in range(part.entry["count"]):
                data = self.shards[ordinal]
                part.columns["sha256"][row] = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
                part.columns["size"][row] = len(data)
                ordinal += 1
        self.manifest["totals"]["nbytes"] = sum(len(data) for data in self.shards)

    def _seal_parts(self) -> None:
        for parts in self.parts.values():
            for part in parts:
                part.entry["sha256"] = hashlib.sha256(part.data).hexdigest()
                part.entry["size"] = len(part.data)
        for data, entry in zip(self.covered, self.manifest["files"], strict=True):
            entry["sha256"], entry["size"] = hashlib.sha256(data).hexdigest(), len(data)

    def _seal_manifest(self) -> None:
        self.manifest_text = dump(self.manifest)

    def _seal_reference(self) -> None:
        digest = hashlib.sha256(self.manifest_text).hexdigest()
        self.root["manifest"] = {"sha256": digest, "size": len(self.manifest_text)}

    def _seal_root(self) -> None:
        self.root_text = dump(self.root)

    # -- saving --------------------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """By path, every file of the dataset; paths are those their parents state."""
        found: dict[str, bytes] = {"kvformat.json": self.root_text, self.manifest_path(): self.manifest_text}
        for table, parts in self.parts.items():
            found.update(zip(self.part_paths(table), (bytes(part.data) for part in parts), strict=True))
        found.update((covered_path(hashlib.sha256(data).hexdigest()), bytes(data)) for data in self.covered)
        found.update(zip(self.shard_paths(), map(bytes, self.shards), strict=True))
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the dataset into a directory, which must not exist or be empty, and carry out ``actions``."""
        directory = Path(path)
        for name, data in (self.files() | self.other).items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        for name, action in self.actions.items():
            action(directory, directory / name)
