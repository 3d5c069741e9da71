"""Checks of bit patterns over more than one block; single values are covered by the writer's tests."""

from __future__ import annotations

import numpy as np
import pytest

from kvformat.spec import values
from kvformat.spec.values import all_finite

BAD = {
    "BF16": ("<u2", (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)),
    "F16": ("<u2", (0x7C00, 0xFC00, 0x7E00, 0xFFFF)),
    "F32": ("<u4", (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF)),
    "F8_E4M3": ("u1", (0x7F, 0xFF)),
    "F8_E5M2": ("u1", (0x7C, 0xFC, 0x7E, 0xFF)),
}
BLOCK = values._BLOCK_NBYTES


@pytest.mark.parametrize("nbytes", [BLOCK - 4, BLOCK, BLOCK + 4, 3 * BLOCK - 4, 3 * BLOCK])
@pytest.mark.parametrize("dtype", BAD)
def test_a_bad_value_is_found_in_every_block(dtype, nbytes):
    kind, patterns = BAD[dtype]
    array = np.zeros(nbytes // np.dtype(kind).itemsize, kind)
    edges = [start // array.itemsize for start in range(0, nbytes, BLOCK)]
    places = {0, len(array) - 1, *edges, *(edge - 1 for edge in edges[1:])}
    assert all_finite(memoryview(array.tobytes()), dtype)
    for place in places:
        for pattern in patterns:
            array[place] = pattern
            assert not all_finite(memoryview(array.tobytes()), dtype), (place, hex(pattern))
        array[place] = 0
    assert all_finite(array.view(np.uint8), dtype)
