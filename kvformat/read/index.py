"""The index tables of an open dataset: mapped part by part, verified at first touch (SPEC.md, section 13)."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.codec.index import Columns
from kvformat.errors import make_error
from kvformat.spec import digests, limits
from kvformat.spec.manifest import Manifest
from kvformat.spec.paths import part_path, shard_path
from kvformat.storage.local_read import OpenFile
from kvformat.storage.readers import Reader

__all__ = ["IndexReader", "ShardRow"]


class ShardRow(NamedTuple):
    """A shard as the index describes it, and where its rows stand."""

    ordinal: int
    sha256: bytes
    size: int
    first: int
    end: int
    rows: Columns
    row: int
    """Position of the shard's first record in ``rows``."""

    @property
    def path(self) -> str:
        """Path in the dataset."""
        return shard_path(self.ordinal, self.sha256)


class _Table:
    """Parts of one table, opened when first needed."""

    def __init__(self, reader: Reader, manifest: Manifest, table: str, *, verify: bool) -> None:
        self._reader = reader
        self._manifest = manifest
        self._table = table
        self._verify = verify
        self.parts = manifest.parts(table)
        self.starts = [0, *accumulate(part.count for part in self.parts)]
        self._columns: list[Columns | None] = [None] * len(self.parts)
        self._files: list[OpenFile | None] = [None] * len(self.parts)

    def part(self, number: int) -> Columns:
        """Columns of a part, checked."""
        found = self._columns[number]
        return self._open(number) if found is None else found

    def buffer(self, number: int) -> memoryview:
        """All bytes of a part."""
        self.part(number)
        file = self._files[number]
        if file is None:
            raise AssertionError(number)
        return file.read(0, self.parts[number].size)

    def locate(self, row: int) -> tuple[Columns, int]:
        """Columns that hold a row of the table, and its position there."""
        if len(self.parts) == 1:
            return self.part(0), row
        number = bisect_right(self.starts, row) - 1
        return self.part(number), row - self.starts[number]

    def take(self, column: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Items of a column at rows of the table, as a copy; touches the parts concerned only."""
        if len(self.parts) == 1:
            return self.part(0).arrays[column][rows].astype(np.int64)
        holders = np.searchsorted(np.array(self.starts), rows, side="right") - 1
        numbers: list[int] = np.unique(holders).tolist()
        self._open_all([number for number in numbers if self._columns[number] is None])
        shape = self.part(numbers[0] if numbers else 0).arrays[column].shape[1:]
        found = np.empty((len(rows), *shape), np.int64)
        for number in numbers:
            chosen = holders == number
            found[chosen] = self.part(number).arrays[column][rows[chosen] - self.starts[number]]
        return found

    def of(self, row: int) -> str:
        """Full path of the part that holds a row of the table."""
        return self.path(bisect_right(self.starts, row) - 1)

    def path(self, number: int) -> str:
        """Full path of a part."""
        return self._reader.path(part_path(self.parts[number].sha256))

    def _open_all(self, numbers: Sequence[int]) -> None:
        """Open parts side by side: hashing ten million rows takes a third of a second on one core."""
        if len(numbers) > 1:
            with ThreadPoolExecutor(min(len(numbers), os.cpu_count() or 1), "kvformat-index") as pool:
                list(pool.map(self._open, numbers))

    def _open(self, number: int) -> Columns:
        part = self.parts[number]
        name = part_path(part.sha256)
        # Lookups jump: a mapping touches a few pages where reading would fetch the whole part.
        file = self._reader.open(name, nbytes=part.size, sha256=part.sha256)
        data = file.read(0, part.size)
        if self._verify and not self._reader.is_remote and hashlib.sha256(data).hexdigest() != part.sha256:
            raise make_error(
                "E006", "the index part's SHA-256 is not the manifest's: restore the file", path=file.path
            )
        columns = Columns(
            data,
            self._table,
            count=part.count,
            num_dims=len(self._manifest.schema.dims),
            nbytes=getattr(part, "nbytes", 0),
            version=self._manifest.version,
            path=file.path,
        )
        first = getattr(part, "first_key", None)
        if first is not None and columns.flat["key"][0] != int(first, 16):
            raise make_error("E059", f"the first key is not {first}, as the manifest states", path=file.path)
        self._files[number] = file
        self._columns[number] = columns
        return columns


class IndexReader:
    """All index tables of a dataset.

    Parameters
    ----------
    reader
        Where the parts are.
    manifest
        What the parts are.
    verify
        Hash a part when it is first touched.
    """

    def __init__(self, reader: Reader, manifest: Manifest, *, verify: bool) -> None:
        self._reader = reader
        self._manifest = manifest
        self.shards = _Table(reader, manifest, "shards", verify=verify)
        self.rows = _Table(reader, manifest, "rows", verify=verify)
        self.names = _Table(reader, manifest, "names", verify=verify)
        self.document_keys = _Table(reader, manifest, "document_keys", verify=verify)
        self.name_keys = _Table(reader, manifest, "name_keys", verify=verify)
        self._first_keys: dict[str, list[int]] = {}

    def shard_of(self, record: int) -> int:
        """Ordinal of the shard that holds a record."""
        parts = self.shards.parts
        number = 0
        if len(parts) > 1:
            low, high = 0, len(parts)
            while high - low > 1:
                middle = (low + high) // 2
                if self.shards.part(middle).flat["first_record"][0] <= record:
                    low = middle
                else:
                    high = middle
            number = low
        position = bisect_right(self.shards.part(number).flat["first_record"], record) - 1
        if position < 0:
            raise make_error("E052", f"no shard holds record {record}", path=self.shards.path(number))
        return self.shards.starts[number] + position

    def first_records(self, *, at_most: int) -> list[int]:
        """First record of every shard, ascending; empty where there are more shards, or the table is damaged."""
        if self._manifest.totals.shards > at_most or len(self.shards.parts) != 1:
            return []
        firsts: list[int] = self.shards.part(0).flat["first_record"].tolist()
        sound = firsts[0] == 0 and all(before < after for before, after in pairwise(firsts))
        return firsts if sound else []

    def shard(self, ordinal: int) -> ShardRow:
        """A shard's row, checked for what a reader relies on.

        Raises
        ------
        FormatError
            E052, E055.
        """
        columns, position = self.shards.locate(ordinal)
        path = self._reader.path("index")
        first = columns.flat["first_record"][position]
        end = self._manifest.totals.records
        if ordinal + 1 < self._manifest.totals.shards:
            following, next_position = self.shards.locate(ordinal + 1)
            end = following.flat["first_record"][next_position]
        size = columns.flat["size"][position]
        header_size = self._manifest.header_size
        if not 1 <= end - first <= self._manifest.shard_slots or end > self._manifest.totals.records:
            raise make_error("E052", f"shard {ordinal} would hold the records {first} to {end}", path=path)
        if ordinal == 0 and first != 0:
            raise make_error("E052", f"the first shard begins with record {first}", path=path)
        if size % 4096 or not header_size < size < 1 << 48:
            raise make_error("E052", f"shard {ordinal} would have {size} bytes", path=path)
        rows, row = self.rows.locate(first)
        if row + (end - first) > rows.count:
            raise make_error("E055", f"the rows of shard {ordinal} lie in two parts", path=path)
        sha256 = bytes(columns.flat["sha256"][position * 32 : position * 32 + 32])
        return ShardRow(ordinal, sha256, size, first, end, rows, row)

    def shard_paths(self) -> Iterator[str]:
        """Paths of all shards in the dataset, from the table of shards alone."""
        for number, start in enumerate(self.shards.starts[:-1]):
            for position, digest in enumerate(self.shards.part(number).arrays["sha256"]):
                yield shard_path(start + position, digest.tobytes())

    def shard_starts(self) -> NDArray[np.int64]:
        """First record of every shard, ``[shards]``."""
        firsts = np.concatenate([self.shards.part(n).arrays["first_record"] for n in range(len(self.shards.parts))])
        if firsts[0] != 0 or not (firsts[:-1] < firsts[1:]).all() or firsts[-1] >= self._manifest.totals.records:
            raise make_error("E052", "shards do not begin at ascending records", path=self._reader.path("index"))
        return firsts.astype(np.int64)

    def dims_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Dims of records that exist, ``[n, dims]``."""
        found = self.rows.take("dims", records)
        tokens = found[:, 0]
        if len(found) and not (tokens.min() > 0 and tokens.max() <= limits.MAX_TOKENS):
            record = next(int(n) for n, t in zip(records, tokens, strict=True) if not 0 < t <= limits.MAX_TOKENS)
            raise make_error("E053", "a record with no or too many tokens", path=self.rows.of(record), record=record)
        return found

    def records_of_names(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the records that existing slots of the names table belong to, ``[n]``."""
        if self._manifest.totals.names == self._manifest.totals.records:
            return slots  # every record has a name, and names stand by record
        found = self.names.take("record", slots)
        if len(found) and not (found.min() >= 0 and found.max() < self._manifest.totals.records):
            raise make_error("E056", "a name of a record that is not there", path=self._reader.path("index"))
        return found

    def first_names(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many slots of the names table stand before those of each record, ``[n]``."""
        wanted = records.astype(np.uint64)  # of another dtype, the column would be converted as a whole
        found = np.zeros(len(records), np.int64)
        for number in range(len(self.names.parts)):
            found += np.searchsorted(self.names.part(number).arrays["record"], wanted)
        return found

    def name_at(self, slot: int) -> str:
        """Name at an existing slot of the names table."""
        columns, row = self.names.locate(slot)
        return self._decode(self._name(columns, row))

    def document(self, record: int) -> bytes:
        """Document digest of a record, 32 bytes."""
        columns, row = self.rows.locate(record)
        return bytes(columns.flat["document"][row * 32 : row * 32 + 32])

    def find_document(self, digest: bytes) -> int | None:
        """Number of the record of a document."""
        total = self._manifest.totals.records
        for slot in self._slots("document_keys", self.document_keys, digests.document_key(digest)):
            if slot >= total:
                raise make_error("E059", f"slot {slot} of {total} records", path=self._reader.path("index"))
            if self.document(slot) == digest:
                return slot
        return None

    def find_name(self, name: str) -> int | None:
        """Number of the record with a name."""
        encoded = name.encode("utf-8", "surrogatepass")
        total = self._manifest.totals.names
        for slot in self._slots("name_keys", self.name_keys, digests.name_key(encoded)):
            if slot >= total:
                raise make_error("E059", f"slot {slot} of {total} names", path=self._reader.path("index"))
            columns, row = self.names.locate(slot)
            if self._name(columns, row) == encoded:
                record = columns.flat["record"][row]
                if record >= self._manifest.totals.records:
                    raise make_error("E056", f"a name of record {record}", path=self._reader.path("index"))
                return int(record)
        return None

    def find_names(self, names: Sequence[str]) -> list[int | None]:
        """As :meth:`find_name`, for many names: in half the time where each table is one part."""
        if len(self.name_keys.parts) != 1 or len(self.names.parts) != 1:
            return [self.find_name(name) for name in names]
        totals = self._manifest.totals
        lookup, table = self.name_keys.part(0), self.names.part(0).flat
        ends, text, records = table["end"], table["bytes"], table["record"]
        keys, slots, count = lookup.flat["key"], lookup.flat["slot"], lookup.count
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        wanted = list(map(digests.name_key, encoded))
        places = np.searchsorted(lookup.arrays["key"], np.array(wanted, np.uint64)).tolist()
        found: list[int | None] = []
        for name, data, key, at in zip(names, encoded, wanted, places, strict=True):
            if at < count and keys[at] == key and slots[at] < totals.names:
                slot = slots[at]
                record = records[slot]
                if text[ends[slot - 1] if slot else 0 : ends[slot]] == data and record < totals.records:
                    found.append(record)
                    continue
            found.append(self.find_name(name))  # another name of this key, none, or an index that is refused
        return found

    def names_of(self, record: int) -> list[str]:
        """Names of a record, in the order they were given."""
        low, high = 0, self._manifest.totals.names
        while low < high:
            middle = (low + high) // 2
            columns, row = self.names.locate(middle)
            if columns.flat["record"][row] < record:
                low = middle + 1
            else:
                high = middle
        found = []
        while low < self._manifest.totals.names:
            columns, row = self.names.locate(low)
            if columns.flat["record"][row] != record:
                break
            found.append(self._decode(self._name(columns, row)))
            low += 1
        if not found:
            raise make_error("E056", "the record has no name", path=self._reader.path("index"), record=record)
        return found

    def all_names(self) -> Iterator[tuple[str, int]]:
        """All names with their records, by record."""
        for number in range(len(self.names.parts)):
            columns = self.names.part(number)
            for row in range(columns.count):
                yield self._decode(self._name(columns, row)), columns.flat["record"][row]

    def _decode(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise make_error("E056", "a name is not UTF-8", path=self._reader.path("index")) from None

    def _name(self, columns: Columns, row: int) -> bytes:
        ends = columns.flat["end"]
        begin, end = ends[row - 1] if row else 0, ends[row]
        text = columns.flat["bytes"]
        if not begin < end <= len(text):
            raise make_error("E056", f"a name from {begin} to {end} of {len(text)}", path=self._reader.path("index"))
        return bytes(text[begin:end])

    def _slots(self, table: str, lookup: _Table, key: int) -> Iterator[int]:
        first_keys = self._first_keys.get(table)
        if first_keys is None:
            first_keys = [int(part.first_key, 16) for part in getattr(self._manifest.index, table)]
            self._first_keys[table] = first_keys
        # Entries of one key may begin in the part before the first part that begins with it.
        number = max(bisect_left(first_keys, key) - 1, 0)
        while number < len(first_keys) and first_keys[number] <= key:
            flat = lookup.part(number).flat
            keys, slots = flat["key"], flat["slot"]
            at = bisect_left(keys, key)
            while at < len(keys) and keys[at] == key:
                yield slots[at]
                at += 1
            number += 1
