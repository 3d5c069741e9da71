"""What is written is read, for schemas, documents and names of every kind; and stock safetensors agrees."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings

import kvformat
from kvformat.spec.schema import Component
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.strategies import cases
from kvformat.testing.vectors import VALID, Case
from tests.spec.reference import described
from tests.testing.touch import touch_all


def stored(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(case: Case, dataset: kvformat.Dataset) -> None:
    """Every tensor, whole, by the slab, by role and layer, and copied, has the bytes that were written."""
    assert len(dataset) == len(case.entries)
    for number, (record, entry) in enumerate(zip(dataset, case.entries, strict=True)):
        assert record.names == list(entry.names)
        assert record.document == entry.document.digest
        assert record.num_tokens == entry.document.num_tokens
        tensors = case.tensors(number)
        for component in case.schema.components:
            _, shape, data = tensors[component.name]
            whole = record.component(component.name)
            assert (tuple(whole.shape), stored(whole)) == (shape, data)
            assert stored(record.component(component.name, copy=True)) == data
            check_slabs(record, component, data)
        for extra in case.schema.extras:
            _, shape, data = tensors[extra.name]
            found = record.extra(extra.name)
            assert (tuple(found.shape), stored(found)) == (shape, data)


def check_copies(case: Case, dataset: kvformat.Dataset) -> None:
    """Copies into a buffer, each twice: when something is left to verify, and when nothing is."""
    buffer = memoryview(bytearray(max(record.nbytes for record in dataset)))
    for number in [*range(len(dataset))] * 2:
        tensors = case.tensors(number)
        for component in reversed(case.schema.components):
            if component.role != "other":
                data = tensors[component.name][2]
                size = len(data) // len(component.layers)
                for row, layer in enumerate(component.layers):
                    assert dataset.read_slab_into(number, component.role, layer, buffer) == size
                    assert buffer[:size] == data[row * size : (row + 1) * size]
        buffer[:] = bytes(len(buffer))
        nbytes = dataset.read_into(number, buffer)
        assert not any(buffer[nbytes:])
        found = dataset.tensors_in(buffer, number)
        assert list(found) == [component.name for component in case.schema.components]
        for name, tensor in found.items():
            _, shape, data = tensors[name]
            assert (tuple(tensor.shape), stored(tensor)) == (shape, data)


def check_slabs(record: kvformat.Record, component: Component, data: bytes) -> None:
    if component.role == "other":
        return
    size = len(data) // len(component.layers)
    for row, layer in enumerate(component.layers):
        assert stored(record.slab(component.role, layer=layer)) == data[row * size : (row + 1) * size]


def slabs_first(dataset: kvformat.Dataset) -> None:
    """The other way round: slabs are touched before the components they lie in."""
    for record in dataset:
        for component in reversed(dataset.schema.components):
            if component.role != "other":
                for layer in reversed(component.layers):
                    record.slab(component.role, layer=layer)
            record.component(component.name)


@given(case=cases())
@settings(max_examples=60)
def test_round_trip_of_any_dataset(case: Case) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "dataset"
        case.write(path)
        for io in ("mmap", "pread"):
            for verify in ("first", "always", "off"):
                check(case, kvformat.open(path, io=io, verify=verify))
                check_copies(case, kvformat.open(path, io=io, verify=verify))
            slabs_first(kvformat.open(path, io=io))
        dataset = kvformat.open(path)
        assert touch_all(dataset) == 0
        assert kvformat.verify(path).findings == ()
        assert described(path) == case.expected(dataset.id)
        check_shared(dataset)
        check_stock_safetensors(case, path)
        again = Path(scratch) / "again"
        case.write(again)
        assert kvformat.open(again).id == dataset.id


def check_shared(dataset: kvformat.Dataset) -> None:
    """A layer that shares another's K/V gives the very same slab."""
    for shared in dataset.schema.shared:
        roles = {c.role for c in dataset.schema.components if shared.source in c.layers} - {"hidden", "state", "other"}
        assert roles
        for record in dataset:
            for role in roles:
                ours, theirs = (record.slab(role, layer=layer) for layer in (shared.layer, shared.source))
                assert stored(ours) == stored(theirs)


def check_stock_safetensors(case: Case, path: Path) -> None:
    """Shards and index parts are what the safetensors package reads, with equal tensors."""
    files = DatasetFiles.load(path)
    number = 0
    for shard, name in enumerate(files.shard_paths()):
        with safetensors.safe_open(path / name, framework="pt") as opened:
            assert opened.metadata()["ordinal"] == str(shard)
            keys = set(opened.keys())
            for slot, _ in enumerate(files.records_of(shard)):
                for tensor, (_, shape, data) in case.tensors(number).items():
                    found = opened.get_tensor(f"{slot:04d}/{tensor}")
                    assert (tuple(found.shape), stored(found)) == (shape, data)
                    keys.discard(f"{slot:04d}/{tensor}")
                keys -= {f"{slot:04d}/sums", f"{slot:04d}/pad"}
                number += 1
            assert keys == set()
    for table, parts in files.parts.items():
        for part, name in zip(parts, files.part_paths(table), strict=True):
            with safetensors.safe_open(path / name, framework="np") as opened:
                assert opened.metadata()["table"] == table
                for column, values in part.columns.items():
                    np.testing.assert_array_equal(opened.get_tensor(column), values)


@pytest.mark.parametrize("name", sorted(VALID))
def test_stock_safetensors_opens_every_base(name: str, tmp_path: Path) -> None:
    case = VALID[name]
    case.build().save(tmp_path / "dataset")
    check_stock_safetensors(case, tmp_path / "dataset")
