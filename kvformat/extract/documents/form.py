"""The form of a documents file: its columns, what its description holds, and how its parts prove a document."""

from __future__ import annotations

import hashlib
import struct

from msgspec import Struct

from kvformat.extract.columns import ColumnSpec
from kvformat.spec.context import Text
from kvformat.spec.document import MASKS, MEDIA_ENTRY_NBYTES
from kvformat.spec.manifest import Skipped

__all__ = ["COLUMNS", "TABLE", "About", "document_sum"]

TABLE = "documents"
COLUMNS = (
    # Token ids of a document, then its rows of positions; proved by the document's digest, one at a time.
    ColumnSpec("inputs", "I32", proved=False),
    # Of each document, in the order in which they came first.
    ColumnSpec("tokens", "U32"),
    ColumnSpec("position_rows", "U8"),
    ColumnSpec("mask", "U8"),
    ColumnSpec("prefix_length", "U32"),
    ColumnSpec("digest", "U8", (32,)),
    ColumnSpec("media_end", "U64"),
    ColumnSpec("media", "U8", (MEDIA_ENTRY_NBYTES,)),
    # Of each name, in the order of the inputs.
    ColumnSpec("name_document", "U64"),
    ColumnSpec("name_input", "U64"),
    ColumnSpec("name_end", "U64"),
    ColumnSpec("name_bytes", "U8"),
    # Where media are, by the digest of their entries.
    ColumnSpec("source_digest", "U8", (32,)),
    ColumnSpec("source_end", "U64"),
    ColumnSpec("source_bytes", "U8"),
    # Canonical JSON of an :class:`About`.
    ColumnSpec("about", "U8"),
)
_MAGIC = b"kvf1/document\0"
_HEAD = struct.Struct("<Q")
_COUNT = struct.Struct("<I")


class About(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How text became ids, and what was left out."""

    skipped: tuple[Skipped, ...]
    text: Text


def document_sum(
    num_tokens: int, inputs: memoryview, *, mask: int, prefix_length: int, rows: int, media: memoryview
) -> bytes:
    """Digest of the document these stored parts are of (SPEC.md, "Document bytes").

    Parameters
    ----------
    inputs
        Bytes of the token ids, then of the rows of positions.
    mask
        As :data:`~kvformat.spec.document.MASKS` numbers them.
    """
    cut = 4 * num_tokens
    length = _HEAD.pack(prefix_length) if MASKS[mask] == "prefix" else b""
    count = _COUNT.pack(len(media) // MEDIA_ENTRY_NBYTES)
    kinds = (bytes((mask,)), length, bytes((rows,)))
    parts = (_MAGIC, _HEAD.pack(num_tokens), inputs[:cut], *kinds, inputs[cut:], count, media)
    return hashlib.sha256(b"".join(parts)).digest()
