"""Anonymous memory that begins with a page, as pinned buffers do."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

__all__ = ["page_aligned"]


def page_aligned(nbytes: int) -> np.ndarray:
    """Zeroed uint8 ``[nbytes]`` on huge pages where there are any, beginning with a page.

    numpy's own arrays begin 16 bytes into one. A copy from a mapped file, which begins with a page, then writes each
    line just before it reads an address with the same low 12 bits, which the processor takes for the same one: copies
    that fit its caches ran at half speed, for the contenders that hit this offset and not for the others.
    """
    memory = mmap.mmap(-1, max(nbytes, 1))
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=nbytes)
