"""Stopping and going on: at every cut, through every loader, over changes of world and workers (faults 1 to 5)."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import kvformat
from kvformat.loader.collection import concat, mix
from kvformat.loader.cursor import Cursor
from kvformat.loader.sampler import BatchSampler
from tests.loader.made import make_dataset
from tests.loader.resuming import LOADERS, Indices, as_it_is, check_every_cut

CUTS = {"one": {"batch_size": 1}, "four": {"batch_size": 4}, "budget": {"max_tokens": 6}}
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores are meant
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata, under a newer torch
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Nine records, eleven names."""
    return make_dataset(tmp_path_factory.mktemp("resume") / "data", 9, aliases=(2, 7))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("loader", "workers"),
    [("sampler", 0), *((name, workers) for name in ("DataLoader", "StatefulDataLoader") for workers in (0, 1, 3))],
)
def test_every_cut(dataset, loader, workers, cut):
    def make():
        return LOADERS[loader](BatchSampler(dataset, seed=3, **CUTS[cut]), workers)

    check_every_cut(make, rest_of_a_whole_epoch=loader == "StatefulDataLoader")


@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
@pytest.mark.parametrize("over", ["names", "records"])
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_of_every_order(dataset, shuffle, over, cut, tmp_path):
    other = make_dataset(tmp_path / "other", 5)
    for source in (concat([dataset, other]), mix({dataset: 2, other: 3})):
        sampler = BatchSampler(source, shuffle=shuffle, over=over, window_shards=2, **CUTS[cut])
        whole, following = list(sampler), list(sampler)
        for k, draw in enumerate(whole[:-1], start=1):
            resumed = BatchSampler(source, shuffle=shuffle, over=over, window_shards=2, **CUTS[cut])
            resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict(after=draw))))
            assert whole[:k] + list(resumed) == whole
            assert list(resumed) == following


def test_the_end_of_an_epoch_is_the_start_of_the_next(dataset):
    sampler = BatchSampler(dataset, batch_size=4)
    last = list(sampler)[-1]
    assert last.cursor == Cursor(epoch=1, block=0, batch=0)
    assert sampler.state_dict(after=last) == sampler.state_dict()
    other = BatchSampler(dataset, batch_size=4)
    other.set_epoch(1)
    assert other.state_dict() == sampler.state_dict()
    assert list(other) == list(sampler)


@pytest.mark.parametrize("workers", [0, 3])
def test_stateful_loader_after_a_finished_epoch_begins_the_next(dataset, workers):
    def make():
        return StatefulDataLoader(
            Indices(),
            batch_sampler=BatchSampler(dataset, batch_size=4, seed=5),
            collate_fn=as_it_is,
            num_workers=workers,
            snapshot_every_n_steps=2,
        )

    first = make()
    epochs = [list(first)]
    finished = first.state_dict()
    epochs += [list(first), list(first)]
    resumed = make()
    resumed.load_state_dict(finished)
    assert [list(resumed), list(resumed)] == epochs[1:]


@pytest.mark.parametrize("workers", [0, 3])
def test_stateful_loader_before_its_first_batch(dataset, workers):
    def make():
        sampler = BatchSampler(dataset, batch_size=4, seed=5)
        return StatefulDataLoader(Indices(), batch_sampler=sampler, collate_fn=as_it_is, num_workers=workers)

    first = make()
    fresh = first.state_dict()
    epochs = [list(first), list(first)]
    resumed = make()
    resumed.load_state_dict(fresh)
    assert [list(resumed), list(resumed)] == epochs


@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_loader_in_the_second_epoch(dataset, workers):
    """Fault 3: the position is restored with its epoch."""

    def make():
        sampler = BatchSampler(dataset, batch_size=2, seed=5)
        return StatefulDataLoader(Indices(), batch_sampler=sampler, collate_fn=as_it_is, num_workers=workers)

    whole = make()
    epochs = [list(whole), list(whole), list(whole)]
    stopped = make()
    list(stopped)
    begun = iter(stopped)
    head = [next(begun), next(begun)]
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert head + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]


# ------------------------------------------------------------------------------------------------- chains of changes


def one_step(samplers):
    """One step of all ranks, as their draws; nothing where the epoch is over."""
    return [draw for draw in (next(sampler, None) for sampler in samplers) if draw is not None]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cut", CUTS)
def test_each_item_once_an_epoch_over_changes_of_the_world(dataset, cut, seed):
    """Fault 4: a stop at any step, and another number of ranks after it, loses and repeats nothing."""
    choose = random.Random(seed)
    state, drawn = None, {0: [], 1: [], 2: []}
    epoch = 0
    while epoch < 3:
        world = choose.randint(1, 5)
        ranks = [
            BatchSampler(dataset, seed=8, rank=rank, world_size=world, last_step="pad", **CUTS[cut])
            for rank in range(world)
        ]
        for rank in ranks if state else ():
            rank.load_state_dict(state)
        iterations = [iter(rank) for rank in ranks]
        for _ in range(choose.randint(1, 4)):
            step = one_step(iterations)
            if not step:
                break
            assert len({draw.cursor for draw in step}) == 1
            assert len(step) == world
            for draw in step:
                if not draw.padding:
                    drawn[epoch] += draw.slots
            states = [rank.state_dict(after=draw) for rank, draw in zip(ranks, step, strict=True)]
            assert states == states[:1] * world
            state = states[0]
            if step[0].cursor.epoch != epoch:
                epoch = step[0].cursor.epoch
                break
    for found in drawn.values():
        assert sorted(found) == list(range(11))
    assert drawn[0] != drawn[1] != drawn[2]


@pytest.mark.parametrize("seed", range(4))
def test_changes_of_workers_and_world_through_a_data_loader(dataset, seed):
    choose = random.Random(seed)
    whole = [draw for sampler in [BatchSampler(dataset, batch_size=1, seed=8)] for _ in range(2) for draw in sampler]
    found, state = [], None
    while len(found) < len(whole):
        world = choose.choice([1, 2])
        samplers = [
            BatchSampler(dataset, batch_size=1, seed=8, rank=rank, world_size=world, last_step="pad")
            for rank in range(world)
        ]
        for sampler in samplers if state else ():
            sampler.load_state_dict(state)
        runs = [iter(LOADERS["DataLoader"](sampler, choose.choice([0, 1, 3])).batches()) for sampler in samplers]
        for _ in range(choose.randint(1, 4)):
            step = one_step(runs)
            found += [draw for draw in step if not draw.padding]
            if not step:
                break
            state = samplers[-1].state_dict(after=step[-1])
    assert found[: len(whole)] == whole


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_set_epoch_reaches_persistent_workers(dataset, method):
    """They never see the sampler: the order is made here, and travels with the numbers (fault 5)."""
    sampler = BatchSampler(dataset, batch_size=4, seed=5)
    loader = DataLoader(
        Indices(),
        batch_sampler=sampler,
        collate_fn=as_it_is,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    found = {}
    for epoch in (0, 3, 1, 3):
        sampler.set_epoch(epoch)
        of_epoch = [list(draw) for draw in loader]
        assert found.setdefault(epoch, of_epoch) == of_epoch
    assert len({str(of_epoch) for of_epoch in found.values()}) == 3


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 2}, "seed"),
        ({"shuffle": "none"}, "shuffle"),
        ({"shuffle": "window"}, "window_shards"),
        ({"over": "records"}, "over"),
        ({"batch_size": 5}, "batch_size"),
        ({"drop_last": True}, "drop_last"),
        ({"batch_size": None, "max_tokens": 9}, "max_tokens"),
    ],
)
def test_state_of_another_order_is_refused_by_name(dataset, change, field):
    given = {"batch_size": 4, "seed": 1}
    state = BatchSampler(dataset, **given).state_dict()
    sampler = BatchSampler(dataset, **given | change)
    before = sampler.state_dict()
    with pytest.raises(kvformat.errors.IdentityError, match=rf"\[E084\].*\b{field}\b"):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


def test_state_of_other_datasets_weights_or_samples_is_refused(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", 5)
    state = BatchSampler(dataset, batch_size=4).state_dict()
    for source in (other, concat([dataset, other])):
        with pytest.raises(kvformat.errors.IdentityError, match=r"\[E084\].*dataset"):
            BatchSampler(source, batch_size=4).load_state_dict(state)
    mixed = BatchSampler(mix({dataset: 1, other: 2}), batch_size=4).state_dict()
    with pytest.raises(kvformat.errors.IdentityError, match=r"\[E084\].*weights"):
        BatchSampler(mix({dataset: 2, other: 1}), batch_size=4).load_state_dict(mixed)
    with pytest.raises(kvformat.errors.IdentityError, match=r"\[E084\].*num_samples"):
        BatchSampler(mix({dataset: 1, other: 2}), batch_size=4, num_samples=9).load_state_dict(mixed)
    BatchSampler(mix({dataset: 3, other: 6}), batch_size=4).load_state_dict(mixed)  # the same ratio


def test_state_survives_what_may_change(dataset):
    first = BatchSampler(dataset, batch_size=1, rank=1, world_size=2)
    draw = next(iter(first))
    other = BatchSampler(dataset, batch_size=1, rank=2, world_size=3, last_step="pad", oversize="own")
    other.load_state_dict(first.state_dict(after=draw))
    assert next(iter(other)).cursor == Cursor(epoch=0, block=0, batch=5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: None,
        lambda state: [],
        lambda state: {},
        lambda state: {"position": 3},
        lambda state: state | {"version": 2},
        lambda state: state | {"version": "1"},
        lambda state: state | {"format": "another"},
        lambda state: state | {"more": 1},
        lambda state: state | {"cursor": {"epoch": 0, "block": 0}},
        lambda state: state | {"cursor": {"epoch": 0, "block": 0, "batch": 3}},
        lambda state: state | {"cursor": {"epoch": 0, "block": 1, "batch": 0}},
        lambda state: state | {"cursor": {"epoch": -1, "block": 0, "batch": 0}},
        lambda state: state | {"cursor": {"epoch": 1 << 40, "block": 0, "batch": 0}},
        lambda state: state | {"cursor": {"epoch": True, "block": 0, "batch": 0}},
        lambda state: state | {"cursor": {"epoch": 0.0, "block": 0, "batch": 0}},
        lambda state: state | {"order": {}},
        lambda state: {name: value for name, value in state.items() if name != "cursor"},
        lambda state: {name: value for name, value in state.items() if name != "version"},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(dataset, damage):
    sampler = BatchSampler(dataset, batch_size=4)
    next(iter(sampler))
    before = sampler.state_dict()
    with pytest.raises(kvformat.errors.UsageError, match=r"\[E085\]"):
        sampler.load_state_dict(damage(before))
    assert sampler.state_dict() == before


@pytest.mark.parametrize("iterating", [None, 2, "0", -1])
def test_state_of_an_iteration_is_checked_too(dataset, iterating):
    iteration = iter(BatchSampler(dataset, batch_size=4))
    next(iteration)
    state = iteration.state_dict() | {"iterating": iterating}
    with pytest.raises(kvformat.errors.UsageError, match=r"\[E085\]"):
        iter(BatchSampler(dataset, batch_size=4)).load_state_dict(state)


def test_after_must_have_a_cursor(dataset):
    with pytest.raises(kvformat.errors.UsageError, match=r"\[E081\].*list has no cursor"):
        BatchSampler(dataset, batch_size=4).state_dict(after=[1, 2])


def test_state_is_small_plain_and_knows_no_rank(dataset):
    sampler = BatchSampler(dataset, batch_size=1, rank=0, world_size=2)
    state = sampler.state_dict(after=next(iter(sampler)))
    text = json.dumps(state)
    assert len(text) < 400
    assert json.loads(text) == state
    assert set(state) == {"format", "version", "dataset", "seed", "order", "cursor"}
    assert state == BatchSampler(dataset, batch_size=1, rank=1, world_size=2).state_dict() | {
        "cursor": {"epoch": 0, "block": 0, "batch": 2}
    }


def test_no_random_state_is_touched(dataset):
    import numpy as np

    random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    sampler = BatchSampler(dataset, batch_size=2)
    sampler.load_state_dict(sampler.state_dict(after=list(sampler)[1]))
    list(sampler)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after
    assert not torch.distributed.is_initialized()
