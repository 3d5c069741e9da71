"""Memory that is used again: by nobody else while anything refers to it."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
from collections import deque

import numpy as np
import pytest
import torch

from kvformat.storage import arena
from kvformat.storage.regions import Regions
from kvformat.tensors import from_buffer
from tests.loader.memory import anonymous_nbytes

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


def test_sizes_of_any_kind_share_and_little_is_kept_beyond_the_bound() -> None:
    regions = Regions(8 << 20)
    kept = {address(regions.take(size)) for size in (NBYTES, 5 << 20, 70, NBYTES - 20_000, 1 << 20)}
    assert len(kept) == 1
    many = [regions.take(1 << 20) for _ in range(40)]
    for region in many:
        region[:] = 1
    before = anonymous_nbytes()
    del many, region
    gc.collect()
    assert before - anonymous_nbytes() >= 30 << 20
    assert regions.kept_nbytes <= 8 << 20


def test_records_of_changing_sizes_need_no_fresh_memory() -> None:
    regions = Regions(64 << 20)
    rng = np.random.default_rng(3)
    held, ends, most = deque(), [], 0
    for _ in range(400):
        held.append(regions.take(int(rng.integers(1, 4 << 20))))
        if len(held) > 8:
            held.popleft()
        ends.append(regions._state.arena.resident)
        most = max(most, regions._state.arena.in_use)
    assert ends[-1] <= 1.5 * most
    assert ends[-1] - ends[100] <= ends[-1] // 5, "of the last 300, all but a few were served from what there was"


def test_what_lies_above_keeps_nothing_below_it() -> None:
    regions = Regions(8 << 20)
    many = [regions.take(4 << 20) for _ in range(25)]
    for number, region in enumerate(many):
        region[:] = number
    last = many[-1][:10]
    before = anonymous_nbytes()
    del many, region
    gc.collect()
    assert before - anonymous_nbytes() >= 84 << 20
    assert (last == 24).all()
    assert regions.kept_nbytes <= 8 << 20


def test_the_last_view_alone_is_left_of_regions_that_are_gone() -> None:
    regions = Regions(1 << 30)
    before = anonymous_nbytes()
    many = [regions.take(4 << 20) for _ in range(25)]
    for number, region in enumerate(many):
        region[:] = number
    first = many[3][:10]
    del many, region, regions
    gc.collect()
    assert anonymous_nbytes() - before <= 12 << 20
    assert (first == 3).all()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, (1 << 20) + 1, (5 << 20) - 3])
def test_a_region_has_the_size_asked_for_and_takes_whole_pages(nbytes) -> None:
    regions = Regions(1 << 30)
    region = regions.take(nbytes)
    assert region.nbytes == nbytes
    other = regions.take(1)
    assert address(other) - address(region) == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_without_address_space_each_region_is_a_mapping(monkeypatch) -> None:
    monkeypatch.setattr(arena, "open_arena", lambda *_: None)
    regions = Regions(1 << 20)
    region = regions.take(NBYTES)
    region[:] = 3
    held = memoryview(region)[5:9]
    del region
    gc.collect()
    other = regions.take(NBYTES)
    other[:] = 4
    assert bytes(held) == b"\x03" * 4
    assert regions.kept_nbytes == 0


def _child(regions, held, out) -> None:
    region = regions.take(NBYTES)
    region[:] = 1
    out.put((int(held[0]), regions.kept_nbytes))


def test_a_forked_child_takes_memory_of_its_own() -> None:
    regions = Regions(1 << 30)
    held = regions.take(NBYTES)
    held[:] = 5
    with regions._state.lock:  # as if another thread of the parent had it
        context = multiprocessing.get_context("fork")
        out = context.Queue()
        child = context.Process(target=_child, args=(regions, held, out))
        child.start()
        assert out.get(timeout=60) == (5, 0)
        child.join(60)
    assert (held == 5).all()
