"""The sampler: batches, ranks, last steps, and what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvformat
from kvformat.loader.collection import concat, mix
from kvformat.loader.cursor import Cursor, Draw
from kvformat.loader.sampler import BatchSampler
from tests.loader.made import make_dataset, num_tokens

ORDERS = [(shuffle, over) for shuffle in ("none", "global", "window") for over in ("names", "records")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Nine records, eleven names."""
    return make_dataset(tmp_path_factory.mktemp("sampler") / "data", 9, aliases=(2, 7))


def draws(sampler):
    return [(list(draw), draw.slots, draw.padding) for draw in sampler]


@pytest.mark.parametrize(("shuffle", "over"), ORDERS)
@pytest.mark.parametrize("cut", [{"batch_size": 4}, {"max_tokens": 6}, {"max_tokens": 20, "max_records": 3}])
def test_an_epoch_has_every_item_once(dataset, shuffle, over, cut):
    sampler = BatchSampler(dataset, shuffle=shuffle, over=over, window_shards=2, **cut)
    record_of = [record for _, record in dataset.names()]
    for _ in range(2):
        found = list(sampler)
        items = [item for draw in found for item in (draw if over == "records" else draw.slots)]
        assert sorted(items) == list(range(9 if over == "records" else 11))
        for draw in found:
            assert list(draw) == (draw if draw.slots is None else [record_of[slot] for slot in draw.slots])
            assert (draw.slots is None) == (over == "records")
            assert all(type(number) is int for number in draw)
            assert len(draw) <= cut.get("batch_size", cut.get("max_records", 99))
            if "max_tokens" in cut:
                assert sum(num_tokens(record) for record in draw) <= cut["max_tokens"]


def test_batches_ranks_and_workers_do_not_change_the_order(dataset):
    def items(**options):
        return [slot for draw in BatchSampler(dataset, seed=4, **options) for slot in draw.slots]

    assert items(batch_size=1) == items(batch_size=4) == items(batch_size=100)
    assert items(batch_size=1) != [slot for d in BatchSampler(dataset, seed=5, batch_size=1) for slot in d.slots]


def test_another_dataset_of_the_same_size_has_another_order(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", 9, aliases=(2, 7))
    assert draws(BatchSampler(dataset, batch_size=1)) != draws(BatchSampler(other, batch_size=1))


def test_none_is_as_stored(dataset):
    sampler = BatchSampler(dataset, batch_size=4, shuffle="none", over="records")
    assert [list(draw) for draw in sampler] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_drop_last_leaves_out_the_short_batch(dataset):
    sampler = BatchSampler(dataset, batch_size=4, shuffle="none", over="records", drop_last=True)
    found = list(sampler)
    assert [list(draw) for draw in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found[-1].cursor == Cursor(epoch=1, block=0, batch=0)
    with pytest.raises(ValueError, match=r"\[E081\].*drop_last"):
        BatchSampler(dataset, batch_size=12, drop_last=True)


def test_set_epoch_repeats_and_skips(dataset):
    sampler = BatchSampler(dataset, batch_size=4)
    epochs = [draws(sampler) for _ in range(4)]
    assert len({json.dumps(epoch) for epoch in epochs}) == 4
    assert sampler.epoch == 4
    for epoch in (2, 0, 3):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert draws(sampler) == epochs[epoch]


def test_set_epoch_keeps_a_cursor_that_is_in_it(dataset):
    sampler = BatchSampler(dataset, batch_size=4)
    whole = list(sampler)
    state = sampler.state_dict(after=whole[0])
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert list(sampler) == whole[1:]
    sampler.load_state_dict(state)
    with pytest.warns(kvformat.KVFormatWarning, match="W004"):
        sampler.set_epoch(1)
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_an_iteration_begins_with_its_first_batch(dataset):
    """A DataLoader with workers makes two iterators for one epoch."""
    sampler = BatchSampler(dataset, batch_size=4)
    iter(sampler)
    unused = iter(sampler)
    assert sampler.epoch == 0
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(unused) == first
    assert list(unused) == []


def test_state_without_a_batch_is_that_after_the_last_one_given_out(dataset):
    sampler = BatchSampler(dataset, batch_size=4)
    iteration = iter(sampler)
    draw = next(iteration)
    assert sampler.state_dict() == sampler.state_dict(after=draw)


# --------------------------------------------------------------------------------------------------------------- ranks


@given(st.integers(1, 7), st.sampled_from(["drop", "pad"]), st.sampled_from([{"batch_size": 1}, {"max_tokens": 6}]))
def test_ranks_share_one_sequence(dataset, world, last_step, cut):
    alone = list(BatchSampler(dataset, **cut))
    samplers = [
        BatchSampler(dataset, rank=rank, world_size=world, last_step=last_step, **cut) for rank in range(world)
    ]
    if world > len(alone) and last_step == "drop":
        for sampler in samplers:
            with pytest.raises(ValueError, match=r"\[E081\].*no step at all"):
                next(iter(sampler))
        return
    lengths = [len(sampler) for sampler in samplers]
    ranks = [list(sampler) for sampler in samplers]
    assert [len(rank) for rank in ranks] == lengths
    assert len(set(lengths)) == 1  # no rank waits for ever
    steps = list(zip(*ranks, strict=True))
    for number, step in enumerate(steps):
        own = alone[number * world : (number + 1) * world]
        assert list(step[: len(own)]) == own
        assert [draw.padding for draw in step] == [place >= len(own) for place in range(world)]
        assert list(step) == [own[place % len(own)] for place in range(world)]
        assert len({draw.cursor for draw in step}) == 1
    assert steps[-1][0].cursor == Cursor(epoch=1, block=0, batch=0)
    assert [len(steps), len(alone) % world] == [-(-len(alone) // world), len(alone) % world] or last_step == "drop"
    assert [draw for step in steps for draw in step if not draw.padding] == alone[: len(steps) * world]


def test_a_rest_too_small_for_the_world_ends_the_epoch_at_once(dataset):
    alone = BatchSampler(dataset, batch_size=2)
    whole = list(alone)
    state = alone.state_dict(after=whole[-2])
    wide = [BatchSampler(dataset, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    for sampler in wide:
        sampler.load_state_dict(state)
        assert list(sampler) == []
        assert sampler.epoch == 1
        assert len(list(sampler)) == 2


def test_ranks_come_from_the_environment(dataset, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = BatchSampler(dataset, batch_size=1)
    assert (sampler.rank, sampler.world_size) == (2, 3)
    given_ = BatchSampler(dataset, batch_size=1, rank=np.int64(0), world_size=1)
    assert (given_.rank, given_.world_size) == (0, 1)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match=r"\[E081\].*rank 2 of a world of 1.*WORLD_SIZE"):
        BatchSampler(dataset, batch_size=1)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match=r"\[E081\].*'two'"):
        BatchSampler(dataset, batch_size=1)
    monkeypatch.delenv("RANK")
    assert BatchSampler(dataset, batch_size=1).world_size == 1


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (1.0, 2), (True, 2), (0, "x")])
def test_ranks_that_are_none_are_refused(dataset, rank, world):
    with pytest.raises(ValueError, match=r"\[E081\]"):
        BatchSampler(dataset, batch_size=1, rank=rank, world_size=world)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 1, "max_tokens": 1},
        {"batch_size": 0},
        {"batch_size": 1.0},
        {"batch_size": True},
        {"max_tokens": 0},
        {"max_tokens": 8, "max_records": 0},
        {"batch_size": 1, "max_records": 1},
        {"max_tokens": 8, "drop_last": True},
        {"batch_size": 1, "seed": -1},
        {"batch_size": 1, "seed": 2**53},
        {"batch_size": 1, "seed": None},
        {"batch_size": 1, "shuffle": "random"},
        {"batch_size": 1, "shuffle": True},
        {"batch_size": 1, "over": "documents"},
        {"batch_size": 1, "last_step": "repeat"},
        {"max_tokens": 8, "oversize": "skip"},
        {"batch_size": 1, "shuffle": "window", "window_shards": 0},
        {"batch_size": 1, "num_samples": 5},
    ],
)
def test_arguments_outside_the_documented_are_refused(dataset, options):
    with pytest.raises(ValueError, match=r"\[E081\]"):
        BatchSampler(dataset, **options)


@pytest.mark.parametrize("epoch", [-1, 1.0, None, True, 2**32])
def test_epochs_that_are_none_are_refused(dataset, epoch):
    with pytest.raises(ValueError, match=r"\[E081\]"):
        BatchSampler(dataset, batch_size=1).set_epoch(epoch)


def test_a_record_above_the_budget_is_named_or_its_own_batch(dataset):
    with pytest.raises(ValueError, match=r"\[E086\].*5 tokens.*max_tokens=4.*data-4"):
        list(BatchSampler(dataset, max_tokens=4))
    found = list(BatchSampler(dataset, max_tokens=4, oversize="own", over="records"))
    assert [list(draw) for draw in found if 4 in draw] == [[4]]
    assert sorted(record for draw in found for record in draw) == list(range(9))


# ---------------------------------------------------------------------------------------------------- several datasets


def test_a_mix_has_epochs_of_its_own_length(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", 5)
    sampler = BatchSampler(mix({dataset: 1, other: 3}), batch_size=4, over="records", num_samples=8)
    for _ in range(5):
        items = np.array([record for draw in sampler for record in draw])
        assert [(items[:4] >= 9).sum(), (items[4:] >= 9).sum()] == [3, 3]
    assert len(BatchSampler(mix({dataset: 1, other: 3}), batch_size=4)) == 4
    assert len(BatchSampler(concat([dataset, other]), batch_size=4)) == 4


# --------------------------------------------------------------------------------------------------------- processes


def test_a_draw_pickles_small(dataset):
    draw = next(iter(BatchSampler(dataset, batch_size=4)))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(draw, protocol)
        again = pickle.loads(data)
        assert type(again) is Draw
        assert (again, again.cursor, again.slots, again.padding) == (draw, draw.cursor, draw.slots, draw.padding)
    assert len(pickle.dumps(draw)) < 300


def rest_of(sampler):
    return draws(sampler), draws(sampler)


def test_a_sampler_pickles_to_where_it_stands(dataset):
    sampler = BatchSampler(dataset, max_tokens=6)
    whole = list(sampler)
    begun = BatchSampler(dataset, max_tokens=6)
    next(iter(begun))
    data = pickle.dumps(begun)
    assert len(data) < 4000
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        rest, following = pool.submit(rest_of, begun).result()
    assert rest == draws(whole[1:])
    assert following == draws(sampler)


def test_it_imports_no_torch(dataset):
    program = (
        "import sys; from kvformat.loader.sampler import BatchSampler\n"
        f"list(BatchSampler({dataset.location!r}, max_tokens=9, shuffle='window'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_parts_of_the_index_are_left_alone_until_needed(dataset):
    fresh = kvformat.open(dataset.location)
    sampler = BatchSampler(fresh, batch_size=4, over="records")
    next(iter(sampler))
    assert fresh.index.rows._columns == fresh.index.names._columns == [None]
