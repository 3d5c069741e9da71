"""Shard headers and record sums (SPEC.md, section 12)."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import digests
from kvformat.spec.layout import Layout, Placement

__all__ = ["encode_header", "header_fault", "sum_record"]

_METADATA = re.compile(rb'\{"__metadata__":\{"kvformat":"[0-9.]+","ordinal":"([0-9]+)","schema":"([0-9a-f]{64})"\}')


def encode_header(
    layout: Layout, *, version: str, ordinal: int, placements: Sequence[Placement], header_size: int
) -> bytes:
    """The first ``header_size`` bytes of a shard: length, JSON, spaces."""
    text = layout.header(version, ordinal, placements)
    return struct.pack("<Q", header_size - 8) + text.ljust(header_size - 8)


def header_fault(
    found: bytes | memoryview,
    *,
    layout: Layout,
    version: str,
    ordinal: int,
    placements: Sequence[Placement],
    header_size: int,
    path: str,
) -> KVFormatError | None:
    """What is wrong with the header of a shard of these records: E061, E062, E063, or nothing."""
    expected = encode_header(layout, version=version, ordinal=ordinal, placements=placements, header_size=header_size)
    found = bytes(found)
    if found == expected:
        return None
    if found[:8] != expected[:8]:
        length = struct.unpack("<Q", found[:8])[0] if len(found) >= 8 else 0
        return make_error(
            "E061", f"the header length is {length}, expected {header_size - 8}: restore the shard", path=path
        )
    ours, theirs = _METADATA.match(expected, 8), _METADATA.match(found, 8)
    if ours and theirs and ours.groups() != theirs.groups():
        here, wanted = (f"shard {int(one[1][:20])} of schema {one[2].decode()[:16]}" for one in (theirs, ours))
        message = f"this is {here}, expected {wanted}: files were exchanged, put each back in its place"
        return make_error("E062", message, path=path)
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
    message = (
        f"the header differs from the one its rows demand at byte {at}: {found[at : at + 24]!r}; restore the shard"
    )
    return make_error("E063", message, path=path)


def sum_record(dims: Sequence[int], sums: Sequence[int]) -> tuple[bytes, bytes]:
    """``sums`` as stored, and the ``record_sum`` over them."""
    stored = struct.pack(f"<{len(sums)}Q", *sums)
    return stored, digests.record_sum(dims, stored)
