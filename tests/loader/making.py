"""Datasets of every kind, and what a batch of them must hold: worked out from what was written, by plain torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs

import kvformat
from kvformat.loader.layouts import HF, BatchLayout, Packed, Padded
from kvformat.read.dataset import Dataset
from kvformat.spec.schema import SHARED_ROLES, Component, Last, Schema
from kvformat.tensors import from_buffer, torch_dtype
from kvformat.testing.vectors import VALID, Case
from tests.write.make import all_bytes

__all__ = [
    "Expected",
    "assert_same",
    "expected",
    "expected_of_names",
    "flip",
    "lacking",
    "open_case",
    "refusals",
    "stored",
    "tensors_of",
]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def stored(name: str, number: int) -> dict[str, torch.Tensor]:
    """Tensors of a record of a valid dataset, as they were given to the writer."""
    return tensors_of(VALID[name], number)


def tensors_of(case: Case, number: int) -> dict[str, torch.Tensor]:
    """Tensors of a record of a case, as they were given to the writer."""
    return {
        name: from_buffer(bytearray(data), dtype).reshape(shape)
        for name, (dtype, shape, data) in case.tensors(number).items()
    }


def open_case(case: Case, path: Path, **options: Any) -> Dataset:
    """The dataset of a case, saved if it is not yet."""
    if not path.exists():
        case.build().save(path)
    return kvformat.open(path, **options)


class Expected(NamedTuple):
    """What a batch must hold."""

    components: dict[str, torch.Tensor]
    extras: dict[str, torch.Tensor]
    lengths: dict[str, list[int]]


def refusals(schema: Schema, layout: BatchLayout) -> set[str]:
    """Codes by which a layout is refused for a schema; none where it fits."""
    positions = next((extra for extra in schema.extras if extra.name == "position_ids"), None)
    wanted = [c for c in _chosen(schema, layout) if _rows(schema, c, layout)]
    extras = [e for e in schema.extras if e is not positions and e.name in {"token_ids", *layout.extras}]
    codes = set()
    if any(_ragged(axis.size) for tensor in (*wanted, *extras) for axis in tensor.axes[1:]):
        codes.add("E088")
    if positions is not None and positions.axes[0].size != layout.position_rows:
        codes.add("E089")
    if isinstance(layout, HF) and not _is_cache(schema, wanted, layout):
        codes.add("E088")
    return codes


def lacking(schema: Schema, layout: BatchLayout) -> list[int]:
    """Layers asked for that none of the components wanted has."""
    alone = {layer: structs.replace(layout, layers=(layer,)) for layer in layout.layers or ()}
    chosen = _chosen(schema, layout)
    return [layer for layer, only in alone.items() if not any(_rows(schema, c, only) for c in chosen)]


def expected(schema: Schema, records: Sequence[dict[str, torch.Tensor]], layout: BatchLayout) -> Expected:
    """What a batch of records must hold."""
    components, extras, lengths = {}, {}, {}
    for component in _chosen(schema, layout):
        rows = _rows(schema, component, layout)
        if not rows:
            continue
        chosen = [record[component.name][rows] for record in records]
        if layout.dtype is not None and component.quant is not None:
            factors = [record[component.quant.scale][rows] for record in records]
            chosen = [tensor.float() * factor for tensor, factor in zip(chosen, factors, strict=True)]
        if layout.dtype is not None and chosen[0].dtype in _FLOATS and component.name not in _scales(schema):
            chosen = [tensor.to(torch_dtype(str(layout.dtype))) for tensor in chosen]
        ragged = _ragged(component.axes[0].size)
        components[component.name] = _joined(chosen, layout, ragged=ragged)
        if isinstance(layout, HF):
            components[component.name] = components[component.name].transpose(2, 3)
        lengths[component.name] = [tensor.shape[1] if ragged else 1 for tensor in chosen]
    for extra in schema.extras:
        if extra.name not in {"token_ids", "position_ids", *layout.extras}:
            continue
        several = extra.name == "position_ids"
        chosen = [record[extra.name] if several else record[extra.name][None] for record in records]
        ragged = several or (bool(extra.axes) and _ragged(extra.axes[0].size))
        joined = _joined(chosen, layout, ragged=ragged)
        extras[extra.name] = joined if len(joined) > 1 else joined[0]
        lengths[extra.name] = [tensor.shape[1] if ragged else 1 for tensor in chosen]
    return Expected(components, extras, lengths)


def expected_of_names(name: str, numbers: Sequence[int], layout: BatchLayout) -> Expected:
    """What a batch of records of a valid dataset must hold."""
    return expected(VALID[name].schema, [stored(name, number) for number in numbers], layout)


def assert_same(batch: Any, wanted: Expected) -> None:
    """A batch holds just that, bit by bit."""
    assert list(batch.components) == list(wanted.components)
    assert set(batch.extras) == set(wanted.extras)
    for name, tensor in (wanted.components | wanted.extras).items():
        found = batch[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert all_bytes(found) == all_bytes(tensor), name
    assert {name: batch.lengths_of(name) for name in wanted.lengths} == wanted.lengths
    for name in wanted.lengths:
        ends = batch.cu_seqlens_of(name)
        assert ends.dtype == torch.int32
        assert ends.tolist() == [sum(wanted.lengths[name][:n]) for n in range(len(batch) + 1)]


def flip(dataset: Dataset, record: int, tensor: str, *, at: int = 0) -> None:
    """Flip a bit of a stored tensor in its file, in place; once more puts it back."""
    found = dataset[record]
    placed = found.placement.tensors[tensor]
    shard = dataset.index.shard(dataset.index.shard_of(record))
    with (Path(dataset.location) / shard.path).open("r+b") as file:
        file.seek(found.start + placed.offset + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def _joined(given: Sequence[torch.Tensor], layout: BatchLayout, *, ragged: bool) -> torch.Tensor:
    dtype = given[0].dtype
    # As integers, which every operation takes.
    tensors = [tensor.view(_INTEGERS[dtype.itemsize]) for tensor in given]
    if not ragged:
        return torch.stack(tensors, 1).view(dtype)
    if isinstance(layout, Packed):
        return torch.cat(tensors, 1).view(dtype)
    assert isinstance(layout, Padded | HF)
    longest = max(tensor.shape[1] for tensor in tensors)
    longest += -longest % layout.multiple_of
    rows, _, *inner = tensors[0].shape
    out = torch.zeros((rows, len(tensors), longest, *inner), dtype=tensors[0].dtype)
    for number, tensor in enumerate(tensors):
        first = 0 if layout.side == "right" else longest - tensor.shape[1]
        out[:, number, first : first + tensor.shape[1]] = tensor
    return out.view(dtype)


def _chosen(schema: Schema, layout: BatchLayout) -> list[Component]:
    known = {component.name: component for component in schema.components}
    if layout.components is not None:
        return [known[name] for name in layout.components]
    left_out = _scales(schema) if layout.dtype is not None else ()
    return [component for name, component in known.items() if name not in left_out]


def _scales(schema: Schema) -> set[str]:
    return {component.quant.scale for component in schema.components if component.quant is not None}


def _rows(schema: Schema, component: Component, layout: BatchLayout) -> list[int]:
    if layout.layers is None:
        return list(range(len(component.layers)))
    source_of = {shared.layer: shared.source for shared in schema.shared}
    scaled = {c.quant.scale for c in schema.components if c.quant is not None and c.role in SHARED_ROLES}
    rows = []
    for layer in layout.layers:
        if component.role in SHARED_ROLES or component.name in scaled:
            layer = source_of.get(layer, layer)  # noqa: PLW2901 -- as the loader does, one step after the other
        if layer in component.layers and component.layers.index(layer) not in rows:
            rows.append(component.layers.index(layer))
    return rows


def _ragged(size: int | str | Last) -> bool:
    return not isinstance(size, int)


def _is_cache(schema: Schema, wanted: Sequence[Component], layout: BatchLayout) -> bool:
    by_role = {component.role: component for component in wanted}
    if len(wanted) != 2 or set(by_role) != {"key", "value"} or schema.shared:
        return False
    layers = [[c.layers[row] for row in _rows(schema, c, layout)] for c in by_role.values()]
    return (
        layers[0] == layers[1] == list(range(len(layers[0])))
        and all(len(c.axes) == 3 and c.axes[0].size == "tokens" for c in wanted)
        and by_role["key"].stage == "attention"
        and (layout.dtype is not None or all(c.quant is None for c in wanted))
    )
