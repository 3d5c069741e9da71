"""Digests and checksums of values (SPEC.md, sections 8, 9, 11 and 12)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

from kvformat.spec import canonical
from kvformat.spec.context import Context
from kvformat.spec.schema import Schema

__all__ = [
    "context_digest",
    "document_key",
    "fingerprint",
    "name_key",
    "record_sum",
    "schema_digest",
    "slab_sum",
    "slab_sums",
    "sums_of",
]

_RECORD = b"kvf1.rec"


def schema_digest(schema: Schema) -> bytes:
    """32 bytes: SHA-256 over the canonical schema, with its domain in front."""
    return hashlib.sha256(b"kvf1/schema\0" + canonical.encode(schema)).digest()


def context_digest(context: Context) -> bytes:
    """32 bytes: SHA-256 over the canonical context, with its domain in front."""
    return hashlib.sha256(b"kvf1/context\0" + canonical.encode(context)).digest()


def fingerprint(context: Context, schema: Schema, document: bytes) -> bytes | None:
    """Identity of one record's values (32 bytes); None for an unknown context."""
    if context.model is None:
        return None
    parts = context_digest(context) + schema_digest(schema) + document
    return hashlib.sha256(b"kvf1/fingerprint\0" + parts).digest()


def slab_sum(data: bytes | memoryview) -> int:
    """XXH3-64 (seed 0) of a slab or an extra."""
    return xxhash.xxh3_64_intdigest(data)


def slab_sums(data: memoryview, count: int) -> list[int]:
    """XXH3-64 (seed 0) of each of ``count`` slabs of one size, whose flat bytes ``data`` are."""
    nbytes = len(data) // count
    if nbytes == 0:
        return [slab_sum(b"")] * count
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[start : start + nbytes]) for start in range(0, len(data), nbytes)]


def sums_of(data: memoryview, places: Iterable[slice]) -> list[int]:
    """XXH3-64 (seed 0) of the bytes at each of these places; a third quicker than a loop over them."""
    return list(map(xxhash.xxh3_64_intdigest, map(data.__getitem__, places)))


def record_sum(dims: Sequence[int], sums: bytes | memoryview) -> bytes:
    """XXH3-128 (16 canonical bytes) over dims and stored sums."""
    return xxhash.xxh3_128_digest(b"".join((_record_head(tuple(dims)), sums)))


@lru_cache(4096)
def _record_head(dims: tuple[int, ...]) -> bytes:
    return _RECORD + struct.pack(f"<{len(dims)}Q", *dims)


def document_key(document: bytes) -> int:
    """Lookup key of a document digest: its first 8 bytes, big-endian."""
    return int.from_bytes(document[:8], "big")


def name_key(name: bytes) -> int:
    """Lookup key of a name's UTF-8 bytes: XXH3-64 (seed 0)."""
    return xxhash.xxh3_64_intdigest(name)
