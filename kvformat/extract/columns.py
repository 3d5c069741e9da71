"""Files of columns: strict safetensors, mapped when read, their columns proved by SHA-256 digests in the header.

A file begins with a header of :data:`HEADER_NBYTES`, whatever is in it, so that its first column can be written before
anyone knows how long that will be. Stock safetensors reads these files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import limits
from kvformat.spec.layout import align
from kvformat.storage.local_read import OpenFile
from kvformat.storage.local_write import LocalFiles

__all__ = ["HEADER_NBYTES", "ColumnSpec", "ColumnsFile", "Written", "prove_columns", "write_columns"]

Array = NDArray[Any]
HEADER_NBYTES = 8192
_HEX64 = re.compile(r"[0-9a-f]{64}")
_NUMPY: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
}


class ColumnSpec(NamedTuple):
    """A column of a table: its name, its dtype, and the sizes of a row.

    Attributes
    ----------
    proved
        Whether the header states its SHA-256. What something else proves piece by piece need not be hashed whenever
        the file is opened.
    """

    name: str
    dtype: str
    row: tuple[int, ...] = ()
    proved: bool = True


class Written(NamedTuple):
    """What proves a file: the SHA-256 of its header in hexadecimal, and its size."""

    sha256: str
    nbytes: int


class _Placed(NamedTuple):
    spec: ColumnSpec
    shape: tuple[int, ...]
    first: int
    nbytes: int
    pad: int


def write_columns(
    files: LocalFiles,
    fd: int,
    path: Path,
    table: str,
    specs: Sequence[ColumnSpec],
    columns: Mapping[str, Array],
    *,
    metadata: Mapping[str, str] | None = None,
    streamed: int | None = None,
) -> Written:
    """Write a file of columns and make it durable; its directory entry is not.

    Parameters
    ----------
    columns
        By name, ``[rows, *row]`` each.
    metadata
        Members of the header's metadata beside those every file has.
    streamed
        Rows of the first column, where the caller has written it already, from :data:`HEADER_NBYTES` on. Such a column
        is not a proved one.

    Raises
    ------
    StorageError
        E200, E202, E203.
    """
    given = specs if streamed is None else specs[1:]
    counts = [len(columns[spec.name]) for spec in given]
    placed = _place(specs, counts if streamed is None else [streamed, *counts])
    if streamed is not None:
        files.write(fd, [bytes(placed[0].pad)], placed[0].first + placed[0].nbytes, path)
    sums: dict[str, str] = {}
    for column in placed[len(specs) - len(given) :]:
        data = _bytes_of(column, columns)
        if column.spec.proved:
            sums[column.spec.name] = hashlib.sha256(data).hexdigest()
        files.write(fd, [data, bytes(column.pad)], column.first, path)
    header = _header(table, placed, sums, metadata or {})
    files.write(fd, [header], 0, path)
    files.sync(fd, path)
    return _written(header, placed)


def prove_columns(
    table: str, specs: Sequence[ColumnSpec], columns: Mapping[str, Array], *, metadata: Mapping[str, str] | None = None
) -> Written:
    """What proves a file of these columns, without writing it; parameters as for :func:`write_columns`."""
    placed = _place(specs, [len(columns[spec.name]) for spec in specs])
    sums = {
        column.spec.name: hashlib.sha256(_bytes_of(column, columns)).hexdigest()
        for column in placed
        if column.spec.proved
    }
    return _written(_header(table, placed, sums, metadata or {}), placed)


class ColumnsFile:
    """A file of columns, open and checked: its header byte by byte, its size, its proved columns and its padding.

    Parameters
    ----------
    metadata
        Names of the members that are expected in the header's metadata beside those every file has.
    what
        What the file is, and how to make it again; ends the messages.

    Attributes
    ----------
    proof
        What proves the file.
    arrays
        The proved columns by name: views of the mapping, or of bytes that were read.
    counts
        Rows of every column.
    metadata
        The members asked for.

    Raises
    ------
    DamageError
        E307.
    """

    def __init__(
        self, file: OpenFile, table: str, specs: Sequence[ColumnSpec], *, metadata: Sequence[str] = (), what: str
    ) -> None:
        self._file = file
        self._what = what
        size = file.identity.nbytes
        if size < HEADER_NBYTES:
            self.refuse(f"{size} bytes, a header alone has {HEADER_NBYTES}")
        header = bytes(file.read(0, HEADER_NBYTES))
        counts, sums, self.metadata = self._parse(header, table, specs, metadata)
        placed = _place(specs, counts)
        if size != _end(placed):
            self.refuse(f"{size} bytes, its header demands {_end(placed)}")
        if _header(table, placed, sums, self.metadata) != header:
            self.refuse("its header is none of ours")
        self.proof = _written(header, placed)
        self.counts = {column.spec.name: column.shape[0] for column in placed}
        self._first = {column.spec.name: column.first for column in placed}
        self.arrays: dict[str, Array] = {}
        for column in placed:
            if np.frombuffer(file.read(column.first + column.nbytes, column.pad), dtype=np.uint8).any():
                self.refuse(f"the padding of column {column.spec.name!r} is not zero")
            if column.spec.proved:
                data = file.read(column.first, column.nbytes)
                if hashlib.sha256(data).hexdigest() != sums[column.spec.name]:
                    self.refuse(f"column {column.spec.name!r} is not as it was written")
                self.arrays[column.spec.name] = np.frombuffer(data, dtype=_NUMPY[column.spec.dtype]).reshape(
                    column.shape
                )

    @property
    def path(self) -> str:
        """Of the file."""
        return self._file.path

    def read(self, column: str, first: int, nbytes: int) -> memoryview:
        """Bytes of a column that is not a proved one, from byte ``first`` of it: a view of the mapping, or read."""
        return self._file.read(self._first[column] + first, nbytes)

    def refuse(self, reason: str) -> NoReturn:
        """Raise E307."""
        raise make_error("E307", f"{reason}; {self._what}", path=self._file.path)

    def _parse(
        self, header: bytes, table: str, specs: Sequence[ColumnSpec], metadata: Sequence[str]
    ) -> tuple[list[int], dict[str, str], dict[str, str]]:
        try:
            value = json.loads(header[8:])
            found: dict[str, Any] = value["__metadata__"]
            if found["table"] != table:
                self.refuse(f"a table of {found['table']!r:.80}, expected {table!r}")
            version = found["kvformat"]
            counts = [value[spec.name]["shape"][0] for spec in specs]
            sums = {spec.name: found[f"sha256.{spec.name}"] for spec in specs if spec.proved}
            more = {name: found[name] for name in metadata}
        except KVFormatError:
            raise
        except (ValueError, LookupError, TypeError, RecursionError):
            self.refuse("its header cannot be read")
        if version != limits.VERSION:
            self.refuse(f"written by version {version!r:.40}, this one reads {limits.VERSION}")
        if not all(type(count) is int and 0 <= count <= limits.MAX_FILE_NBYTES for count in counts):
            self.refuse("its header cannot be read")
        if not all(isinstance(text, str) and _HEX64.fullmatch(text) for text in (*sums.values(), *more.values())):
            self.refuse("its header cannot be read")
        return counts, sums, more


def _place(specs: Sequence[ColumnSpec], counts: Sequence[int]) -> list[_Placed]:
    placed = []
    at = HEADER_NBYTES
    for spec, count in zip(specs, counts, strict=True):
        nbytes = count * prod(spec.row) * _NUMPY[spec.dtype].itemsize
        pad = align(at + nbytes, limits.INDEX_ALIGNMENT) - at - nbytes
        placed.append(_Placed(spec, (count, *spec.row), at, nbytes, pad))
        at += nbytes + pad
    return placed


def _bytes_of(column: _Placed, columns: Mapping[str, Array]) -> memoryview:
    array = np.ascontiguousarray(columns[column.spec.name], dtype=_NUMPY[column.spec.dtype])
    if array.shape != column.shape:
        raise make_error("E111", f"column {column.spec.name!r} has shape {array.shape}, expected {column.shape}")
    return array.reshape(-1).view(np.uint8).data


def _written(header: bytes, placed: Sequence[_Placed]) -> Written:
    return Written(hashlib.sha256(header).hexdigest(), _end(placed))


def _end(placed: Sequence[_Placed]) -> int:
    return placed[-1].first + placed[-1].nbytes + placed[-1].pad


def _header(table: str, placed: Sequence[_Placed], sums: Mapping[str, str], metadata: Mapping[str, str]) -> bytes:
    members = {"kvformat": limits.VERSION, "table": table, **metadata}
    members |= {f"sha256.{name}": digest for name, digest in sums.items()}
    entries: dict[str, object] = {"__metadata__": dict(sorted(members.items()))}
    for column in placed:
        first = column.first - HEADER_NBYTES
        end = first + column.nbytes
        entries[column.spec.name] = _entry(column.spec.dtype, column.shape, first, end)
        if column.pad:
            entries[f"{column.spec.name}.pad"] = _entry("U8", (column.pad,), end, end + column.pad)
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    if len(text) > HEADER_NBYTES - 8:
        raise AssertionError(len(text))
    return (HEADER_NBYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_NBYTES - 8)


def _entry(dtype: str, shape: tuple[int, ...], first: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}
