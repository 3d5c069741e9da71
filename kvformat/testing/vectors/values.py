"""Tensors of test datasets: their shapes, and bytes that follow from a formula."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvformat.spec.schema import Axis, Component, Last, Quant, Role, Stage

__all__ = ["Stored", "axes", "component", "fill", "shape_of"]

Stored = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and bytes of a tensor."""


def fill(dtype: str, shape: tuple[int, ...], seed: int, *, positive: bool = False) -> bytes:
    """Bytes of a tensor whose values look random, are finite, and follow from the seed by integer arithmetic."""
    count = math.prod(shape)
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed * 0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    mixed ^= mixed >> np.uint64(16)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        finite = np.uint64(0x7F if dtype == "F8_E4M3" else 0x7C)
        return (mixed % finite | (mixed >> np.uint64(24)) & np.uint64(0x80)).astype("u1").tobytes()
    if dtype in ("I8", "U8"):
        return mixed.astype("u1").tobytes()
    if dtype == "I32":
        return (mixed >> np.uint64(1)).astype("<i4").tobytes()
    if dtype == "U64":
        return (mixed * np.uint64(0x9E3779B97F4A7C15)).astype("<u8").tobytes()
    steps = (mixed % np.uint64(255)).astype(np.float32)
    values = (steps + 1) / np.float32(64) if positive else (steps - 127) / np.float32(64)
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    return (values.view("<u4") >> np.uint32(16)).astype("<u2").tobytes()  # exact: 8 significant bits


def axes(*sizes: tuple[str, int | str | Last]) -> tuple[Axis, ...]:
    """Axes from pairs of name and size."""
    return tuple(Axis(name=name, size=size) for name, size in sizes)


def component(
    name: str,
    role: Role,
    layers: tuple[int, ...],
    *sizes: tuple[str, int | str | Last],
    dtype: str = "BF16",
    stage: Stage | None = None,
    scale: str | None = None,
) -> Component:
    """A component with codec ``raw``."""
    quant = None if scale is None else Quant(scale=scale)
    return Component(
        name=name, role=role, layers=layers, axes=axes(*sizes), dtype=dtype, codec="raw", stage=stage, quant=quant
    )


def shape_of(given: tuple[Axis, ...], dims: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes of axes in a record of these dims."""
    return tuple(
        min(dims["tokens"], axis.size.last)
        if isinstance(axis.size, Last)
        else dims[axis.size]
        if isinstance(axis.size, str)
        else axis.size
        for axis in given
    )
