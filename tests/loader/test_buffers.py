"""Memory of batches: never given out twice, and used again once it is free (fault 43)."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvformat.errors import KVFormatError
from kvformat.loader import buffers
from kvformat.loader.buffers import BufferPool
from kvformat.storage import arena
from tests.loader.memory import anonymous_nbytes

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def tensor_of(pool: BufferPool, nbytes: int, fill: int) -> torch.Tensor:
    lease = pool.lease(nbytes)
    lease.array[:] = fill
    return lease.tensor(0, nbytes, torch.uint8, (nbytes,))


def some_view(tensor: torch.Tensor, how: int) -> object:
    """Something that refers to a tensor's memory, by whatever way."""
    ways = [
        lambda t: t,
        lambda t: t[3:7],
        lambda t: t.view(torch.int16),
        lambda t: t.numpy(),
        lambda t: t.numpy()[5:].reshape(-1, 1),
        lambda t: memoryview(t.numpy()),
        lambda t: t.untyped_storage(),
        lambda t: t.detach().as_strided((2, 2), (1, 2)),
        lambda t: torch.from_numpy(t.numpy()),
        np.from_dlpack,
        lambda t: torch.nn.Parameter(t, requires_grad=False),
    ]
    return ways[how % len(ways)](tensor)


def bytes_of(view: object) -> set[int]:
    if isinstance(view, torch.UntypedStorage):
        return set(torch.empty(0, dtype=torch.uint8).set_(view).tolist()[:64])
    if isinstance(view, torch.Tensor):
        return set(view.clone().contiguous().view(torch.uint8).reshape(-1).tolist())
    return set(np.asarray(view).view(np.uint8).reshape(-1).tolist())


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_is_referred_to_is_overwritten(seed):
    """Any subset of tensors, views and arrays is kept for a while; each stays what it was."""
    choose = random.Random(seed)
    pool = BufferPool(4 * MIB, space_nbytes=8 * MIB)
    kept: list[tuple[int, object]] = []
    total = 0
    for turn in range(400):
        fill = turn % 251 + 1
        lease = pool.lease(size := choose.choice((4096, 12_288, 70_000, 300_000)))
        lease.array[:] = fill
        total += size
        middle = size // 8192 * 4096
        halves = [
            lease.tensor(start, nbytes, torch.uint8, (nbytes,))
            for start, nbytes in ((0, middle), (middle, size - middle))
            if nbytes
        ]
        chosen = choose.sample(halves, choose.randint(0, len(halves)))
        kept += [(fill, some_view(half, choose.randrange(11))) for half in chosen]
        del lease, halves, chosen
        kept = [entry for entry in kept if choose.random() > 0.2]
        assert all(bytes_of(view) == {filled} for filled, view in kept)
    assert 4 * pool.fresh_nbytes < total


def test_memory_is_used_again():
    pool = BufferPool(64 * MIB)
    first = tensor_of(pool, 10 * MIB, 1)
    address = first.data_ptr()
    second = tensor_of(pool, 10 * MIB, 2)
    assert second.data_ptr() != address
    assert pool.fresh_nbytes == 20 * MIB
    view = first.numpy()[7:]
    del first
    third = tensor_of(pool, 10 * MIB, 3)
    assert third.data_ptr() not in {address, second.data_ptr()}
    assert pool.fresh_nbytes == 30 * MIB
    assert set(view[:100].tolist()) == {1}
    del view
    for fill in range(20):
        fourth = tensor_of(pool, 10 * MIB, fill)
        assert fourth.data_ptr() == address
        del fourth
    assert pool.fresh_nbytes == 30 * MIB


def test_memory_of_unlike_sizes_is_used_again():
    choose = random.Random(1)
    pool = BufferPool(64 * MIB)
    for turn in range(300):
        current = tensor_of(pool, choose.randint(1, 8 * MIB), turn % 256)
        if turn == 60:
            settled = pool.fresh_nbytes
    assert pool.fresh_nbytes - settled < MIB
    assert pool.fresh_nbytes <= 24 * MIB, "two at a time, and what lies between them"
    del current
    assert pool.kept_nbytes == pool.fresh_nbytes


def test_an_empty_lease():
    pool = BufferPool(MIB)
    lease = pool.lease(0)
    assert lease.array.nbytes == 0
    assert lease.tensor(0, 0, torch.bfloat16, (3, 0, 2)).shape == (3, 0, 2)
    del lease
    assert pool.kept_nbytes == PAGE


def test_more_than_there_is_address_space_for():
    """What does not fit is taken from the system, and goes back there."""
    pool = BufferPool(MIB, space_nbytes=4 * MIB)
    held = [tensor_of(pool, MIB, fill) for fill in range(8)]
    assert pool.fresh_nbytes == 8 * MIB
    assert [set(tensor[:: MIB // 8].tolist()) for tensor in held] == [{fill} for fill in range(8)]
    large = tensor_of(pool, 32 * MIB, 9)
    assert pool.fresh_nbytes == 40 * MIB
    before = anonymous_nbytes()
    del large
    assert before - anonymous_nbytes() > 30 * MIB
    del held
    pool.trim()
    assert pool.kept_nbytes == MIB


def test_nothing_is_kept_where_nothing_may_be():
    pool = BufferPool(0)
    before = anonymous_nbytes()
    for fill in range(4):
        assert tensor_of(pool, 8 * MIB, fill)[-1] == fill
    assert pool.fresh_nbytes == 32 * MIB
    assert pool.kept_nbytes == 0
    assert anonymous_nbytes() - before < 4 * MIB
    with pytest.raises(KVFormatError, match="E081"):
        BufferPool(-1)


def test_without_address_space(monkeypatch):
    """A limit on it is no reason to fail: then the smaller space, then none."""
    real, refused = arena.fresh_mapping, []

    def limited(nbytes: int) -> mmap.mmap:
        if nbytes > limit:
            refused.append(nbytes)
            raise OSError(12, "Cannot allocate memory")
        return real(nbytes)

    for module in (arena, buffers):
        monkeypatch.setattr(module, "fresh_mapping", limited)
    limit = 8 * MIB
    pool = BufferPool(MIB)
    first = tensor_of(pool, MIB, 1)
    del first
    assert tensor_of(pool, MIB, 2)[0] == 2
    assert (refused, pool.fresh_nbytes) == ([1 << 36], MIB)
    limit = 2 * MIB
    refused.clear()
    pool = BufferPool(MIB)
    for fill in (1, 2):
        assert tensor_of(pool, MIB, fill)[0] == fill
    assert (refused, pool.fresh_nbytes, pool.kept_nbytes) == ([1 << 36, 4 * MIB], 2 * MIB, 0)


def test_what_is_beyond_the_limit_goes_back_to_the_system():
    pool = BufferPool(8 * MIB)
    before = anonymous_nbytes()
    held = [tensor_of(pool, 4 * MIB, fill) for fill in range(16)]
    assert anonymous_nbytes() - before > 60 * MIB
    del held
    # Not at once: who has taken so much lately will do so again, and fresh memory is slow.
    for _ in range(2):
        held = [tensor_of(pool, 4 * MIB, fill) for fill in range(16)]
        del held
    assert pool.fresh_nbytes == 64 * MIB
    assert pool.kept_nbytes == 64 * MIB
    for fill in range(40):
        assert tensor_of(pool, MIB, fill)[9] == fill
    assert pool.kept_nbytes == 8 * MIB
    assert anonymous_nbytes() - before < 12 * MIB
    held = [tensor_of(pool, 4 * MIB, fill) for fill in range(16)]
    assert pool.fresh_nbytes == (64 + 56) * MIB
    del held
    pool.trim()
    assert pool.kept_nbytes == 8 * MIB
    assert anonymous_nbytes() - before < 12 * MIB


def test_trimming_leaves_what_is_in_use():
    pool = BufferPool(MIB)
    low, high, top = (tensor_of(pool, 4 * MIB, fill) for fill in (1, 2, 3))
    del low, top
    pool.trim()
    assert set(high[:: MIB // 4].tolist()) == {2}
    assert pool.kept_nbytes == 0, "what lies below something in use goes too"
    del high
    pool.trim()
    assert pool.kept_nbytes == MIB
    last = tensor_of(pool, MIB, 4)
    pool.trim()
    del last
    assert pool.kept_nbytes == MIB, "returned when nothing was taken lately"


def test_threads():
    """Eight threads take, write, read and drop."""
    pool = BufferPool(4 * MIB, space_nbytes=16 * MIB)
    together = threading.Barrier(8)

    def work(thread: int) -> int:
        choose, kept = random.Random(thread), []
        together.wait(timeout=60)
        for _ in range(200):
            tensor = tensor_of(pool, choose.randint(1, 400_000), thread)
            kept.append(some_view(tensor[: min(len(tensor), 64)], choose.choice((0, 1, 3))))
            del tensor
            if len(kept) > 5:
                del kept[choose.randrange(5)]
            if not all(bytes_of(view) <= {thread} for view in kept):
                return -1
        return thread

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == list(range(8))
    gc.collect()
    pool.trim()
    assert pool.kept_nbytes == 4 * MIB


def _in_child(pool: BufferPool, inherited: torch.Tensor, connection) -> None:
    fresh = pool.fresh_nbytes
    own = tensor_of(pool, MIB, 7)
    same = own.data_ptr() == inherited.data_ptr()
    connection.send((same, set(inherited[::4096].tolist()), set(own[::4096].tolist()), pool.fresh_nbytes - fresh))
    del inherited
    connection.send(pool.kept_nbytes)
    connection.close()


@pytest.mark.parametrize("locked", [False, True])
def test_after_a_fork(locked):
    """The child has memory of its own, even where another thread held the lock when it was forked (fault 34)."""
    pool = BufferPool(8 * MIB)
    held = tensor_of(pool, MIB, 3)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    if locked:
        pool._state.lock.acquire()
    child = context.Process(target=_in_child, args=(pool, held, theirs))
    child.start()
    if locked:
        pool._state.lock.release()
    theirs.close()
    try:
        assert ours.poll(60), "the child hangs"
        assert ours.recv() == (False, {3}, {7}, MIB)
        assert ours.poll(60)
        assert ours.recv() == 0
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    assert set(held[::4096].tolist()) == {3}


@given(st.lists(st.sampled_from(["F32", "BF16", "U64", "F8_E4M3"]), min_size=1, max_size=4), st.booleans())
def test_tensors_of_one_lease(dtypes, pinned):
    from kvformat.tensors import torch_dtype

    lease = BufferPool(MIB).lease(len(dtypes) * 4096)
    if pinned:  # as where memory is page-locked: the owner is a tensor
        whole = torch.zeros(len(dtypes) * 4096, dtype=torch.uint8)
        lease = buffers.Lease(whole.numpy(), whole)
    lease.array[:] = np.arange(len(lease.array), dtype=np.uint8) // 16
    for number, name in enumerate(dtypes):
        dtype = torch_dtype(name)
        found = lease.tensor(4096 * number, 64, dtype, (2, 32 // dtype.itemsize))
        assert (found.dtype, found.shape) == (dtype, (2, 32 // dtype.itemsize))
        assert found.view(torch.uint8).reshape(-1).tolist() == lease.array[4096 * number :][:64].tolist()
        assert lease.tensor(4096 * number, 0, dtype, (0, 5)).shape == (0, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for it")
def test_no_pinned_memory():
    with pytest.raises(KVFormatError, match="without a CUDA device leave pin_memory out") as caught:
        BufferPool(MIB, pin_memory=True).lease(10)
    assert caught.value.code == "E081"


def test_pinned_memory(fake_pinned):
    """Asked of torch, which keeps account of it."""
    pool = BufferPool(MIB, pin_memory=True)
    tensor = tensor_of(pool, 5000, 4)
    empty = pool.lease(0)
    assert (fake_pinned, set(tensor.tolist()), empty.array.nbytes) == ([5000, 1], {4}, 0)
    assert (pool.fresh_nbytes, pool.kept_nbytes) == (0, 0)
