"""What reading does to the process besides giving tensors: nothing; and how it asks for pages."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import kvformat
from kvformat.read.stored import StoredRecord

QUIET = """
import random, sys, threading
import numpy as np, torch
import kvformat

def state():
    return (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads(),
        torch.get_num_interop_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), threading.active_count(),
        torch.distributed.is_available() and torch.distributed.is_initialized(),
    )

before = state()
schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=4)
k = torch.zeros(1, 3, 1, 4, dtype=torch.bfloat16)
with kvformat.create(sys.argv[1], schema=schema, context=kvformat.Context.unknown()) as writer:
    writer.add("a", {"k": k, "v": k}, token_ids=[1, 2, 3])
dataset = kvformat.open(sys.argv[1])
dataset["a"].component("k", copy=True)
dataset.read_into(0, bytearray(4096))
assert kvformat.verify(sys.argv[1]).ok
assert state() == before
"""

MEMORY = """
import sys
import kvformat

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

dataset = kvformat.open(sys.argv[1], io=sys.argv[2], max_open_files=2)
buffer = memoryview(bytearray(4 << 20))
dataset.read_into(0, buffer)
dataset[0].component("k")
before = anonymous()
for record in dataset:
    record.component("k"), record.slab("value", layer=0)
    dataset.read_into(record.index, buffer)
print(anonymous() - before)
"""


def test_a_process_is_left_as_it_was(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", QUIET, str(tmp_path / "ds")], check=True, timeout=120)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_reading_much_takes_no_anonymous_memory(tmp_path: Path, io: str) -> None:
    """64 MB go by; what stays is a buffer or two of a record, and no page of the mapping is copied."""
    path = tmp_path / "ds"
    schema = kvformat.Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype="F32")
    rng = np.random.default_rng(0)
    with kvformat.create(path, schema=schema, context=kvformat.Context.unknown(), shard_nbytes=8 << 20) as writer:
        for number in range(32):
            both = rng.standard_normal((2, 2, 1000, 2, 64), dtype=np.float32)
            writer.add(f"clip-{number}", {"k": both[0], "v": both[1]}, token_ids=[number] * 1000)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), io], check=True, capture_output=True, text=True, timeout=120
    )
    assert int(done.stdout) < 8 << 20


def test_the_system_is_told_what_is_read_next(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls themselves: ahead of the first access, and by a worker process until the pages are there."""
    told: list[tuple[int, int, int]] = []

    class Told(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            told.append((option, start, length))
            super().madvise(option, start, length)

    monkeypatch.setattr(mmap, "mmap", Told)
    dataset = kvformat.open(saved("several-shards"), io="mmap")
    record = dataset[0]
    dataset.read_into(0, bytearray(1 << 16))
    page = mmap.PAGESIZE
    ((option, start, length),) = told
    assert option == mmap.MADV_WILLNEED
    assert start % page == 0
    assert start <= record.start
    assert start + length >= record.start + record.nbytes
    told.clear()
    (placed,) = (placed for name, placed in record.placement.tensors.items() if name == "k")
    record.prove([("k", [(0, placed.shape[0])])])
    begin = record.start + placed.offset
    ((option, start, length),) = told
    assert option == 22  # MADV_POPULATE_READ: returns when the pages are there
    assert (start, start + length) == (begin // page * page, begin + placed.nbytes)


def test_a_record_is_asked_for_once_and_a_layer_alone(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page faults one by one run at a fraction of the disk's speed: what is touched is announced, and nothing else."""
    asked: list[tuple[int, int, int]] = []

    def advise(record: StoredRecord, start: int, nbytes: int) -> None:
        asked.append((record.index, start, nbytes))

    monkeypatch.setattr(StoredRecord, "_advise", advise)
    path = saved("several-shards")
    dataset = kvformat.open(path)
    record = dataset[0]
    header_size = dataset.manifest.header_size
    for _ in range(2):
        record.component("k")
        record.component("v")
        dataset.read_into(0, bytearray(1 << 16))
    assert asked == [(0, header_size, record.nbytes)]
    asked.clear()
    layer = dataset[1].slab("key", layer=1)
    dataset[1].slab("key", layer=1)
    (found,) = asked
    assert (found[0], found[2]) == (1, layer.nbytes)
    assert torch.equal(layer, dataset[1].component("k")[1])
