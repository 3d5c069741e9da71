"""Which record is in which shard, and which are computed together: pure functions of lengths and sizes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.spec import limits
from kvformat.spec.layout import Layout

__all__ = ["Arrangement", "Order", "arrange", "payload_nbytes"]

Order = Literal["given", "length"]
U64 = NDArray[np.uint64]


class Arrangement(NamedTuple):
    """Records of a plan.

    Attributes
    ----------
    document
        Number of the document of each record: uint64 ``[records]``.
    shard_first
        First record of each shard: uint64 ``[shards]``.
    group_first
        First record of each forward group: uint64 ``[groups]``. A group ends where the next one begins; no shard
        ends within one.
    """

    document: U64
    shard_first: U64
    group_first: U64


def payload_nbytes(layout: Layout, num_tokens: NDArray[Any], num_media: NDArray[Any]) -> NDArray[np.int64]:
    """Bytes of the record of each document, aligned as a shard has them: int64 ``[documents]``.

    Raises
    ------
    InputError
        E111 for a record beyond the limits, and where the schema has dims that no plan knows.
    """
    unknown = [dim for dim in layout.schema.dims if dim not in ("tokens", "media")]
    if unknown:
        raise make_error(
            "E111",
            f"the sizes of {', '.join(map(repr, unknown))} are known only once a record is computed, and a plan needs "
            "them beforehand; write such a dataset with kvformat.create",
        )
    key = num_tokens.astype(np.int64) << 32
    if "media" in layout.schema.dims:
        key |= num_media.astype(np.int64)
    kinds, which, counts = np.unique(key, return_inverse=True, return_counts=True)
    sizes = []
    for kind in kinds.tolist():
        dims = {"tokens": kind >> 32, "media": kind & 0xFFFFFFFF}
        sizes.append(layout.place(tuple(dims[dim] for dim in layout.schema.dims)).nbytes)
    total = sum(size * count for size, count in zip(sizes, counts.tolist(), strict=True))
    if total > limits.MAX_INTEGER:
        raise make_error("E111", f"the records would have {total:,} bytes, at most 2^53-1 are allowed")
    return np.array(sizes, dtype=np.int64)[which]


def arrange(
    num_tokens: NDArray[Any],
    nbytes: NDArray[np.int64],
    *,
    shard_nbytes: int,
    shard_slots: int,
    order: Order,
    batch_size: int,
    batch_tokens: int | None,
) -> Arrangement:
    """Arrange documents as records.

    A shard closes before its payload would exceed ``shard_nbytes`` or at ``shard_slots`` records, as the writer closes
    it; a larger record is alone. With ``order="length"`` the same records are in each shard, sorted by length.

    Parameters
    ----------
    num_tokens, nbytes
        Tokens of each document, and bytes of its record: ``[documents]``.
    batch_size, batch_tokens
        Most documents of a forward group, and most tokens; all documents of a group have one length. A document of
        more tokens is alone.
    """
    shard_first = _shards(nbytes, shard_nbytes, shard_slots)
    document = np.arange(len(nbytes), dtype=np.uint64)
    if order == "length":
        sizes = np.diff(np.append(shard_first, len(nbytes)))
        shard = np.repeat(np.arange(len(shard_first)), sizes)
        document = np.lexsort((num_tokens, shard)).astype(np.uint64)
    lengths = num_tokens.astype(np.int64)[document.astype(np.intp)]
    groups = _groups(lengths, shard_first, batch_size, batch_tokens)
    return Arrangement(document, shard_first.astype(np.uint64), groups.astype(np.uint64))


def _shards(nbytes: NDArray[np.int64], shard_nbytes: int, shard_slots: int) -> NDArray[np.int64]:
    end = np.cumsum(nbytes)
    found = []
    first = filled = 0
    while first < len(nbytes):
        found.append(first)
        last = int(np.searchsorted(end, np.int64(filled + shard_nbytes), side="right"))
        first = min(max(last, first + 1), first + shard_slots)
        filled = int(end[min(first, len(end)) - 1])
    return np.array(found, dtype=np.int64)


def _groups(
    lengths: NDArray[np.int64], shard_first: NDArray[np.int64], batch_size: int, batch_tokens: int | None
) -> NDArray[np.int64]:
    begins = np.ones(len(lengths), dtype=np.bool_)
    begins[1:] = lengths[1:] != lengths[:-1]
    begins[shard_first] = True
    first = np.flatnonzero(begins)
    runs = np.diff(np.append(first, len(lengths)))
    most = np.full(len(first), batch_size, dtype=np.int64)
    if batch_tokens is not None:
        most = np.clip(batch_tokens // lengths[first], 1, batch_size)
    pieces = -(-runs // most)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    found: NDArray[np.int64] = np.repeat(first, pieces) + number * np.repeat(most, pieces)
    return found
