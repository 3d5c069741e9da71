"""Shard headers: what is written is accepted, and what differs is named."""

from __future__ import annotations

import struct

import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvformat.codec.shard import encode_header, header_fault, sum_record
from kvformat.spec import digests
from kvformat.spec.layout import Layout
from kvformat.spec.paths import shard_path
from kvformat.spec.schema import Schema
from kvformat.testing.strategies import schemas

UNIFORM = Layout(Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=2))
HEADER = {
    "version": "1.0",
    "ordinal": 12,
    "placements": [UNIFORM.place((3,)), UNIFORM.place((1,))],
    "header_size": 4096,
}


def fault(found: bytes, **changes: object) -> str | None:
    error = header_fault(found, layout=UNIFORM, path="p", **(HEADER | changes))  # type: ignore[arg-type]
    return None if error is None else error.code


def test_a_header_is_accepted_as_it_is_written() -> None:
    header = encode_header(UNIFORM, **HEADER)  # type: ignore[arg-type]
    assert len(header) == 4096
    assert struct.unpack("<Q", header[:8]) == (4088,)
    assert fault(header) is None
    assert fault(memoryview(header)) is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"header_size": 8192}, "E061"),
        ({"ordinal": 13}, "E062"),
        ({"ordinal": 1}, "E062"),
        ({"version": "1.1"}, "E063"),
        ({"placements": [UNIFORM.place((1,)), UNIFORM.place((3,))]}, "E063"),
        ({"placements": [UNIFORM.place((3,))]}, "E063"),
    ],
)
def test_a_header_of_something_else_is_named(change: dict[str, object], code: str) -> None:
    assert fault(encode_header(UNIFORM, **HEADER), **change) == code  # type: ignore[arg-type]


def test_a_header_of_another_schema_is_named() -> None:
    other = Layout(Schema.uniform(num_layers=1, num_kv_heads=2, head_dim=1))
    assert fault(encode_header(other, **HEADER)) == "E062"  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [b"", b"\xf8\x0f", b"\0" * 4096, b"\xff" * 4096, b"\xf8\x0f" + b"\0" * 4094])
def test_what_is_no_header_is_refused(found: bytes) -> None:
    assert fault(found) in ("E061", "E063")


@given(data=st.data(), at=st.integers(0, 4095), bit=st.integers(0, 7))
@settings(max_examples=300)
def test_every_flipped_bit_of_a_header_is_a_fault(data: st.DataObject, at: int, bit: int) -> None:
    header = bytearray(encode_header(UNIFORM, **HEADER))  # type: ignore[arg-type]
    header[at] ^= 1 << bit
    assert fault(bytes(header)) in ("E061", "E062", "E063")


@given(schema=schemas(), tokens=st.lists(st.integers(1, 5), min_size=1, max_size=3))
@settings(max_examples=60)
def test_stock_safetensors_reads_header_and_zeros(schema: Schema, tokens: list[int]) -> None:
    """A shard of our header and zeros is a safetensors file with the tensors of the layout."""
    layout = Layout(schema)
    placements = [layout.place((count, *(2 for _ in schema.dims[1:]))) for count in tokens]
    size = layout.header_size("1.0", len(tokens))
    header = encode_header(layout, version="1.0", ordinal=0, placements=placements, header_size=size)
    loaded = safetensors.torch.load(header + bytes(sum(placement.nbytes for placement in placements)))
    expected = {
        f"{slot:04d}/{name}": placed.shape
        for slot, placement in enumerate(placements)
        for name, placed in placement.tensors.items()
    }
    found = {name: tuple(tensor.shape) for name, tensor in loaded.items() if not name.endswith("/pad")}
    assert found == expected


@pytest.mark.parametrize(
    ("ordinal", "path"),
    [
        (0, "shards/00000/00000000-0001020304050607.safetensors"),
        (999, "shards/00000/00000999-0001020304050607.safetensors"),
        (1000, "shards/00001/00001000-0001020304050607.safetensors"),
        (99_999_999, "shards/99999/99999999-0001020304050607.safetensors"),
    ],
)
def test_paths_of_shards(ordinal: int, path: str) -> None:
    assert shard_path(ordinal, bytes(range(32))) == path


@given(sums=st.lists(st.integers(0, 2**64 - 1), max_size=8))
def test_sums_are_stored_little_endian(sums: list[int]) -> None:
    stored, total = sum_record((5, 2), sums)
    assert [int.from_bytes(stored[at : at + 8], "little") for at in range(0, len(stored), 8)] == sums
    assert total == digests.record_sum((5, 2), stored)
