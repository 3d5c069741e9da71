"""Memory of this process that no file stands behind."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from kvformat.loader.buffers import BufferPool

__all__ = ["anonymous_nbytes", "in_use", "shared_names"]


def anonymous_nbytes() -> int:
    """Anonymous bytes resident now; pages of mapped files, which the system can drop, do not count."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("smaps_rollup has no such line")


def in_use(pool: BufferPool) -> int:
    """Bytes of a pool that something refers to."""
    arena = pool._state.arena
    assert arena is not None
    assert pool.kept_nbytes >= 0  # takes back what was returned
    return arena.in_use


def shared_names() -> list[str]:
    """Shared memory that torch named in this process or a child of it: torch_PID_..."""
    ours = {str(os.getpid()), *(str(child.pid) for child in multiprocessing.active_children())}
    names = (path.name for path in Path("/dev/shm").iterdir())
    return sorted(name for name in names if name.startswith("torch_") and name.split("_")[1] in ours)
