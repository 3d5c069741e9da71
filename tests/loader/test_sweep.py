"""What is expected next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.loader.sweep import Sweep


def misses(visits: list[int], *, units: list[int], depth: int) -> list[int]:
    """Numbers of the visits whose unit was not held already."""
    sweep, held, found = Sweep(units, depth=depth), [], []
    for number, position in enumerate(visits):
        if units[position] not in held:
            found.append(number)
        held = sweep.visit(position)
    return found


@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_any_visits(count: int, depth: int, data) -> None:
    units = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    sweep = Sweep(units, depth=depth)
    for position in data.draw(st.lists(st.integers(0, count - 1), max_size=20)):
        wanted = sweep.visit(position)
        assert wanted[0] == units[position]
        assert len(wanted) == len(set(wanted)) <= depth
        assert set(wanted) <= set(units)


@given(st.integers(2, 40), st.integers(2, 5), st.integers(1, 3))
def test_walks_to_the_ends_and_back_find_all_but_the_first(count: int, depth: int, times: int) -> None:
    up, down = list(range(count)), list(range(count - 1, -1, -1))
    units = up
    assert misses((up + down) * times, units=units, depth=depth) == [0]
    assert misses((up + down[1:]) * times, units=units, depth=depth) == [0]
    assert misses((down + up) * times, units=units, depth=depth) == [0]


@given(st.integers(4, 40), st.integers(2, 5), st.data())
def test_a_turn_on_the_way_costs_one_at_most(count: int, depth: int, data) -> None:
    turn = data.draw(st.integers(2, count - 1))
    visits = list(range(turn + 1)) + list(range(turn, -1, -1))
    assert set(misses(visits, units=list(range(count)), depth=depth)) <= {0, turn + 2}


@pytest.mark.parametrize("stride", [2, 3, -2, -3])
def test_a_stride_is_learned_from_its_first_step(stride: int) -> None:
    visits = list(range(0, 30, stride)) if stride > 0 else list(range(29, -1, stride))
    assert misses(visits, units=list(range(30)), depth=2) == [0, 1]


def test_a_walk_that_starts_at_the_end_goes_down() -> None:
    assert Sweep(range(5), depth=2).visit(4) == [4, 3]


def test_positions_with_the_same_data_are_held_once() -> None:
    """Layers 4 to 7 reuse 2 and 3 in turn: two units serve them all."""
    units = [0, 1, 2, 3, 2, 3, 2, 3]
    sweep = Sweep(units, depth=2)
    held = [set(sweep.visit(position)) for position in range(8)]
    assert held == [{0, 1}, {1, 2}] + [{2, 3}] * 6


def test_depth_one_holds_what_is_used() -> None:
    sweep = Sweep("abc", depth=1)
    assert [sweep.visit(position) for position in (0, 2, 1, 1)] == [["a"], ["c"], ["b"], ["b"]]
