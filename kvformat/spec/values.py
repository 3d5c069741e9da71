"""Checks of stored values by their bit patterns, so that no dtype needs a library that knows it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_finite", "all_positive"]

# By dtype: signed and unsigned integer of the same width, and the least pattern of a positive and of a negative
# non-finite value. Signed order puts positives last, unsigned order negatives: two maxima decide.
_PATTERNS = {
    "BF16": ("<i2", "<u2", 0x7F80, 0xFF80),
    "F16": ("<i2", "<u2", 0x7C00, 0xFC00),
    "F32": ("<i4", "<u4", 0x7F800000, 0xFF800000),
    "F8_E4M3": ("i1", "u1", 0x7F, 0xFF),
    "F8_E5M2": ("i1", "u1", 0x7C, 0xFC),
}


def all_finite(data: memoryview | NDArray[np.uint8], dtype: str) -> bool:
    """Whether no stored value is NaN or infinite. Integer dtypes always are finite."""
    pattern = _PATTERNS.get(dtype)
    if pattern is None or len(data) == 0:
        return True
    signed, unsigned, positive, negative = pattern
    return bool(
        np.frombuffer(data, dtype=signed).max() < positive and np.frombuffer(data, dtype=unsigned).max() < negative
    )


def all_positive(data: memoryview | NDArray[np.uint8]) -> bool:
    """Whether every F32 value is finite and greater than zero."""
    values = np.frombuffer(data, dtype="<f4")
    return bool(np.isfinite(values).all() and (values > 0).all())
