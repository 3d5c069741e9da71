"""Values of 8 bits times their scales (SPEC.md, section 8, rule 9)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvformat.errors import make_error
from kvformat.tensors import dtype_name, from_buffer, torch_dtype

if TYPE_CHECKING:
    import torch

    from kvformat.read.record import Record
    from kvformat.spec.schema import Component, Schema

__all__ = ["FLOATS", "dequantise_into", "dequantised_component", "dequantised_slab"]

FLOATS = frozenset({"BF16", "F16", "F32"})
"""What values are dequantised to."""


def dequantise_into(out: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
    """float32(stored) x scale, rounded once, to the dtype of ``out``.

    Row by row of the first axis, so that the float32 values on the way are those of one.

    Parameters
    ----------
    out
        ``[rows, ...]``, of any strides.
    stored
        I8, F8_E4M3 or F8_E5M2, of the same shape.
    scale
        float32, each axis of the same size or 1, the first of the same size.
    """
    for row, values, factors in zip(out, stored, scale, strict=True):
        row.copy_(_single(values).mul_(factors))


def dequantised_component(record: Record, schema: Schema, name: str, dtype: object) -> torch.Tensor:
    """See :meth:`Record.dequantised`."""
    target = _float(dtype)
    stored = record.component(name)
    scale = _component(schema, name).quant
    out = stored.new_empty(stored.shape, dtype=target)
    if scale is None:
        return out.copy_(stored)
    dequantise_into(out, stored, record.component(scale.scale))
    return out


def dequantised_slab(
    record: Record, schema: Schema, role: str, *, layer: int, place: tuple[str, int], dtype: object
) -> torch.Tensor:
    """See :meth:`Record.dequantised_slab`; ``place`` is the component and the row."""
    target = _float(dtype)
    stored = record.slab(role, layer=layer)
    name, row = place
    quant = _component(schema, name).quant
    out = stored.new_empty(stored.shape, dtype=target)
    if quant is None:
        return out.copy_(stored)
    # By name: scales of some roles have none of their own to be asked for.
    placed = record.placement.tensors[quant.scale]
    data = bytearray(placed.slab_nbytes)
    record.copy_slab(memoryview(data), quant.scale, row)
    dequantise_into(out[None], stored[None], from_buffer(data, "F32").reshape(1, *placed.shape[1:]))
    return out


def _single(values: torch.Tensor) -> torch.Tensor:
    """float32 of 8-bit values, a tensor of its own."""
    if values.dtype == torch_dtype("I8") or not values.is_cpu:
        return values.to(torch_dtype("F32"))
    # A look-up for each value takes a fifth of the time of torch's own cast of floats of 8 bits.
    codes = values.view(torch_dtype("U8")).reshape(-1).to(torch_dtype("I32"))
    return _table(values.dtype).index_select(0, codes).view(values.shape)


@cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """All 256 numbers of a dtype, float32, by their code."""
    return from_buffer(bytearray(range(256)), dtype_name(dtype)).to(torch_dtype("F32"))


def _component(schema: Schema, name: str) -> Component:
    return next(component for component in schema.components if component.name == name)


def _float(dtype: object) -> torch.dtype:
    name = dtype_name(dtype)
    if name not in FLOATS:
        raise make_error("E081", f"dtype {name}: values are dequantised to one of {', '.join(sorted(FLOATS))}")
    return torch_dtype(name)
