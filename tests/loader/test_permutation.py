"""The permutation: a bijection at every size, without bias, without a warning (fault 6)."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.loader.permutation import mix, permute, seeds


def seed_of(number: int) -> np.ndarray:
    return seeds(0x5EED, number)


@pytest.mark.parametrize("number", [0, 1, 2**64 - 1])
def test_every_small_size_is_permuted(number):
    for n in range(1, 301):
        assert sorted(permute(np.arange(n), n, seed_of(number)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [10**7, 2**40, 2**40 + 1, 2**52])
def test_large_sizes_give_distinct_numbers_in_range(n):
    positions = np.unique(np.linspace(0, n - 1, 50_000).astype(np.int64))
    found = permute(positions, n, seed_of(1))
    assert len(np.unique(found)) == len(positions)
    assert found.min() >= 0
    assert found.max() < n
    # Uniform over 64 equal parts of the range.
    counts = np.bincount(found * 64 // n if n < 2**50 else found // (n // 64), minlength=64)
    assert chi_square(counts) < 63 + 6 * np.sqrt(2 * 63)


def test_the_whole_of_a_larger_size_is_permuted():
    n = 1_000_003
    found = permute(np.arange(n), n, seed_of(7))
    assert np.bincount(found, minlength=n).max() == 1


@given(st.integers(1, 10_000), st.integers(0, 2**64 - 1), st.data())
def test_a_position_does_not_depend_on_its_company(n, number, data):
    wanted = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    together = permute(wanted, n, seed_of(number))
    assert together.tolist() == [int(permute(np.array([x]), n, seed_of(number))[0]) for x in wanted.tolist()]


def test_sizes_and_seeds_may_differ_from_position_to_position():
    positions, sizes = np.array([0, 0, 4, 99, 5]), np.array([1, 2, 5, 100, 1000])
    numbers = np.array([3, 4, 5, 6, 7], np.uint64)
    together = permute(positions, sizes, seeds(9, numbers)).tolist()
    alone = [
        int(permute(positions[i : i + 1], int(sizes[i]), seeds(9, int(numbers[i])))[0]) for i in range(len(positions))
    ]
    assert together == alone


def test_nothing_of_nothing():
    assert permute(np.arange(0), 5, seed_of(0)).tolist() == []


def chi_square(counts) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def images(n: int, count: int) -> np.ndarray:
    """Permutations of 0 to n - 1 under so many seeds, ``[count, n]``."""
    numbers = np.repeat(np.arange(count, dtype=np.uint64), n)
    return permute(np.tile(np.arange(n), count), n, seeds(1, numbers)).reshape(count, n)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_items_are_equally_frequent(n):
    orders = {order: place for place, order in enumerate(permutations(range(n)))}
    counts = np.zeros(len(orders))
    for order in images(n, 200 * len(orders)).tolist():
        counts[orders[tuple(order)]] += 1
    freedom = len(orders) - 1
    assert chi_square(counts) < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", range(2, 65))
def test_every_item_is_equally_frequent_at_every_position(n):
    found = images(n, 40 * n)
    counts = np.stack([np.bincount(found[:, position], minlength=n) for position in range(n)])
    freedom = (n - 1) ** 2
    assert chi_square(counts) < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [8, 33, 100])
def test_neighbours_are_not_kept_together(n):
    """How far apart two neighbouring positions land is as in a random order."""
    found = images(n, 2_000)
    gaps = (found[:, 1:] - found[:, :-1]).ravel() % n
    counts = np.bincount(gaps, minlength=n)[1:]
    # Gaps of one order depend on each other: a wider bound.
    assert chi_square(counts) < (n - 2) + 8 * np.sqrt(2 * (n - 2))


def test_mix_is_splitmix64():
    """The first outputs of the published generator for the seed 1234567."""
    step = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * step) % 2**64 for i in range(3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_seeds_differ_with_either_number():
    found = {int(seeds(0xC0FFEE, a, b)[0]) for a in range(60) for b in range(60)}
    assert len(found) == 60 * 60
