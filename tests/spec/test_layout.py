"""Layout maths against a model that knows only the words of the specification, and against the reference reader."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvformat.errors import KVFormatError
from kvformat.spec import canonical, limits
from kvformat.spec.digests import schema_digest
from kvformat.spec.layout import Layout, align, header_size
from kvformat.spec.schema import ITEM_SIZES, Component, Extra, Last, Schema
from kvformat.testing.strategies import schemas
from tests.spec.reference import reference_reader

TOKENS = st.integers(1, 40) | st.sampled_from((1, 2**24 - 1, 2**24))
OTHERS = st.integers(0, 5) | st.sampled_from((0, 2**31, 2**32 - 1))


def plain(schema: Schema) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(canonical.encode(schema))
    return found


def drawn_dims(schema: Schema, data: st.DataObject) -> tuple[int, ...]:
    return (data.draw(TOKENS), *(data.draw(OTHERS) for _ in schema.dims[1:]))


def shape(tensor: Component | Extra, dims: dict[str, int]) -> tuple[int, ...]:
    sizes = []
    for axis in tensor.axes:
        if isinstance(axis.size, Last):
            sizes.append(min(dims["tokens"], axis.size.last))
        else:
            sizes.append(dims[axis.size] if isinstance(axis.size, str) else axis.size)
    return tuple(sizes)


@given(schema=schemas(), data=st.data())
@settings(max_examples=300)
def test_tensors_stand_where_the_rules_put_them(schema: Schema, data: st.DataObject) -> None:
    dims = drawn_dims(schema, data)
    by_name = dict(zip(schema.dims, dims, strict=True))
    slabs = sum(len(component.layers) for component in schema.components)
    wanted = [(c.name, ITEM_SIZES[c.dtype], (len(c.layers), *shape(c, by_name))) for c in schema.components]
    wanted.append(("sums", 8, (slabs + len(schema.extras),)))
    wanted += [(e.name, ITEM_SIZES[e.dtype], shape(e, by_name)) for e in schema.extras]
    total = sum(item * prod(sizes) for _, item, sizes in wanted)
    layout = Layout(schema)
    if align(total, 4096) >= 2**48:
        with pytest.raises(KVFormatError, match="E111"):
            layout.place(dims)
        return
    placement = layout.place(dims)

    assert {name: placed.shape for name, placed in placement.tensors.items()} == {n: s for n, _, s in wanted}
    assert (placement.end, placement.nbytes) == (total, align(total, 4096))
    stored = list(placement.tensors.values())
    at = 0
    for before, placed in zip([None, *stored], stored, strict=False):
        assert placed.offset == at, "no gap and no overlap"
        assert placed.offset % placed.item == 0, "naturally aligned"
        assert before is None or before.item >= placed.item, "descending item size"
        assert placed.nbytes == placed.item * prod(placed.shape)
        at += placed.nbytes
    order = [name for name, _, _ in wanted]
    for item in (8, 4, 2, 1):
        within = [placed.name for placed in stored if placed.item == item]
        assert within == sorted(within, key=order.index), "schema order within one item size"
    assert layout.num_sums == slabs + len(schema.extras)
    at = 0
    for component in schema.components:
        assert layout.first_sum[component.name] == at
        at += len(component.layers)
    assert [layout.first_sum[extra.name] for extra in schema.extras] == list(range(at, layout.num_sums))


@given(schema=schemas(), data=st.data(), version=st.sampled_from(("1.0", "1.9999")))
@settings(max_examples=200)
def test_headers_are_those_of_the_reference_reader_and_header_size_bounds_them(
    schema: Schema, data: st.DataObject, version: str
) -> None:
    reference = reference_reader()
    slots = data.draw(st.integers(1, 5))
    ordinal = data.draw(st.sampled_from((0, 7, 10**7, 10**8 - 1)))
    layout = Layout(schema)
    size = layout.header_size(version, slots)
    assert size == header_size(schema, version, slots) == reference.derived_header_size(plain(schema), slots, version)
    assert size % 4096 == 0

    placements, records, at = [], [], 0
    for _ in range(data.draw(st.integers(1, slots))):
        dims = drawn_dims(schema, data)
        try:
            placement = layout.place(dims)
        except KVFormatError:
            continue
        if at + placement.nbytes > limits.MAX_FILE_NBYTES:
            break
        placements.append(placement)
        records.append((at, reference.layout(plain(schema), dict(zip(schema.dims, dims, strict=True)))))
        at += placement.nbytes
    header = layout.header(version, ordinal, placements)
    assert len(header) + 8 <= size
    assert header.decode() == reference.shard_header(version, ordinal, schema_digest(schema).hex(), records)
    if placements:
        names = json.loads(header)
        assert len(names) == 1 + sum(len(p.tensors) + (p.nbytes > p.end) for p in placements)


@pytest.mark.parametrize(
    ("number", "to", "wanted"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (2**53 + 1, 4096, 2**53 + 4096)]
)
def test_align(number: int, to: int, wanted: int) -> None:
    assert align(number, to) == wanted


def test_header_size_holds_the_widest_header_the_limits_allow() -> None:
    schema = Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=1)
    layout = Layout(schema)
    for slots in (1, 2, 50):
        size = layout.header_size("1.0", slots)
        placement = layout.place((2**24,))
        used = len(layout.header("1.0", 10**8 - 1, [placement] * slots)) + 8
        assert used <= size


@pytest.mark.parametrize("dims", [(0,), (2**24 + 1,), (-1,)])
def test_dims_beyond_the_limits_are_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(KVFormatError, match="E111"):
        Layout(Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=1)).place(dims)
