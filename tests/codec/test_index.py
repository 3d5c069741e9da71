"""Index parts: encoded and read back, strict about every byte, and safetensors files all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvformat.codec.index import Columns, encode
from kvformat.errors import KVFormatError
from kvformat.spec.tables import TABLES, form

VERSION = "1.0"


def drawn(table: str, count: int, dims: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of a table with any content."""
    random = np.random.default_rng(seed)
    nbytes = int(random.integers(0, 200)) if table == "names" else 0
    types = {"U8": np.uint8, "U32": np.uint32, "U64": np.uint64}
    return {
        column.name: random.integers(0, 2**8, size=column.shape).astype(types[column.dtype])
        for column in form(table, count, dims, nbytes, VERSION).columns
    }


def columns_of(data: bytes, table: str, count: int, dims: int, nbytes: int) -> Columns:
    return Columns(memoryview(data), table, count=count, num_dims=dims, nbytes=nbytes, version=VERSION, path="p")


@pytest.mark.parametrize("table", TABLES)
@given(count=st.integers(1, 70), dims=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_round_trip(table: str, count: int, dims: int, seed: int) -> None:
    given_columns = drawn(table, count, dims, seed)
    data = encode(table, given_columns, version=VERSION)
    nbytes = len(given_columns.get("bytes", ()))
    found = columns_of(data, table, count, dims, nbytes)
    assert found.count == count
    assert list(found.arrays) == list(given_columns)
    for name, array in given_columns.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.flat[name].tolist() == array.reshape(-1).tolist()
    assert found.padding_is_zero(memoryview(data))

    stock = safetensors.numpy.load(data)
    for name, array in given_columns.items():
        np.testing.assert_array_equal(stock[name], array)
    assert {name.removesuffix(".pad") for name in stock} == set(given_columns)

    layout = form(table, count, dims, nbytes, VERSION)
    assert len(layout.header) % 64 == 0
    assert layout.nbytes == len(data)
    assert all(column.first % 64 == 0 for column in layout.columns)
    assert all((column.first + column.nbytes + column.pad) % 64 == 0 for column in layout.columns)


@pytest.mark.parametrize("table", TABLES)
def test_every_byte_of_the_header_counts(table: str) -> None:
    data = encode(table, drawn(table, 3, 2, 1), version=VERSION)
    nbytes = len(drawn(table, 3, 2, 1).get("bytes", ()))
    header = len(form(table, 3, 2, nbytes, VERSION).header)
    for at in range(header):
        changed = bytearray(data)
        changed[at] ^= 0x01
        with pytest.raises(KVFormatError, match="E051"):
            columns_of(bytes(changed), table, 3, 2, nbytes)


@pytest.mark.parametrize("difference", [-64, -1, 1, 64])
def test_another_length_is_refused(difference: int) -> None:
    data = encode("rows", drawn("rows", 3, 1, 1), version=VERSION)
    with pytest.raises(KVFormatError, match="E005"):
        columns_of((data + bytes(64))[: len(data) + difference], "rows", 3, 1, 0)


def test_another_version_or_table_is_refused() -> None:
    data = encode("name_keys", drawn("name_keys", 3, 1, 1), version="1.1")
    with pytest.raises(KVFormatError, match="E051"):
        columns_of(data, "name_keys", 3, 1, 0)


def test_padding_is_seen() -> None:
    data = bytearray(encode("shards", drawn("shards", 3, 1, 1), version=VERSION))
    found = columns_of(bytes(data), "shards", 3, 1, 0)
    for column in found.form.columns:
        for at in range(column.first + column.nbytes, column.first + column.nbytes + column.pad):
            data[at] = 0x80
            assert not found.padding_is_zero(memoryview(data))
            data[at] = 0
    assert found.padding_is_zero(memoryview(data))


def test_columns_that_do_not_fit_together_are_not_encoded() -> None:
    columns = drawn("shards", 3, 1, 1)
    columns["size"] = columns["size"][:2]
    with pytest.raises(KVFormatError, match="E111"):
        encode("shards", columns, version=VERSION)
