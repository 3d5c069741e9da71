"""Documents and extras: media, positions, masks, dtypes, bit patterns."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvformat
from kvformat.spec.schema import ITEM_SIZES, Extra, Schema
from kvformat.testing.vectors.case import TOKEN_IDS, TOKENS, Case, Entry, document_ids, kv, schema_of, usual_entries
from kvformat.testing.vectors.values import axes, component

__all__ = ["CASES"]


def _media(count: int) -> tuple[kvformat.Media, ...]:
    schemes: tuple[Any, ...] = ("source", "pixels", "opaque")
    return tuple(
        kvformat.Media(scheme=schemes[n % 3], first=n // 2, count=n, digest=hashlib.sha256(bytes([n])).digest())
        for n in range(count)
    )


def _dims_case() -> Case:
    extras = (
        TOKEN_IDS,
        Extra(name="media", axes=axes(("media", "media"), ("entry", 49)), dtype="U8"),
        Extra(name="boxes", axes=axes(("boxes", "boxes"), ("corner", 4)), dtype="F32"),
        Extra(name="pairs", axes=axes(TOKENS, ("boxes", "boxes")), dtype="U8"),
        Extra(name="grid", axes=axes(("media", "media"), ("thw", 3)), dtype="I32"),
        Extra(name="caption_id", axes=axes(("one", 1)), dtype="U64"),
    )
    schema = schema_of(
        *kv((0,)),
        component("patches", "hidden", (0, 4), ("boxes", "boxes"), ("width", 3)),
        extras=extras,
        dims=("media", "boxes"),
    )
    entries = tuple(
        Entry(
            names=(f"clip-{n}",),
            document=kvformat.Document.of(document_ids(4, n), media=_media(media)),
            dims={"boxes": boxes},
        )
        for n, (media, boxes) in enumerate([(0, 0), (2, 0), (0, 3), (3, 1)])
    )
    return Case(name="dims-of-zero", schema=schema, entries=entries)


def _positions_case(rows: int, name: str) -> Case:
    extras = (TOKEN_IDS, Extra(name="position_ids", axes=axes(("rows", rows), TOKENS), dtype="I32"))
    plain = np.arange(4, dtype="<i4")
    given: list[NDArray[np.int32] | None] = [None, plain + 7, np.stack([plain, plain // 2, plain % 2])[:rows], -plain]
    entries = tuple(
        Entry(names=(f"clip-{n}",), document=kvformat.Document.of(document_ids(4, n), position_ids=positions))
        for n, positions in enumerate(given)
    )
    return Case(name=name, schema=schema_of(*kv((0,)), extras=extras), entries=entries)


def _masks_case() -> Case:
    extras = (TOKEN_IDS, Extra(name="mask", axes=axes(("kind_and_length", 2)), dtype="U64"))
    ids = document_ids(5, 1)
    documents = (
        kvformat.Document.of(ids),
        kvformat.Document.of(ids, mask="prefix", prefix_length=1),
        kvformat.Document.of(ids, mask="prefix", prefix_length=4),
        kvformat.Document.of(ids, mask="bidirectional"),
    )
    entries = tuple(Entry(names=(f"clip-{n}",), document=document) for n, document in enumerate(documents))
    return Case(name="masks", schema=schema_of(*kv((0,)), extras=extras), entries=entries)


def _dtypes_case() -> Case:
    components = tuple(
        component(f"c_{dtype.lower()}", "other", (0, 2), TOKENS, ("width", 3), dtype=dtype)
        for dtype in ("I8", "F8_E5M2", "BF16", "F32", "F16", "F8_E4M3")
    )
    extras = tuple(
        Extra(name=f"x_{dtype.lower()}", axes=axes(TOKENS, ("width", 3)), dtype=dtype) for dtype in sorted(ITEM_SIZES)
    )
    return Case(
        name="every-dtype", schema=schema_of(*components, extras=(TOKEN_IDS, *extras)), entries=usual_entries(3, 1)
    )


def _patterns_case() -> Case:
    schema = schema_of(
        component("k", "key", (0,), TOKENS, ("heads", 8), ("head_dim", 256), stage="attention"),
        component("v", "value", (0,), TOKENS, ("heads", 1), ("head_dim", 16)),
        component("h", "hidden", (0,), TOKENS, ("width", 2), dtype="F32"),
        component("o", "other", (0,), TOKENS, ("width", 8), dtype="F8_E5M2"),
        extras=(),
    )
    patterns = np.arange(65_536, dtype="<u2")
    odd = np.array([0x7FC00001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1], dtype="<u4")
    values = {
        "k": patterns.tobytes(),
        "v": patterns[::-1][: 32 * 16].tobytes(),
        "h": np.resize(odd, 64).tobytes(),
        "o": np.arange(256, dtype="u1").tobytes(),
    }
    entry = Entry(names=("every bf16 pattern",), document=kvformat.Document.of(document_ids(32, 1)), values=values)
    return Case(
        name="nan-payloads",
        schema=schema,
        entries=(entry,),
        options={"shard_slots": 1, "allow_non_finite": ("k", "v", "h", "o")},
    )


def _without_ids_case() -> Case:
    schema = Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4, token_ids=False)
    document = kvformat.Document.of(document_ids(2, 9), mask="bidirectional", position_ids=[5, 5], media=_media(2))
    entries = (*usual_entries(4, 3), Entry(names=("everything unusual",), document=document))
    return Case(name="no-token-ids", schema=schema, entries=entries)


CASES = (
    _dims_case(),
    _positions_case(1, "positions-1-row"),
    _positions_case(3, "positions-3-rows"),
    _masks_case(),
    _dtypes_case(),
    _patterns_case(),
    _without_ids_case(),
)
