"""Checks of stored values by their bit patterns, so that no dtype needs a library that knows it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_finite", "all_positive"]

# By dtype: signed and unsigned integer of the same width, and the least pattern of a positive and of a negative
# non-finite value. Signed order puts positives last, unsigned order negatives: two maxima decide.
_PATTERNS: dict[str, tuple[np.dtype[Any], np.dtype[Any], int, int]] = {
    "BF16": (np.dtype("<i2"), np.dtype("<u2"), 0x7F80, 0xFF80),
    "F16": (np.dtype("<i2"), np.dtype("<u2"), 0x7C00, 0xFC00),
    "F32": (np.dtype("<i4"), np.dtype("<u4"), 0x7F800000, 0xFF800000),
    "F8_E4M3": (np.dtype("i1"), np.dtype("u1"), 0x7F, 0xFF),
    "F8_E5M2": (np.dtype("i1"), np.dtype("u1"), 0x7C, 0xFC),
}
# Two passes over a block that the processor's cache holds are one pass over memory.
_BLOCK_NBYTES = 1 << 18

_largest = np.maximum.reduce  # the method `max` of an array takes a detour through Python


def all_finite(data: memoryview | NDArray[np.uint8], dtype: str) -> bool:
    """Whether no stored value is NaN or infinite. Integer dtypes always are finite."""
    pattern = _PATTERNS.get(dtype)
    if pattern is None:
        return True
    signed, unsigned, positive, negative = pattern
    for start in range(0, len(data), _BLOCK_NBYTES):
        block = np.frombuffer(data[start : start + _BLOCK_NBYTES], dtype=signed)
        if _largest(block) >= positive or _largest(block.view(unsigned)) >= negative:
            return False
    return True


def all_positive(data: memoryview | NDArray[np.uint8]) -> bool:
    """Whether every F32 value is finite and greater than zero."""
    values = np.frombuffer(data, dtype="<f4")
    return bool(np.isfinite(values).all() and (values > 0).all())
