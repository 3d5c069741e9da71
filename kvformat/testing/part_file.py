"""One index part as an editable file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.spec import tables

__all__ = ["Array", "PartFile", "lookup_columns"]

Array = NDArray[Any]
_NUMPY = {"U8": "u1", "U32": "<u4", "U64": "<u8"}


def lookup_columns(keys: Sequence[int]) -> dict[str, Array]:
    """Columns of a lookup table over rows with these keys."""
    order = sorted(range(len(keys)), key=lambda slot: (keys[slot], slot))
    return {
        "key": np.array([keys[slot] for slot in order], dtype="<u8"),
        "slot": np.array(order, dtype="<u8"),
    }


class PartFile:
    """One index part.

    Attributes
    ----------
    columns
        By name, writable views of ``data``.
    entry
        The manifest's object, shared with it.
    pads
        Where each pad begins.
    """

    def __init__(self, table: str, data: bytearray, entry: dict[str, Any], *, num_dims: int, version: str) -> None:
        self.table = table
        self.data = data
        self.entry = entry
        form = tables.form(table, entry["count"], num_dims, entry.get("nbytes", 0), version)
        self.header_nbytes = len(form.header)
        self.columns: dict[str, Array] = {}
        for column in form.columns:
            items = memoryview(data)[column.first : column.first + column.nbytes]
            self.columns[column.name] = np.frombuffer(items, dtype=_NUMPY[column.dtype]).reshape(column.shape)
        self.pads = [column.first + column.nbytes for column in form.columns if column.pad]

    def replace(self, data: bytes | bytearray) -> None:
        """Put other bytes in the place of the part; its columns still show the old ones."""
        self.data = bytearray(data)
