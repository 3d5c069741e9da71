"""Micro-batches: cut by number, packed by tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.loader.blocks import BLOCK, FixedCount, TokenBudget, first_fit


def slowly(sizes, room, most):
    """First fit as its definition says."""
    batches, held = [], []
    for position, size in enumerate(sizes):
        fits = (n for n, batch in enumerate(batches) if held[n] + size <= room and len(batch) < most)
        number = next(fits, None)
        if number is None:
            batches.append([position])
            held.append(size)
        else:
            batches[number].append(position)
            held[number] += size
    return batches


@given(st.lists(st.integers(1, 40), max_size=120), st.integers(1, 60), st.integers(1, 130))
def test_first_fit_is_what_it_is_called(sizes, room, most):
    assert first_fit(sizes, room=room, most=most) == slowly(sizes, room, most)


def test_first_fit_of_nothing_and_of_one():
    assert first_fit([], room=5, most=5) == []
    assert first_fit([9], room=5, most=5) == [[0]]


def test_first_fit_fills_most_of_the_room():
    sizes = np.random.default_rng(3).lognormal(5.0, 0.7, BLOCK).astype(int) + 1
    batches = first_fit(sizes.tolist(), room=8192, most=BLOCK)
    assert sum(sizes) / (len(batches) * 8192) > 0.97


def numbered(epoch, start, stop):
    return np.arange(start, stop) + 1_000_000 * epoch


@pytest.mark.parametrize("batch_size", [1, 3, 4, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("length", [1, 2, 4096, 4097, 8192, 10_001])
@pytest.mark.parametrize("drop_last", [False, True])
def test_fixed_count_cuts_an_epoch_into_equal_batches(batch_size, length, drop_last):
    blocks = FixedCount(numbered, length=length, batch_size=batch_size, drop_last=drop_last)
    found = [blocks.batch(2, b, n).tolist() for b in range(blocks.num_blocks) for n in range(blocks.count(2, b))]
    every = numbered(2, 0, length).tolist()
    expected = [every[i : i + batch_size] for i in range(0, length, batch_size)]
    assert found == [batch for batch in expected if not drop_last or len(batch) == batch_size]
    counts = [blocks.count(2, block) for block in range(blocks.num_blocks)]
    assert all(count * batch_size >= BLOCK for count in counts[:-1])
    assert all(counts)


def test_token_budget_packs_blocks_by_themselves():
    asked = []

    def items(epoch, start, stop):
        asked.append((epoch, start, stop))
        return numbered(epoch, start, stop)

    blocks = TokenBudget(items, lambda n: n % 7 + 1, length=2 * BLOCK + 5, max_tokens=20, max_records=4)
    assert blocks.num_blocks == 3
    last = [blocks.batch(1, 2, n).tolist() for n in range(blocks.count(1, 2))]
    assert asked == [(1, 2 * BLOCK, 2 * BLOCK + 5)]
    assert sorted(item for batch in last for item in batch) == numbered(1, 2 * BLOCK, 2 * BLOCK + 5).tolist()
    for block in range(3):
        for number in range(blocks.count(1, block)):
            batch = blocks.batch(1, block, number)
            assert len(batch) <= 4
            assert (batch % 7 + 1).sum() <= 20


def test_counts_are_kept_where_packings_are_not():
    asked = []

    def items(epoch, start, stop):
        asked.append(start)
        return numbered(epoch, start, stop)

    blocks = TokenBudget(items, lambda n: n % 7 + 1, length=20 * BLOCK, max_tokens=2000, max_records=None)
    total = sum(blocks.count(0, block) for block in range(20))
    assert sum(blocks.count(0, block) for block in range(20)) == total
    assert len(asked) == 20
    first = blocks.batch(0, 0, 0).tolist()
    assert len(asked) == 21
    blocks.count(3, 0)
    assert blocks.batch(0, 0, 0).tolist() == first
