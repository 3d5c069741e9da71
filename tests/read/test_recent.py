"""What is kept lately is given up again, whatever happens while a value is let go of."""

from __future__ import annotations

import random
import sys
import threading

import torch

import kvformat
from kvformat.read.recent import Recent


def drained(recent):
    return list(recent.beyond(0))


def test_the_order_is_that_of_use():
    recent = Recent()
    for key in "abc":
        recent.put(key, key.upper())
    assert recent.touch("a")
    recent.put("b", "again")
    assert (len(recent), recent.values(), recent.get("b"), recent.get("x")) == (3, ["C", "A", "again"], "again", None)
    assert "c" in recent
    assert drained(recent) == [("c", "C"), ("a", "A"), ("b", "again")]
    assert not recent.touch("a")
    assert drained(recent) == []


def test_no_more_are_left_than_allowed():
    recent = Recent(2)
    for key in "abab":
        recent.put(key, key.upper())
    assert recent.values() == ["A", "B"]
    assert recent.touch("a")
    recent.put("c", "C")
    assert recent.values() == ["A", "C"]
    assert list(recent.beyond(1)) == [("a", "A")]


def test_a_value_that_is_replaced_lets_another_thread_remove_the_key():
    """As finalisers do that close a file: here it is the finaliser itself that removes."""
    recent = Recent()

    class Value:
        def __del__(self):
            drained(recent)

    recent.put("a", Value())
    recent.put("a", "new")
    recent.put("b", "other")
    assert len(recent) == len(drained(recent)) <= 2
    for _ in range(2):
        recent.put("a", "once more")
        assert drained(recent) == [("a", "once more")]


def test_threads_over_few_open_shards(tmp_path):
    """Come to an end, with no more of them open than allowed."""
    path, records = tmp_path / "many", 24
    schema = kvformat.Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=16)
    with kvformat.create(path, schema=schema, context=kvformat.Context.unknown(), shard_nbytes=4096) as out:
        for number in range(records):
            k = torch.full((2, 3, 2, 16), float(number), dtype=torch.bfloat16)
            out.add(f"r{number}", {"k": k, "v": -k}, token_ids=[number + 1] * 3)
    dataset = kvformat.open(path, max_open_files=1)
    wrong, ended = [], []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(400):
            number = draw.randrange(records)
            if float(dataset[number].component("k")[0, 0, 0, 0]) != number:
                wrong.append(number)
        ended.append(seed)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    finally:
        sys.setswitchinterval(interval)
    assert (sorted(ended), wrong) == ([0, 1, 2, 3], [])
    assert dataset.shards.num_open == 1
