"""Parts of index tables as bytes, and as columns over a buffer (SPEC.md, section 13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.spec import tables

__all__ = ["Columns", "encode"]

Array = NDArray[Any]
_NUMPY: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8")}

_FORMATS: dict[str, Literal["B", "I", "Q"]] = {"U8": "B", "U32": "I", "U64": "Q"}


def encode(table: str, columns: Mapping[str, Array], *, version: str) -> bytes:
    """One part holding all rows of ``columns``; dims and nbytes follow from the arrays' shapes."""
    count = len(next(iter(columns.values())))
    dims = columns["dims"].shape[1] if "dims" in columns else 0
    nbytes = columns["bytes"].size if "bytes" in columns else 0
    form = tables.form(table, count, dims, nbytes, version)
    pieces = [form.header]
    for column in form.columns:
        array = np.ascontiguousarray(columns[column.name], dtype=_NUMPY[column.dtype])
        if array.shape != column.shape:
            raise make_error("E111", f"column {column.name!r} has shape {array.shape}, expected {column.shape}")
        pieces += [array.tobytes(), bytes(column.pad)]
    return b"".join(pieces)


class Columns:
    """The columns of a part, as views of the buffer it lies in.

    Attributes
    ----------
    count
        Rows.
    flat
        By column, a memoryview of its items: reading one costs no numpy scalar.
    arrays
        By column, a numpy array.
    """

    __slots__ = ("arrays", "count", "flat", "form")

    def __init__(
        self, buffer: memoryview, table: str, *, count: int, num_dims: int, nbytes: int, version: str, path: str
    ) -> None:
        form = tables.form(table, count, num_dims, nbytes, version)
        if len(buffer) != form.nbytes:
            raise make_error("E005", f"{len(buffer)} bytes, expected {form.nbytes}", path=path)
        if buffer[: len(form.header)] != form.header:
            raise make_error("E051", f"the header is not the one of table {table!r} with {count} rows", path=path)
        self.form = form
        self.count = count
        self.arrays: dict[str, Array] = {}
        self.flat: dict[str, memoryview] = {}
        for column in form.columns:
            items = buffer[column.first : column.first + column.nbytes]
            dtype = _NUMPY[column.dtype]
            self.arrays[column.name] = np.frombuffer(items, dtype=dtype).reshape(column.shape)
            self.flat[column.name] = items.cast("B").cast(_FORMATS[column.dtype])

    def padding_is_zero(self, buffer: memoryview) -> bool:
        """Whether all pads of the part hold zeros."""
        return all(
            not np.frombuffer(buffer[c.first + c.nbytes : c.first + c.nbytes + c.pad], dtype=np.uint8).any()
            for c in self.form.columns
            if c.pad
        )
