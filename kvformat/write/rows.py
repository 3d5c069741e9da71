"""The tables of a dataset as a writer gathers them, and their parts (SPEC.md, section 13). Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvformat.codec import index
from kvformat.spec import limits

__all__ = ["EncodedPart", "Tables"]

U64 = NDArray[np.uint64]


class EncodedPart(NamedTuple):
    """One part as bytes, with what the manifest says of it besides digest and size."""

    table: str
    data: bytes
    num_rows: int
    first_key: int | None
    nbytes: int | None


class Tables:
    """Rows, names and shards of a dataset in the making; about 100 bytes a record.

    Records are numbered in the order of :meth:`add_record`.
    """

    def __init__(self, num_dims: int) -> None:
        self._num_dims = num_dims
        self._offset = array("Q")
        self._dims = array("L") if array("L").itemsize == 4 else array("I")
        self._document = bytearray()
        self._record_sum = bytearray()
        self._name_record = array("Q")
        self._name_input = array("Q")
        self._name_end = array("Q")
        self._name_bytes = bytearray()
        self._shard_sha256 = bytearray()
        self._shard_size = array("Q")
        self._shard_first = array("Q")
        self.tokens = 0

    @property
    def num_records(self) -> int:
        """Records so far."""
        return len(self._offset)

    @property
    def num_names(self) -> int:
        """Names so far."""
        return len(self._name_record)

    @property
    def num_shards(self) -> int:
        """Shards so far."""
        return len(self._shard_first)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards so far."""
        return sum(self._shard_size)

    def add_record(self, *, offset: int, dims: Sequence[int], document: bytes, record_sum: bytes) -> int:
        """Add the next record; returns its number."""
        self._offset.append(offset)
        self._dims.extend(dims)
        self._document += document
        self._record_sum += record_sum
        self.tokens += dims[0]
        return len(self._offset) - 1

    def add_name(self, *, record: int, name: bytes, position: int) -> None:
        """Add a name of a record, given as the ``position``-th input."""
        self._name_record.append(record)
        self._name_input.append(position)
        self._name_bytes += name
        self._name_end.append(len(self._name_bytes))

    def add_shard(self, *, sha256: bytes, size: int, first_record: int) -> None:
        """Add the next shard."""
        self._shard_sha256 += sha256
        self._shard_size.append(size)
        self._shard_first.append(first_record)

    def record(self, number: int) -> tuple[bytes, bytes]:
        """Document digest and record_sum of a record."""
        return (
            bytes(self._document[number * 32 : number * 32 + 32]),
            bytes(self._record_sum[number * 16 : number * 16 + 16]),
        )

    def encode(self, version: str, *, max_rows: int = limits.MAX_PART_ROWS) -> Iterator[EncodedPart]:
        """All parts of all tables."""
        yield from self._shards(version, max_rows)
        yield from self._rows(version, max_rows)
        order, ends, names = self._sorted_names()
        yield from self._names(version, max_rows, order, ends, names)
        documents = np.frombuffer(self._document, dtype=">u8").reshape(-1, 4)[:, 0].astype(np.uint64)
        yield from _lookup("document_keys", documents, version, max_rows)
        view = memoryview(names)
        starts = [0, *ends[:-1].tolist()]
        keys = np.fromiter(
            (xxhash.xxh3_64_intdigest(view[a:b]) for a, b in zip(starts, ends.tolist(), strict=True)),
            dtype=np.uint64,
            count=len(ends),
        )
        yield from _lookup("name_keys", keys, version, max_rows)

    def _shards(self, version: str, max_rows: int) -> Iterator[EncodedPart]:
        sha256 = np.frombuffer(self._shard_sha256, dtype=np.uint8).reshape(-1, 32)
        size, first = _u64(self._shard_size), _u64(self._shard_first)
        for a in range(0, len(size), max_rows):
            cut = slice(a, a + max_rows)
            columns: dict[str, NDArray[Any]] = {"sha256": sha256[cut], "size": size[cut], "first_record": first[cut]}
            yield EncodedPart("shards", index.encode("shards", columns, version=version), len(size[cut]), None, None)

    def _rows(self, version: str, max_rows: int) -> Iterator[EncodedPart]:
        total = self.num_records
        columns: dict[str, NDArray[Any]] = {
            "offset": _u64(self._offset),
            "dims": np.frombuffer(self._dims, dtype=np.uint32).reshape(total, self._num_dims),
            "document": np.frombuffer(self._document, dtype=np.uint8).reshape(total, 32),
            "record_sum": np.frombuffer(self._record_sum, dtype=np.uint8).reshape(total, 16),
        }
        start, ends = 0, [*self._shard_first[1:], total]
        for this, following in zip(ends, [*ends[1:], None], strict=True):
            if following is None or following - start > max_rows:
                cut = {name: column[start:this] for name, column in columns.items()}
                yield EncodedPart("rows", index.encode("rows", cut, version=version), this - start, None, None)
                start = this

    def _sorted_names(self) -> tuple[tuple[U64, U64], U64, bytes]:
        record, position, end = _u64(self._name_record), _u64(self._name_input), _u64(self._name_end)
        order = np.lexsort((position, record))
        raw = memoryview(self._name_bytes)
        begin = np.concatenate((np.zeros(1, np.uint64), end[:-1]))
        if (order[1:] > order[:-1]).all():
            return (record, position), end, bytes(raw)
        names = b"".join(raw[a:b] for a, b in zip(begin[order].tolist(), end[order].tolist(), strict=True))
        return (record[order], position[order]), np.cumsum((end - begin)[order], dtype=np.uint64), names

    @staticmethod
    def _names(version: str, max_rows: int, order: tuple[U64, U64], ends: U64, names: bytes) -> Iterator[EncodedPart]:
        record, position = order
        start = 0
        for a in range(0, len(ends), max_rows):
            cut = slice(a, a + max_rows)
            stop = int(ends[cut][-1])
            columns = {
                "record": record[cut],
                "end": ends[cut] - np.uint64(start),
                "input": position[cut],
                "bytes": np.frombuffer(names[start:stop], dtype=np.uint8),
            }
            data = index.encode("names", columns, version=version)
            yield EncodedPart("names", data, len(record[cut]), None, stop - start)
            start = stop


def _lookup(table: str, keys: U64, version: str, max_rows: int) -> Iterator[EncodedPart]:
    slots = np.argsort(keys, kind="stable").astype(np.uint64)
    keys = keys[slots]
    for a in range(0, len(keys), max_rows):
        cut = slice(a, a + max_rows)
        data = index.encode(table, {"key": keys[cut], "slot": slots[cut]}, version=version)
        yield EncodedPart(table, data, len(keys[cut]), int(keys[a]), None)


def _u64(values: array[int]) -> U64:
    return np.frombuffer(values, dtype=np.uint64)
