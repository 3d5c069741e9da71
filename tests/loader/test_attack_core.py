"""The loader's core where programs are unkind: garbage collected at bad moments, memory refused, odd arguments."""

from __future__ import annotations

import gc
import io
import mmap
import sys
import threading

import numpy as np
import pytest
import torch

from kvformat.errors import KVFormatError, StorageError
from kvformat.loader import batch as batch_module
from kvformat.loader import packers, source
from kvformat.loader.batch import Batch
from kvformat.loader.buffers import BufferPool
from kvformat.loader.layouts import HF, Packed, Padded
from kvformat.loader.lookup import gather
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.source import source_of
from kvformat.storage.arena import Arena
from tests.loader.made import make_dataset

MIB = 1 << 20
RECORDS = 12


@pytest.fixture
def dataset(tmp_path):
    return make_dataset(tmp_path / "data", RECORDS, layers=3)


@pytest.fixture(autouse=True)
def _garbage_when_told():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def ignored(monkeypatch) -> list[object]:
    """What Python could only print."""
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: found.append(hook.exc_value))
    return found


def abandon(batches) -> None:
    """Leave an iteration to the garbage collection."""
    cycle = [batches]
    cycle.append(cycle)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvformat-load")]


def in_time(work, *, seconds: float = 30) -> None:
    """Run it in a thread that may hang."""
    done = threading.Event()
    threading.Thread(target=lambda: (work(), done.set()), daemon=True).start()
    assert done.wait(timeout=seconds), "it hangs"


# -------------------------------------------------------------------------------------------------- garbage collection


def test_an_iteration_collected_while_memory_is_given_out(dataset, monkeypatch, ignored):
    """Closing it trims the pool, whose lock the very thread may hold."""
    take = Arena.take
    batches = iter(KVLoader(dataset, [[n] for n in range(RECORDS)]))
    next(batches)
    started = threads()
    abandon(batches)
    del batches

    def collecting(arena, nbytes: int) -> int | None:
        if threading.current_thread() not in started:
            gc.collect()
        return take(arena, nbytes)

    monkeypatch.setattr(Arena, "take", collecting)
    monkeypatch.setattr(packers, "_PATIENCE_S", 0.2)
    in_time(lambda: gather(dataset, records=[1]))
    for thread in started:
        thread.join(timeout=60)
    assert not ignored
    assert not threads()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_iteration_collected_by_a_thread_of_its_own(dataset, monkeypatch, ignored, num_threads):
    pack, abandoned, collected = Batch.pack, threading.Event(), threading.Event()

    def collecting(batch: Batch, **options) -> Batch:
        if batch.records == [4]:
            assert abandoned.wait(timeout=60)
            gc.collect()
            collected.set()
        return pack(batch, **options)

    monkeypatch.setattr(Batch, "pack", collecting)
    batches = iter(KVLoader(dataset, [[n] for n in range(RECORDS)], num_threads=num_threads))
    next(batches)
    started = threads()
    abandon(batches)
    del batches
    abandoned.set()
    assert collected.wait(timeout=60)
    for thread in started:
        thread.join(timeout=60)
    assert not ignored
    assert not threads()


def test_an_iteration_collected_by_whoever_its_threads_wait_for(dataset, monkeypatch, ignored):
    """They wait for memory, and who gives it out would wait for them."""
    pack, take = Batch.pack, Arena.take
    held, waiting = threading.Event(), threading.Event()

    def late(batch: Batch, **options) -> Batch:
        if batch.records == [4]:
            waiting.set()
            assert held.wait(timeout=60)
        return pack(batch, **options)

    def holding(arena, nbytes: int) -> int | None:
        if threading.current_thread() not in started and not held.is_set():
            held.set()
            gc.collect()
        return take(arena, nbytes)

    monkeypatch.setattr(Batch, "pack", late)
    monkeypatch.setattr(packers, "_PATIENCE_S", 0.2)
    batches = iter(KVLoader(dataset, [[n] for n in range(RECORDS)], num_threads=1))
    next(batches)
    started = threads()
    abandon(batches)
    del batches
    assert waiting.wait(timeout=60)
    monkeypatch.setattr(Arena, "take", holding)
    in_time(lambda: gather(dataset, records=[1]))
    for thread in started:
        thread.join(timeout=60)
    assert not ignored
    assert not threads()


def test_a_pool_in_use_is_trimmed_by_its_next_lease():
    pool = BufferPool(MIB)
    held = [pool.lease(4 * MIB) for _ in range(4)]
    del held
    assert pool.kept_nbytes == 16 * MIB
    with pool._state.lock:
        in_time(pool.trim)
    lease = pool.lease(1)
    assert pool._state.arena.resident == MIB
    del lease
    assert pool.kept_nbytes == MIB
    held = [pool.lease(4 * MIB) for _ in range(4)]
    del held
    assert pool.kept_nbytes == 16 * MIB, "what was asked for once is done once"


# ------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("layout", [Packed(), Padded(), HF()])
def test_what_is_saved_of_a_tensor_is_its_own_bytes(dataset, layout):
    for _ in range(2):  # verified now, and before
        batch = gather(dataset, records=[1, 4, 0], layout=layout)
        for name in ("k", "v"):
            assert batch[name].untyped_storage().nbytes() == batch[name].nbytes
        own, cloned = io.BytesIO(), io.BytesIO()
        torch.save(batch["k"], own)
        torch.save(batch["k"].clone(), cloned)
        assert len(own.getvalue()) == len(cloned.getvalue())


@pytest.mark.parametrize("layout", [Packed(), Padded(), HF()])
def test_a_write_into_values_is_none_into_keys(dataset, layout):
    batch = gather(dataset, records=[1, 4, 0], layout=layout)
    keys = batch["k"].clone()
    query = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    scores = (batch["k"] * query).sum()
    batch["v"].mul_(2)
    batch.token_ids.zero_()
    scores.backward()
    assert torch.equal(query.grad, keys.reshape(-1, 2).sum(0))
    again = gather(dataset, records=[1, 4, 0], layout=layout)
    assert torch.equal(again["v"], -keys), "neither the dataset nor what comes later"
    assert again.token_ids.any()


def test_more_tokens_than_their_sums_can_count():
    assert batch_module._cumulated([1 << 24] * 127 + [(1 << 24) - 1])[-1] == (1 << 31) - 1
    with pytest.raises(KVFormatError, match=r"\[E088\] 2,147,483,648 tokens"):
        batch_module._cumulated([1 << 24] * 128)


# ------------------------------------------------------------------------------------------------- memory, arguments


def test_memory_is_refused(dataset, monkeypatch):
    """Said with the number of bytes, in a thread of a loader too."""
    real = mmap.mmap

    def refuse(fd: int, nbytes: int, *args, **options) -> mmap.mmap:
        if fd == -1:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, nbytes, *args, **options)

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(StorageError, match=r"\[E204\] Cannot allocate memory: 8,192 bytes for a batch"):
        gather(dataset, records=[1])
    with pytest.raises(StorageError, match="E204"):
        list(KVLoader(dataset, [[1]]))
    monkeypatch.undo()
    assert len(gather(dataset, records=[1])["k"]) == 3


@pytest.mark.parametrize("given", [{"prefetch_nbytes": 2e9}, {"num_threads": 2.0}, {"num_threads": "2"}])
def test_no_whole_numbers(dataset, given):
    """A float would be one where memory is trimmed at the end of an epoch, and no sooner."""
    with pytest.raises(KVFormatError, match=r"\[E081\] num_threads and prefetch_nbytes are integers"):
        KVLoader(dataset, [[1]], **given)
    assert len(list(KVLoader(dataset, [[1]], prefetch_nbytes=np.int64(9), num_threads=np.int8(1)))) == 1


def test_other_layers_for_each_batch(dataset, monkeypatch):
    """Plans are kept, but not without end."""
    monkeypatch.setattr(source, "_PLANS", 3)
    plans = source_of(dataset)._shared.plans
    for rank, layers in enumerate([(0,), (1,), (2,), (0, 1), (1, 0), (0, 2), (0,), (2,)]):
        batch = gather(dataset, records=[rank], layout=Packed(layers=layers))
        assert batch["k"].shape[0] == len(layers)
        assert len(plans) <= 3
