"""The order of items: whole, seeded, local where asked, mixed exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat.loader.order import Order, order_key

KEY = order_key({"dataset": "0" * 64, "seed": 1})
SHUFFLES = ("none", "global", "window")


def make(sizes, *, shuffle="global", key=KEY, **options):
    """An order over sources given as lists of shard sizes."""
    return Order(
        key,
        shuffle=shuffle,
        lengths=[sum(shards) for shards in sizes],
        ends=lambda source: np.cumsum(np.array(sizes[source], np.int64)),
        **options,
    )


SIZES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=4)


@given(SIZES, st.sampled_from(SHUFFLES), st.integers(1, 9), st.integers(0, 1000))
def test_an_epoch_has_every_item_once(sizes, shuffle, window, epoch):
    order = make(sizes, shuffle=shuffle, window=window)
    assert sorted(order.items(epoch, 0, order.length).tolist()) == list(range(order.length))


@given(SIZES, st.sampled_from(SHUFFLES), st.booleans(), st.data())
def test_a_slice_is_the_same_wherever_one_begins(sizes, shuffle, mixed, data):
    weights = data.draw(st.lists(st.integers(1, 6), min_size=len(sizes), max_size=len(sizes))) if mixed else None
    samples = data.draw(st.integers(1, 90)) if mixed else None
    order = make(sizes, shuffle=shuffle, window=2, weights=weights, num_samples=samples)
    epoch = data.draw(st.integers(0, 5))
    start = data.draw(st.integers(0, order.length - 1))
    stop = data.draw(st.integers(start + 1, order.length))
    whole = order.items(epoch, 0, order.length).tolist()
    other = make(sizes, shuffle=shuffle, window=2, weights=weights, num_samples=samples)
    assert other.items(epoch, start, stop).tolist() == whole[start:stop]


def test_epochs_keys_and_shuffles_differ():
    sizes = [[20] * 5]
    found = [
        make(sizes, shuffle=s, window=2).items(e, 0, 100).tolist() for s in ("global", "window") for e in range(3)
    ]
    found.append(make(sizes, key=order_key({"dataset": "0" * 64, "seed": 2})).items(0, 0, 100).tolist())
    assert len({tuple(one) for one in found}) == len(found)
    unshuffled = make(sizes, shuffle="none")
    assert unshuffled.items(0, 0, 100).tolist() == unshuffled.items(1, 0, 100).tolist() == list(range(100))


def test_windows_keep_shards_together():
    sizes = [3, 5, 1, 8, 2, 9, 4]
    order = make([sizes], shuffle="window", window=3)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    windows = set()
    for epoch in range(20):
        items = order.items(epoch, 0, sum(sizes))
        at, groups = 0, []
        for width in (3, 3, 1):
            # So many shards fill the next stretch, and nothing else is in it.
            group = list(dict.fromkeys(shard_of[items[at:]].tolist()))[:width]
            count = sum(sizes[shard] for shard in group)
            assert set(shard_of[items[at : at + count]].tolist()) == set(group)
            groups.append(frozenset(group))
            at += count
        windows.add(tuple(groups))
    assert len(windows) > 10


def test_items_of_a_window_are_interleaved():
    order = make([[50] * 8], shuffle="window", window=4)
    items = order.items(0, 0, 200)
    runs = np.count_nonzero(np.diff(items // 50)) + 1
    assert runs > 100


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4), st.sampled_from(SHUFFLES))
@settings(max_examples=50)
def test_a_mix_draws_by_weight_in_every_cycle(sources, shuffle):
    lengths, weights = [n for n, _ in sources], [w for _, w in sources]
    order = make([[n] for n in lengths], shuffle=shuffle, weights=weights, num_samples=sum(weights) * 5)
    ends = np.cumsum(lengths)
    everything = []
    for epoch in range(4):
        items = order.items(epoch, 0, order.length)
        for cycle in items.reshape(5, sum(weights)):
            assert np.bincount(np.searchsorted(ends, cycle, side="right"), minlength=len(weights)).tolist() == weights
        everything += items.tolist()
    # Each source goes through passes, in each of which every item occurs once, over the ends of epochs.
    starts = ends - lengths
    for start, length in zip(starts.tolist(), lengths, strict=True):
        drawn = [item - start for item in everything if start <= item < start + length]
        for at in range(0, len(drawn) - length + 1, length):
            assert sorted(drawn[at : at + length]) == list(range(length))


def test_cycles_of_a_mix_differ():
    order = make([[1000], [1000]], weights=[3, 3], num_samples=600)
    cycles = {tuple((items >= 1000).tolist()) for items in order.items(0, 0, 600).reshape(100, 6)}
    assert len(cycles) == 20  # all ways to place three of six


def test_a_mix_can_count_so_far_only():
    order = make([[5], [5]], weights=[1, 1], num_samples=2**40)
    assert len(order.items(1 << 20, 0, 10)) == 10
    with pytest.raises(kvformat.errors.UsageError, match="E081"):
        order.items(1 << 23, 0, 10)


def test_far_away_is_as_near_as_the_start():
    n = 1 << 45
    order = make([[n]])
    assert len(np.unique(order.items(3, n - 5000, n))) == 5000
    mixed = make([[n], [n]], weights=[2, 1])
    assert len(np.unique(mixed.items(40, n, n + 5000))) == 5000
