"""Order, state and ranks under what callers get wrong: odd types, damaged states, threads, worlds that cannot be."""

from __future__ import annotations

import enum
import json

import numpy as np
import pytest
import torch

from kvformat.errors import KVFormatError
from kvformat.loader import lockstep, open_across
from kvformat.loader.blocks import FixedCount
from kvformat.loader.order import Order
from kvformat.loader.sampler import BatchSampler
from tests.loader.made import make_dataset


class Word(enum.StrEnum):
    WINDOW = "window"
    NAMES = "names"


class Number(int):
    pass


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Nine records, eleven names."""
    return make_dataset(tmp_path_factory.mktemp("attack") / "data", 9, aliases=(2, 7))


@pytest.fixture(autouse=True)
def _no_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("drop_last", ["no", "", 0, 1, None, np.True_, [True]])
def test_drop_last_is_a_truth_value_and_nothing_like_it(dataset, drop_last):
    """Else its state is one that the same sampler refuses, or cannot be written."""
    with pytest.raises(ValueError, match=r"\[E081\] drop_last is True or False"):
        BatchSampler(dataset, batch_size=4, drop_last=drop_last)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.array(2), Number(2)])
def test_numbers_of_other_classes_are_the_same_numbers(dataset, number):
    plain = BatchSampler(dataset, batch_size=2, seed=2, shuffle="window", window_shards=2)
    other = BatchSampler(dataset, batch_size=number, seed=number, shuffle="window", window_shards=number)
    other.set_epoch(number)
    plain.set_epoch(2)
    assert json.dumps(other.state_dict()) == json.dumps(plain.state_dict())
    assert list(other) == list(plain)
    budget = BatchSampler(dataset, max_tokens=Number(9), max_records=number)
    budget.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert list(budget) == list(BatchSampler(dataset, max_tokens=9, max_records=2))


@pytest.mark.parametrize("window", [Word.WINDOW, np.str_("window")])
def test_words_of_other_classes_are_the_same_words(dataset, window):
    plain = BatchSampler(dataset, batch_size=2, shuffle="window", over="names")
    other = BatchSampler(dataset, batch_size=2, shuffle=window, over=Word.NAMES)
    assert json.dumps(other.state_dict()) == json.dumps(plain.state_dict())
    assert list(other) == list(plain)


@pytest.mark.parametrize("name", ["shuffle", "over", "last_step"])
@pytest.mark.parametrize("value", [np.array(["none", "names"]), ["none"], None])
def test_words_that_are_none_are_refused(dataset, name, value):
    with pytest.raises(ValueError, match=rf"\[E081\] {name} is one of"):
        BatchSampler(dataset, batch_size=2, **{name: value})


# ------------------------------------------------------------------------------------------------------------- worlds


def test_a_world_without_a_rank_is_refused(dataset, monkeypatch):
    """Every process would take itself for rank 0."""
    with pytest.raises(ValueError, match=r"\[E081\] a world of 2, .*give rank, or set RANK"):
        BatchSampler(dataset, batch_size=1, world_size=2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"\[E081\] a world of 3"):
        BatchSampler(dataset, batch_size=1)
    assert BatchSampler(dataset, batch_size=1, rank=1).rank == 1
    assert BatchSampler(dataset, batch_size=1, world_size=1).rank == 0
    monkeypatch.setenv("RANK", "2")
    assert BatchSampler(dataset, batch_size=1).rank == 2


def test_a_world_far_too_large_is_refused_at_once(tmp_path, monkeypatch):
    sampler = BatchSampler(make_dataset(tmp_path / "many", 1500), batch_size=1, rank=5, world_size=2**53 - 1)
    seek, calls = sampler._sequence.seek, []

    def counted(at, offset):
        calls.append(offset)
        return seek(at, offset)

    monkeypatch.setattr(sampler._sequence, "seek", counted)
    with pytest.raises(ValueError, match=r"\[E081\] an epoch has 1500 micro-batches for 9007199254740991 ranks"):
        next(iter(sampler))
    assert len(calls) < 100
    with pytest.raises(ValueError, match=r"\[E081\]"):
        BatchSampler(sampler.collection, batch_size=1, rank=5, world_size=2**53)


# ------------------------------------------------------------------------------------------------------------- states


def deep() -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(100_000):
        found = {"version": found}
    return found


DAMAGE = {
    "arrays": np.array([1, 2]),
    "a scalar of numpy": np.int64(0),
    "an array without axes": np.array(0),
    "half a character": "\ud800",
    "depth": deep(),
    "a huge integer": 10**400,
    "an object": object(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("field", ["format", "version", "dataset", "seed", "order", "cursor"])
def test_states_with_anything_in_any_field_are_refused(dataset, field, damage):
    sampler = BatchSampler(dataset, batch_size=4)
    before = sampler.state_dict()
    state = before | {field: DAMAGE[damage]}
    with pytest.raises(ValueError, match=r"\[E085\]") as caught:
        sampler.load_state_dict(state)
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match=r"\[E085\]"):
        iter(sampler).load_state_dict(state | {"iterating": 0})
    assert sampler.state_dict() == before


@pytest.mark.parametrize("state", [None, 0, "", b"", [], (), np.array(0), object()])
def test_what_is_no_dict_is_no_state_of_an_iteration(dataset, state):
    with pytest.raises(ValueError, match=r"\[E085\]"):
        iter(BatchSampler(dataset, batch_size=4)).load_state_dict(state)


@pytest.mark.parametrize("iterating", [{}, {"iterating": True}, {"iterating": DAMAGE["depth"]}])
def test_the_state_of_a_sampler_is_none_of_an_iteration(dataset, iterating):
    sampler = BatchSampler(dataset, batch_size=4)
    with pytest.raises(ValueError, match=r"\[E085\] a state of no iteration"):
        iter(sampler).load_state_dict(sampler.state_dict() | iterating)


# ------------------------------------------------------------------------------------------------------------ threads


def test_a_batch_is_of_its_block_whatever_other_threads_ask_for():
    class Interrupted(FixedCount):
        """Once what is kept was looked at twice, another thread keeps another block."""

        looks = 0

        @property
        def _kept(self):
            self.looks += 1
            return self.slot if self.looks < 3 else ((9, 9), np.array([-1]))

        @_kept.setter
        def _kept(self, value):
            self.slot = value

    def items(epoch, start, stop):
        return np.arange(start, stop)

    blocks = Interrupted(items, length=100, batch_size=10, drop_last=False)
    for _ in range(2):
        blocks.looks = 0
        assert blocks.batch(0, 0, 3).tolist() == list(range(30, 40))


def test_windows_that_another_thread_let_go_of_are_no_error():
    class Raced(dict):
        def __iter__(self):
            found = list(self.keys())
            self.clear()
            return iter(found)

    order = Order(bytes(32), shuffle="window", lengths=[9], ends=lambda _: np.array([3, 6, 9]), window=2)
    order._windows = Raced()
    for epoch in range(3):
        assert sorted(order.items(epoch, 0, 9).tolist()) == list(range(9))


# -------------------------------------------------------------------------------------------------------------- ranks


class WordlessError(RuntimeError):
    def __str__(self) -> str:
        raise UnicodeError


GATHERED = {
    "bytes": (lambda own: b"abc", "E081"),
    "an array": (lambda own: [np.array([1, 2, 3]), own], "E087"),
    "a tensor": (lambda own: [own, torch.zeros(3)], "E087"),
    "an array in a message": (lambda own: [(own[0], np.zeros(2), *own[2:]), own], "E087"),
    "arrays alone": (lambda own: [np.array([1, 2, 3])], "E081"),
    "too little": (lambda own: [own, own[:2]], "E087"),
    "less": (lambda own: [own, (*own[:2], "error")], "E087"),
    "more": (lambda own: [own, (*own, 1)], "E087"),
    "a list in a message": (lambda own: [own, (*own[:2], [1], *own[3:])], "E087"),
}


@pytest.mark.parametrize("gathered", GATHERED)
def test_whatever_a_gather_function_returns_is_judged(dataset, gathered):
    gather, code = GATHERED[gathered]
    with pytest.raises(KVFormatError, match=rf"\[{code}\]"):
        dataset.assert_same_across(gather)
    with pytest.raises(KVFormatError, match=rf"\[{code}\]"):
        open_across(dataset.location, gather)
    with pytest.raises(KVFormatError, match=rf"\[{code}\]"):
        next(lockstep([1], gather))


def test_an_error_that_has_no_text_is_told_all_the_same():
    told = []

    def gather(own):
        told.append(own)
        return [own]

    def broken():
        yield 1
        raise WordlessError

    batches = lockstep(broken(), gather)
    assert next(batches) == 1
    with pytest.raises(WordlessError):
        next(batches)
    assert told[1][2:] == ("error", "WordlessError: without a text", None, None)
