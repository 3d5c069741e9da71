"""Memory that is used again: by nobody else while anything refers to it."""

from __future__ import annotations

import gc
import multiprocessing

import numpy as np
import pytest
import torch

from kvformat.storage.regions import Regions
from kvformat.tensors import from_buffer

NBYTES = 3 << 20


def address(region) -> int:
    return region.__array_interface__["data"][0]


def holders():
    return {
        "slice": lambda region: region[5:],
        "memoryview": memoryview,
        "slice of a memoryview": lambda region: memoryview(region)[7:90],
        "array over a memoryview": lambda region: np.frombuffer(memoryview(region)[4096:], np.uint8),
        "tensor": lambda region: from_buffer(region, "BF16").as_strided((4, 3), (3, 1), 8),
        "tensor of a tensor": lambda region: from_buffer(memoryview(region)[64:], "U8")[3:].view(torch.uint8)[1:],
    }


@pytest.mark.parametrize("kind", holders())
def test_what_refers_to_it_keeps_it(kind) -> None:
    regions = Regions(1 << 30)
    region = regions.take(NBYTES)
    region[:] = 7
    first = address(region)
    held = holders()[kind](region)
    del region
    gc.collect()
    other = regions.take(NBYTES)
    other[:] = 9
    assert address(other) != first
    values = held.view(torch.uint8) if isinstance(held, torch.Tensor) else np.asarray(held)
    assert (values == 7).all()
    del held, values
    gc.collect()
    assert address(regions.take(NBYTES)) == first


def test_sizes_near_each_other_share_and_little_is_kept_beyond_the_bound() -> None:
    regions = Regions(8 << 20)
    kept = {address(regions.take(NBYTES - step)) for step in range(0, 200_000, 20_000)}
    assert len(kept) <= 2
    many = [regions.take(1 << 20) for _ in range(40)]
    del many
    gc.collect()
    regions.take(1)
    assert regions._kept <= 8 << 20
    assert sum(len(whole) for group in regions._free.values() for whole in group) == regions._kept


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, (1 << 20) + 1, (5 << 20) - 3])
def test_a_region_has_the_size_asked_for_and_is_at_most_an_eighth_larger(nbytes) -> None:
    regions = Regions(1 << 30)
    region = regions.take(nbytes)
    assert region.nbytes == nbytes
    del region
    gc.collect()
    regions.take(1 << 30 >> 8)
    (whole,) = [whole for group in regions._free.values() for whole in group if len(whole) < 1 << 23][:1] or [None]
    assert whole is not None
    assert len(whole) <= max(4096, nbytes + nbytes // 8 + 4096)


def _child(regions, held, out) -> None:
    region = regions.take(NBYTES)
    region[:] = 1
    out.put((int(held[0]), regions._kept))


def test_a_forked_child_takes_memory_of_its_own() -> None:
    regions = Regions(1 << 30)
    held = regions.take(NBYTES)
    held[:] = 5
    with regions._lock:  # as if another thread of the parent had it
        context = multiprocessing.get_context("fork")
        out = context.Queue()
        child = context.Process(target=_child, args=(regions, held, out))
        child.start()
        assert out.get(timeout=60) == (5, 0)
        child.join(60)
    assert (held == 5).all()
