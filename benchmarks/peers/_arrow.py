"""One binary value in and out of Arrow without a copy; ``Scalar.as_buffer`` makes one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa

__all__ = ["all_values", "as_array", "single_value"]


def as_array(payload: np.ndarray) -> pa.Array:
    """``payload`` as an array of one large_binary value, over the same memory."""
    offsets = pa.py_buffer(np.array([0, payload.nbytes], dtype=np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(payload)])


def single_value(array: pa.Array) -> memoryview:
    """The bytes of the first value of a large_binary array, a view."""
    _, offsets, data = array.buffers()
    start, end = np.frombuffer(offsets, dtype=np.int64, count=2, offset=array.offset * 8).tolist()
    return memoryview(data).cast("B")[start:end]


def all_values(array: pa.Array) -> list[memoryview]:
    """The bytes of each value of a large_binary array, views."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(array) + 1, offset=array.offset * 8).tolist()
    view = memoryview(data).cast("B")
    return [view[start:end] for start, end in pairwise(ends)]
