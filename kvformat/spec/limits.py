"""Limits of format version 1 (SPEC.md, "Limits")."""

from __future__ import annotations

__all__ = [
    "ALIGNMENT",
    "FEATURES",
    "FORMAT",
    "INDEX_ALIGNMENT",
    "MAX_CONTENT_NBYTES",
    "MAX_FILE_NBYTES",
    "MAX_HEADER_NBYTES",
    "MAX_INTEGER",
    "MAX_JSON_DEPTH",
    "MAX_LAYER",
    "MAX_MANIFEST_NBYTES",
    "MAX_NAME_NBYTES",
    "MAX_PART_ROWS",
    "MAX_RECORDS",
    "MAX_ROOT_NBYTES",
    "MAX_SHARDS",
    "MAX_SHARD_SLOTS",
    "MAX_TOKENS",
    "MAX_TOKEN_ID",
    "VERSION",
]

FORMAT = "kvformat"
VERSION = "1.0"
MAJOR = 1
MINOR = 0
FEATURES: frozenset[str] = frozenset()
"""Names in ``requires`` this implementation knows."""

ALIGNMENT = 4096
INDEX_ALIGNMENT = 64
MAX_JSON_DEPTH = 32
MAX_INTEGER = 2**53 - 1
MAX_ROOT_NBYTES = 65_536
MAX_MANIFEST_NBYTES = 64 << 20
MAX_CONTENT_NBYTES = 64 << 20
"""Of a covered file whose content the specification owns."""
MAX_FILE_NBYTES = 2**48 - 1
MAX_HEADER_NBYTES = 100_000_000
MAX_RECORDS = 2**48 - 1
MAX_SHARDS = 10**8
MAX_SHARD_SLOTS = 10_000
MAX_TOKENS = 2**24
MAX_DIM = 2**32 - 1
MAX_DIMS = 16
MAX_TOKEN_ID = 2**31 - 1
MAX_NAME_NBYTES = 512
MAX_PART_ROWS = 2**20
MAX_LAYER = 65_535
