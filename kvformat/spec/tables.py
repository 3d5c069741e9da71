"""The form of index tables: columns and the header of a part (SPEC.md, section 13)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from kvformat.spec import limits
from kvformat.spec.layout import align
from kvformat.spec.schema import ITEM_SIZES

__all__ = ["TABLES", "Column", "Form", "form"]

TABLES = ("shards", "rows", "names", "document_keys", "name_keys")
_DTYPES = {**ITEM_SIZES, "U32": 4}


class Column(NamedTuple):
    """A column of a part; ``first`` is its offset in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    nbytes: int
    pad: int


class Form(NamedTuple):
    """What a part with given counts looks like: its header with length and spaces, its columns, its size."""

    header: bytes
    columns: tuple[Column, ...]
    nbytes: int


def form(table: str, count: int, num_dims: int, nbytes: int, version: str) -> Form:
    """Form of a part of ``table`` with ``count`` rows (and ``nbytes`` bytes of names)."""
    rows: dict[str, tuple[tuple[str, str, tuple[int, ...]], ...]] = {
        "shards": (("sha256", "U8", (count, 32)), ("size", "U64", (count,)), ("first_record", "U64", (count,))),
        "rows": (
            ("offset", "U64", (count,)),
            ("dims", "U32", (count, num_dims)),
            ("document", "U8", (count, 32)),
            ("record_sum", "U8", (count, 16)),
        ),
        "names": (
            ("record", "U64", (count,)),
            ("end", "U64", (count,)),
            ("input", "U64", (count,)),
            ("bytes", "U8", (nbytes,)),
        ),
        "document_keys": (("key", "U64", (count,)), ("slot", "U64", (count,))),
        "name_keys": (("key", "U64", (count,)), ("slot", "U64", (count,))),
    }
    parts = [f'{{"__metadata__":{{"kvformat":"{version}","table":"{table}"}}']
    placed = []
    at = 0
    for name, dtype, shape in rows[table]:
        size = prod(shape) * _DTYPES[dtype]
        pad = align(at + size, limits.INDEX_ALIGNMENT) - at - size
        parts.append(_entry(name, dtype, shape, at, at + size))
        if pad:
            parts.append(_entry(f"{name}.pad", "U8", (pad,), at + size, at + size + pad))
        placed.append((name, dtype, shape, at, size, pad))
        at += size + pad
    parts.append("}")
    text = "".join(parts).encode("ascii")
    start = align(8 + len(text), limits.INDEX_ALIGNMENT)
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    columns = tuple(Column(n, d, s, start + first, size, pad) for n, d, s, first, size, pad in placed)
    return Form(header, columns, start + at)


def _entry(name: str, dtype: str, shape: tuple[int, ...], first: int, end: int) -> str:
    sizes = ",".join(map(str, shape))
    return f',"{name}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{first},{end}]}}'
