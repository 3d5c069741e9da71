from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvformat.extract.assignment import next_shard


def test_own_shards_come_first_in_order() -> None:
    assert next_shard(range(10), {}, rank=1, world_size=3) == 1
    assert next_shard([2, 4, 7, 8], {}, rank=1, world_size=3) == 4
    assert next_shard([4, 7, 8], {4: 0.9}, rank=1, world_size=3) == 7


def test_an_idle_worker_takes_what_others_have_not_begun_from_the_end() -> None:
    assert next_shard([3, 6, 9], {3: 0.0}, rank=2, world_size=3) in (6, 9)
    taken = {next_shard([3, 6, 9, 12], {}, rank=rank, world_size=3) for rank in (1, 2)}
    assert len(taken) == 2
    assert 3 not in taken


def test_what_a_straggler_holds_is_repeated_only_where_much_of_it_is_left() -> None:
    assert next_shard([3], {3: 0.2}, rank=2, world_size=3) == 3
    assert next_shard([3], {3: 0.7}, rank=2, world_size=3) is None
    assert next_shard([3, 4], {3: 0.7, 4: 0.4}, rank=2, world_size=3) == 4
    assert next_shard([], {3: 0.0}, rank=2, world_size=3) is None


@given(
    st.sets(st.integers(0, 40)),
    st.dictionaries(st.integers(0, 40), st.floats(0, 1)),
    st.integers(1, 5).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size))),
)
def test_what_is_chosen_is_missing_and_what_nobody_has_begun_is_never_left(missing, in_hand, place) -> None:
    rank, world_size = place
    found = next_shard(missing, in_hand, rank=rank, world_size=world_size)
    assert found is None or found in missing
    if missing - in_hand.keys():
        assert found is not None
        assert found not in in_hand


@given(st.integers(1, 30), st.integers(1, 5))
def test_workers_in_turn_make_every_shard_once(num_shards, world_size) -> None:
    missing = set(range(num_shards))
    made = []
    while missing:
        for rank in range(world_size):
            found = next_shard(missing, {}, rank=rank, world_size=world_size)
            if found is not None:
                missing.remove(found)
                made.append(found)
    assert sorted(made) == list(range(num_shards))
