"""Attacks on remote reading: wrong bytes, zeros of holes, what is held and never given back, errors that come late."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import KVFormatError
from kvformat.read import ahead as ahead_module
from kvformat.read.ahead import Ahead
from kvformat.read.blocks import Block
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.regions import Regions
from kvformat.storage.store import Buffer, DeniedFault, TransportFault
from kvformat.testing.memory_store import MemoryStore
from tests.read.remote import remote_over
from tests.read.test_remote import gets

PATIENCE_S = 60
LAYERS = 8


@pytest.fixture(autouse=True)
def _no_threads_left(monkeypatch):
    """Those that fetch ahead wait a while for more; other modules look at which there are."""
    monkeypatch.setattr(ahead_module, "_IDLE_S", 1.0)
    yield
    for thread in threading.enumerate():
        if thread.name == "kvformat-ahead":
            thread.join(PATIENCE_S)


def made(tmp_path: Path, tokens: list[int], **options) -> dict[str, bytes]:
    """Each layer of each record has a value of its own."""
    schema = kvformat.Schema.uniform(num_layers=LAYERS, num_kv_heads=2, head_dim=16)
    path = tmp_path / "made"
    with kvformat.create(path, schema=schema, context=kvformat.Context.unknown(), **options) as out:
        for number, count in enumerate(tokens):
            k = torch.stack([torch.full((count, 2, 16), value(number, layer)) for layer in range(LAYERS)])
            out.add(f"r{number}", {"k": k.bfloat16(), "v": -k.bfloat16()}, token_ids=[number + 1] * count)
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def value(number: int, layer: int) -> float:
    return float(number * LAYERS + layer + 1)


def right(number: int, tensor: torch.Tensor, sign: int) -> bool:
    expected = torch.tensor([sign * value(number, layer) for layer in range(LAYERS)]).bfloat16()
    return bool((tensor == expected.reshape(-1, 1, 1, 1)).all())


def cache_of(tmp_path: Path, nbytes: int, unit: str) -> CacheOptions:
    return CacheOptions(dir=str(tmp_path / "cache"), max_nbytes=nbytes, unit=unit, min_free_nbytes=0)


def everything(dataset: kvformat.Dataset):
    return [(name, [(0, count)]) for name, count in dataset.slabs.items()]


class Held:
    """Jobs that occupy all threads ahead until they are let go."""

    def __init__(self, dataset: kvformat.Dataset) -> None:
        self.event = threading.Event()
        begun = threading.Semaphore(0)
        for _ in range(8):
            dataset.shards._ahead.submit(lambda: (begun.release(), self.event.wait(PATIENCE_S)))
        for _ in range(8):
            assert begun.acquire(timeout=PATIENCE_S)


# --------------------------------------------------------------------------------------------------------- announced


@pytest.mark.parametrize("unit", ["none", "record"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_more_is_wanted_of_a_record_than_was_announced(verify: str, unit: str, tmp_path) -> None:
    """Its neighbours come with it in a block, of which only what was announced is fetched."""
    store = MemoryStore(objects=made(tmp_path, [64] * 12))
    cache = None if unit == "none" else cache_of(tmp_path, 1 << 28, unit)
    dataset = kvformat.open(remote_over(store), verify=verify, cache=cache)
    held = Held(dataset)
    dataset.announce(range(12), [("k", [(2, 1)])])
    try:
        for number in (0, 5, 11):
            assert right(number, dataset[number].component("k"), 1)
            assert right(number, dataset[number].component("v"), -1)
    finally:
        held.event.set()
    again = kvformat.open(remote_over(store), verify=verify, cache=cache)
    assert all(right(record.index, record.component("v"), -1) for record in again)


def test_a_block_covers_what_was_fetched_and_nothing_between() -> None:
    block = Block(None, "", [(100, 10), (110, 5), (200, 7)])  # type: ignore[arg-type]  # nothing is fetched
    assert block.covers([(100, 10), (200, 7)])
    assert block.covers([(203, 4)])
    assert not block.covers([(99, 2)])
    assert not block.covers([(115, 1)])
    assert not block.covers([(100, 10), (203, 5)])
    assert not block.covers([(0, 300)])


def test_a_failure_ahead_of_a_use_that_succeeded_is_not_raised_later(tmp_path) -> None:
    """What waits for the work ahead tries again itself; the old failure is history then."""

    class Broken(MemoryStore):
        down = True

        def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
            if self.down and name.startswith("shards/"):
                raise DeniedFault("no")
            return super().get(name, start, nbytes, timeout_s=timeout_s)

    store = Broken(objects=made(tmp_path, [64]))
    dataset = kvformat.open(remote_over(store))
    record = dataset[0]
    shard = dataset.shards._kept.get(0)
    shard.fetch_ahead(record, everything(dataset), hold=True)
    with pytest.raises(KVFormatError, match="E207"):
        record.slab("key", layer=0)
    store.down = False
    assert right(0, record.component("k"), 1)
    assert shard._failure is None


def test_work_ahead_holds_nothing_of_what_is_done(monkeypatch) -> None:
    monkeypatch.setattr(ahead_module, "_IDLE_S", 10.0)
    ahead = Ahead(2)
    done = threading.Event()

    class Thing:
        def __call__(self) -> None:
            done.set()

        def __del__(self) -> None:
            dropped.set()

    dropped = threading.Event()
    ahead.submit(Thing())
    assert done.wait(PATIENCE_S)
    gc.collect()
    assert dropped.wait(ahead_module._IDLE_S / 2)  # while its thread still waits for another job


def test_threads_that_are_told_but_not_awake_yet_do_not_count_as_free() -> None:
    """Of eight jobs submitted at once to one that idles, each has a thread."""
    ahead = Ahead(8)
    first = threading.Event()
    ahead.submit(first.set)
    assert first.wait(PATIENCE_S)
    while not ahead._idle:
        time.sleep(0.001)
    barrier = threading.Barrier(8)
    passed = threading.Semaphore(0)
    with ahead._changed:  # an RLock: nobody wakes up in between
        for _ in range(8):
            ahead.submit(lambda: (barrier.wait(PATIENCE_S), passed.release()))
    for _ in range(8):
        assert passed.acquire(timeout=PATIENCE_S)


def test_no_thread_can_be_started_for_work_ahead(monkeypatch, tmp_path) -> None:
    dataset = kvformat.open(remote_over(MemoryStore(objects=made(tmp_path, [64] * 4))))
    dataset[0].component("k")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ahead_module.threading, "Thread", refuse)
    dataset.announce(range(4), everything(dataset))
    monkeypatch.undo()
    assert all(right(record.index, record.component("k"), 1) for record in dataset)


# ------------------------------------------------------------------------------------------------------ a small cache


@pytest.mark.parametrize(("unit", "entries"), [("record", 2), ("record", 4), ("shard", 2), ("shard", 4)])
def test_a_cache_smaller_than_the_dataset_is_not_filled_by_what_nobody_uses(unit, entries, tmp_path) -> None:
    """Neither refused nor gone past: what was used before makes room."""
    store = MemoryStore(objects=made(tmp_path, [64] * 24, shard_slots=2))
    sizes = [len(data) for name, data in store.objects.items() if name.startswith("shards/")]
    index = sum(len(data) for name, data in store.objects.items() if name.startswith("index/"))
    largest = max(sizes) if unit == "shard" else max(sizes) // 2
    dataset = kvformat.open(remote_over(store), cache=cache_of(tmp_path, entries * largest + 4 * index, unit))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for number in range(len(dataset)):
                assert right(number, dataset[number].component("k"), 1)
                assert right(number, dataset[number].component("v"), -1)
    assert len(gets(store, "shards/")) <= 2 * 24


def test_two_datasets_share_a_cache_that_has_room_for_one(tmp_path) -> None:
    datasets = []
    cache = None
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        store = MemoryStore(objects=made(tmp_path / place, [64 if place == "a" else 65] * 6))
        total = sum(len(data) for name, data in store.objects.items())
        cache = cache or cache_of(tmp_path, total + total // 4, "record")
        datasets.append(kvformat.open(remote_over(store), cache=cache))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dataset in (*datasets, *datasets):
            assert all(right(number, dataset[number].component("k"), 1) for number in range(6))


def test_a_shard_that_is_opened_again_is_not_hashed_again(monkeypatch, tmp_path) -> None:
    from kvformat.storage import remote_read

    hashed: list[str] = []
    sha256_of = remote_read.sha256_of
    monkeypatch.setattr(
        remote_read, "sha256_of", lambda file, size: (hashed.append(file.path), sha256_of(file, size))[1]
    )
    store = MemoryStore(objects=made(tmp_path, [64] * 8, shard_slots=2))
    dataset = kvformat.open(remote_over(store), cache=cache_of(tmp_path, 1 << 28, "shard"), max_open_files=1)
    for _ in range(3):
        assert all(right(number, dataset[number].component("k"), 1) for number in range(8))
    shards = [path for path in hashed if "/shards/" in path]
    assert len(shards) == len(set(shards)) == 4


def test_records_ahead_do_not_take_all_descriptors(tmp_path) -> None:
    dataset = kvformat.open(
        remote_over(MemoryStore(objects=made(tmp_path, [3] * 200))),
        cache=cache_of(tmp_path, 1 << 28, "record"),
        max_open_files=8,
    )
    for start in range(0, 200, 10):
        dataset.announce(range(start, start + 10), everything(dataset))
    last = threading.Event()
    for _ in range(8):
        dataset.shards._ahead.submit(last.set)
    assert last.wait(PATIENCE_S)
    held = [holder for holder in list(dataset.shards._announced.values()) if holder.cached is not None]
    assert len(held) <= 2 * 10
    assert all(right(number, dataset[number].component("k"), 1) for number in range(200))


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("view", [np.asarray, lambda r: np.frombuffer(r, np.uint8), lambda r: r.view(np.ndarray)])
def test_an_array_over_a_region_keeps_it(view) -> None:
    regions = Regions(1 << 30)
    region = regions.take(1 << 20)
    region[:] = 7
    held = view(region)
    del region
    gc.collect()
    other = regions.take(1 << 20)
    other[:] = 9
    assert (held == 7).all()


def test_what_came_back_is_dropped_though_nobody_asks_for_more() -> None:
    regions = Regions(4 << 20)
    many = [regions.take(1 << 20) for _ in range(40)]
    del many
    gc.collect()
    assert regions._state.arena.resident <= 4 << 20  # looked at without asking for anything


def test_bytes_are_counted_while_another_thread_puts_the_whole_record_in_place(tmp_path) -> None:
    dataset = kvformat.open(remote_over(MemoryStore(objects=made(tmp_path, [64]))))
    record = dataset[0]
    shard = dataset.shards._kept.get(0)
    seen = []
    use = type(shard).use

    def looked_at(self, file) -> None:
        use(self, file)
        seen.append(self.held_nbytes)  # as another thread may at this moment

    type(shard).use = looked_at
    try:
        record.component("k")
    finally:
        type(shard).use = use
    assert seen == [record.nbytes]


# ------------------------------------------------------------------------------------------------------------- mixed


class Hostile(MemoryStore):
    """Fails, is late, and gives out damaged bytes, by chance."""

    def __init__(self, objects: dict[str, bytes], seed: int) -> None:
        super().__init__(objects=objects)
        self.draw = random.Random(seed)
        self.calm = False

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        data = super().get(name, start, nbytes, timeout_s=timeout_s)
        chance = 1.0 if self.calm else self.draw.random()
        if chance < 0.05:
            raise TransportFault("reset")
        if chance < 0.1:
            time.sleep(0.002)
        if chance < 0.15:
            changed = bytearray(data)
            changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
            return bytes(changed)
        if chance < 0.17:
            raise DeniedFault("no")
        return data


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("unit", ["none", "record", "shard"])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_threads_over_a_hostile_store_get_right_bytes_or_an_error(verify, unit, seed, tmp_path) -> None:
    store = Hostile(made(tmp_path, [5, 64, 1, 300, 7, 7, 7, 40] * 8, shard_slots=4), seed)
    nbytes = sum(len(data) for data in store.objects.values())
    cache = None if unit == "none" else cache_of(tmp_path, 3 * nbytes // 4, unit)
    dataset = kvformat.open(remote_over(store, request_nbytes=1 << 16), verify=verify, cache=cache, max_open_files=3)
    wrong: list[str] = []
    codes = {"E207", "E070", "E071", "E072", "E073", "E077", "E006", "E210", "E056", "E059"}

    def work(number: int) -> None:
        draw = random.Random(seed * 100 + number)
        for _ in range(60):
            record = draw.randrange(len(dataset))
            try:
                action = draw.randrange(7)
                if action == 0:
                    found = dataset[record].slab("key", layer=(layer := draw.randrange(LAYERS)))
                    ok = bool((found == torch.tensor(value(record, layer)).bfloat16()).all())
                elif action == 1:
                    ok = right(record, dataset[record].component("v"), -1)
                elif action == 2:
                    out = bytearray(dataset[record].nbytes)
                    dataset.read_into(record, out)
                    found = dataset.tensors_in(out, record)
                    ok = right(record, found["k"], 1) and right(record, found["v"], -1)
                elif action == 3:
                    names = ["k"] if draw.random() < 0.5 else ["k", "v"]
                    wanted = [(name, [(draw.randrange(LAYERS), 1)]) for name in names]
                    dataset.announce([draw.randrange(len(dataset)) for _ in range(5)], wanted)
                    ok = True
                elif action == 4:
                    dataset.announce([draw.randrange(len(dataset)) for _ in range(5)], everything(dataset))
                    ok = True
                elif action == 5:
                    ok = bool((dataset[record].extra("token_ids") == record + 1).all())
                else:
                    if draw.random() < 0.3:
                        dataset.forget()
                    layer = draw.randrange(LAYERS)
                    bits = 1 << dataset[0].placement.tensors["k"].bit
                    (place,) = dataset.places([record], bits, [("k", [(layer, 1)])])
                    placed = place[0].tensors["k"]
                    if place[1] is not None:
                        begin = place[2] + placed.offset + layer * placed.slab_nbytes
                        data = place[1][begin : begin + placed.slab_nbytes].tobytes()
                    else:
                        data = b"".join(piece.tobytes() for _, _, piece in place[3].pieces(placed, layer, 1))
                    expected = torch.full((len(data) // 2,), value(record, layer)).bfloat16()
                    ok = data == expected.view(torch.uint8).numpy().tobytes()
                if not ok:
                    wrong.append(f"record {record}, action {action}")
            except KVFormatError as error:
                if error.code not in codes:
                    wrong.append(str(error))
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kvformat.KVFormatWarning)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        store.calm = True
        dataset.forget()
        for number in range(len(dataset)):
            for _ in range(3):  # failures of work ahead are raised once
                try:
                    assert right(number, dataset[number].component("k"), 1)
                    break
                except KVFormatError as error:
                    assert error.code in codes  # noqa: PT017
                    last = error
            else:
                raise AssertionError(number) from last
