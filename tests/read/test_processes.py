"""One dataset in many threads and processes, whichever way they start."""

from __future__ import annotations

import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvformat
from kvformat.errors import KVFormatError
from kvformat.testing.vectors import VALID
from tests.testing.touch import touch_all

BASE = "several-shards"


def contents(dataset: kvformat.Dataset, order: list[int]) -> list[bytes]:
    found = []
    for number in order:
        record = dataset[number]
        found += [record.component(name).float().numpy().tobytes() for name in ("k", "v")]
        found.append(record.slab("key", layer=1).float().numpy().tobytes())
        found.append(",".join(record.names).encode() + record.document)
    return found


def in_child(dataset: kvformat.Dataset, queue: multiprocessing.Queue) -> None:
    try:
        queue.put((dataset.id, contents(dataset, [4, 0, 2, 1, 3]), touch_all(dataset)))
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_handle_that_was_used_works_in_a_child(saved, method: str, io: str) -> None:
    dataset = kvformat.open(saved(BASE), io=io, max_open_files=2)
    wanted = contents(dataset, [4, 0, 2, 1, 3])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=in_child, args=(dataset, queue)) for _ in range(2)]
    for child in children:
        child.start()
    results = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    assert results == [(dataset.id, wanted, 0)] * 2
    assert contents(dataset, [4, 0, 2, 1, 3]) == wanted, "and the parent's is as it was"


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_threads_share_a_dataset(saved, io: str, verify: str) -> None:
    """Two files open for five shards' worth of work: files come and go while others read."""
    dataset = kvformat.open(saved(BASE), io=io, verify=verify, max_open_files=1)
    wanted = {number: contents(kvformat.open(dataset.location), [number]) for number in range(5)}
    barrier = threading.Barrier(8)

    def work(seed: int) -> int:
        order = random.Random(seed)
        barrier.wait(timeout=60)
        for _ in range(60):
            number = order.randrange(5)
            assert contents(dataset, [number]) == wanted[number]
        return touch_all(dataset)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8
    assert dataset.shards.num_open <= 1


def test_threads_all_see_damage(saved, flip) -> None:
    path: Path = saved(BASE)
    flip(path, BASE, record=3)
    dataset = kvformat.open(path)
    barrier = threading.Barrier(4)

    def work(_: int) -> str | None:
        barrier.wait(timeout=60)
        try:
            dataset[3].component("k")
        except KVFormatError as error:
            return error.code
        return None

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == ["E072"] * 4


def test_names_and_documents_are_found_by_all_threads(saved) -> None:
    dataset = kvformat.open(saved("tables-in-parts"))
    entries = VALID["tables-in-parts"].entries

    def work(number: int) -> bool:
        entry = entries[number % len(entries)]
        found = dataset.find(document=entry.document.digest)
        return found is not None and all(dataset[name].index == found.index for name in entry.names)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))
