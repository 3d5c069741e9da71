"""Document bytes: injective, in normal form, and bounded."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import kvformat
from kvformat.errors import InputError
from kvformat.spec.document import MASKS, MEDIA_SCHEMES, Document, Media, unpack_media
from kvformat.testing.strategies import documents

D = bytes(range(32))


def decoded(data: bytes) -> dict[str, Any]:
    """Everything the bytes say, read one field behind the other; nothing may be left over."""
    assert data[:14] == b"kvf1/document\0"
    (tokens,) = struct.unpack_from("<Q", data, 14)
    at = 22
    ids = struct.unpack_from(f"<{tokens}I", data, at)
    at += 4 * tokens
    mask, length = data[at], 0
    at += 1
    if mask == 1:
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
    rows = data[at]
    positions = [struct.unpack_from(f"<{tokens}i", data, at + 1 + 4 * tokens * row) for row in range(rows)]
    at += 1 + 4 * tokens * rows
    (count,) = struct.unpack_from("<I", data, at)
    media = [struct.unpack_from("<BQQ32s", data, at + 4 + 49 * number) for number in range(count)]
    assert at + 4 + 49 * count == len(data)
    return {"ids": ids, "mask": MASKS[mask], "length": length, "positions": positions, "media": media}


def stated(document: Document) -> dict[str, Any]:
    rows = [] if document.position_ids is None else [tuple(row) for row in document.position_ids.tolist()]
    return {
        "ids": tuple(document.token_ids.tolist()),
        "mask": document.mask,
        "length": document.prefix_length,
        "positions": rows,
        "media": [(MEDIA_SCHEMES.index(m.scheme), m.first, m.count, m.digest) for m in document.media],
    }


@given(document=documents())
@settings(max_examples=300)
def test_the_bytes_determine_the_document(document: Document) -> None:
    """They decode to all that a document is, so two documents never share them."""
    data = document.to_bytes()
    assert decoded(data) == stated(document)
    assert document.digest == hashlib.sha256(data).digest()


@given(document=documents())
@settings(max_examples=200)
def test_positions_are_in_normal_form(document: Document) -> None:
    rows = stated(document)["positions"]
    assert rows != [tuple(range(document.num_tokens))]
    assert len(rows) in (0, 1, 3)
    assert len(rows) != 3 or not rows[0] == rows[1] == rows[2]


@given(document=documents())
@settings(max_examples=100)
def test_inputs_of_any_container_make_one_document(document: Document) -> None:
    options: dict[str, Any] = {
        "mask": document.mask,
        "prefix_length": document.prefix_length,
        "media": document.media,
    }
    positions = document.position_ids
    for ids in (
        document.token_ids.tolist(),
        tuple(document.token_ids.tolist()),
        document.token_ids.astype("u4"),
        document.token_ids.astype(">i8"),
        torch.from_numpy(document.token_ids.copy()),
        np.repeat(document.token_ids, 2)[::2],
    ):
        again = kvformat.document_digest(token_ids=ids, position_ids=positions, **options)
        assert again == document.digest
    if positions is not None and len(positions) == 1:
        for rows in (positions[0], np.repeat(positions, 3, axis=0), positions.tolist()):
            again = kvformat.document_digest(token_ids=document.token_ids, position_ids=rows, **options)
            assert again == document.digest


@given(first=documents(max_tokens=3), second=documents(max_tokens=3))
@settings(max_examples=200)
def test_equal_bytes_mean_equal_documents(first: Document, second: Document) -> None:
    assert (first.to_bytes() == second.to_bytes()) == (stated(first) == stated(second))


def test_media_entries_unpack_to_themselves() -> None:
    media = (
        Media(scheme="source", first=0, count=2, digest=D),
        Media(scheme="pixels", first=1, count=0, digest=D[::-1]),
        Media(scheme="opaque", first=1, count=2**40, digest=bytes(32)),
    )
    packed = np.frombuffer(b"".join(entry.pack() for entry in media), dtype=np.uint8).reshape(-1, 49)
    assert unpack_media(packed) == media


def test_golden_bytes() -> None:
    media = (Media(scheme="opaque", first=1, count=2, digest=D),)
    document = Document.of([1, 2, 258], position_ids=[-1, 0, 1], mask="prefix", prefix_length=2, media=media)
    fields = (
        "6b7666312f646f63756d656e7400",  # kvf1/document and a zero byte
        "0300000000000000",  # tokens
        "010000000200000002010000",  # ids
        "010200000000000000",  # mask: prefix of 2
        "01ffffffff0000000001000000",  # positions: one row
        "01000000",  # media
        "0201000000000000000200000000000000",  # scheme, first token, tokens
    )
    assert document.to_bytes() == bytes.fromhex("".join(fields)) + D


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("no-tokens", {"token_ids": []}),
    ("two-dimensions", {"token_ids": [[1, 2]]}),
    ("a-scalar", {"token_ids": 5}),
    ("negative", {"token_ids": [-1]}),
    ("too-large", {"token_ids": [2**31]}),
    ("floats", {"token_ids": [1.0]}),
    ("booleans", {"token_ids": [True]}),
    ("strings", {"token_ids": ["1"]}),
    ("positions-too-short", {"token_ids": [1, 2], "position_ids": [0]}),
    ("positions-of-2-rows", {"token_ids": [1, 2], "position_ids": [[0, 1], [0, 1]]}),
    ("positions-beyond-32-bits", {"token_ids": [1], "position_ids": [2**31]}),
    ("positions-floats", {"token_ids": [1], "position_ids": [0.0]}),
    ("unknown-mask", {"token_ids": [1], "mask": "full"}),
    ("prefix-of-none", {"token_ids": [1, 2], "mask": "prefix"}),
    ("prefix-of-all", {"token_ids": [1, 2], "mask": "prefix", "prefix_length": 2}),
    ("length-without-prefix", {"token_ids": [1, 2], "prefix_length": 1}),
    ("negative-prefix", {"token_ids": [1, 2], "mask": "prefix", "prefix_length": -1}),
    ("media-beyond", {"token_ids": [1], "media": [Media(scheme="source", first=0, count=2, digest=D)]}),
    ("media-digest-short", {"token_ids": [1], "media": [Media(scheme="source", first=0, count=1, digest=D[:31])]}),
    ("media-scheme", {"token_ids": [1], "media": [Media(scheme="url", first=0, count=1, digest=D)]}),  # type: ignore[arg-type]
    (
        "media-out-of-order",
        {"token_ids": [1, 2], "media": [Media(scheme="source", first=n, count=1, digest=D) for n in (1, 0)]},
    ),
    ("ragged", {"token_ids": [[1], [2, 3]]}),
    ("ragged-positions", {"token_ids": [1, 2], "position_ids": [[0], [0, 1]]}),
    ("prefix-of-a-fraction", {"token_ids": [1, 2], "mask": "prefix", "prefix_length": 1.5}),
    ("prefix-of-a-string", {"token_ids": [1, 2], "mask": "prefix", "prefix_length": "1"}),
    ("media-of-another-type", {"token_ids": [1], "media": ["image"]}),
    ("media-at-a-fraction", {"token_ids": [1], "media": [Media(scheme="source", first=0.5, count=0, digest=D)]}),  # type: ignore[arg-type]
    ("media-of-a-string", {"token_ids": [1], "media": [Media(scheme="source", first=0, count="1", digest=D)]}),  # type: ignore[arg-type]
    (
        "media-digest-a-string",
        {"token_ids": [1], "media": [Media(scheme="source", first=0, count=1, digest="a" * 32)]},
    ),  # type: ignore[arg-type]
    ("media-without-digest", {"token_ids": [1], "media": [Media(scheme="source", first=0, count=1, digest=None)]}),  # type: ignore[arg-type]
    ("media-negative-count", {"token_ids": [1], "media": [Media(scheme="source", first=0, count=-1, digest=D)]}),
]


@pytest.mark.parametrize(("name", "inputs"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_is_no_document_is_refused(name: str, inputs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="E110") as caught:
        Document.of(**inputs)
    assert caught.value.code == "E110"


def test_the_token_limit() -> None:
    assert Document.of(np.zeros(2**24, dtype="<i4")).num_tokens == 2**24
    with pytest.raises(InputError, match="E110"):
        Document.of(np.zeros(2**24 + 1, dtype="<i4"))
