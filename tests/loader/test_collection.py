"""Datasets numbered through."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.loader.collection import MAX_CYCLE, Collection, as_collection, collection_id, concat, mix
from tests.loader.made import make_dataset, num_tokens

VECTORS = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "v1"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("collection")


@pytest.fixture(scope="module")
def first(home):
    return make_dataset(home / "first", 9, aliases=(2, 2, 8))


@pytest.fixture(scope="module")
def second(home):
    return make_dataset(home / "second", 6, slots=5)


def every(count):
    return np.arange(count, dtype=np.int64)


def test_one_dataset_is_itself(first):
    collection = as_collection(first)
    assert (collection.id, collection.weights, len(collection), collection.num_names) == (first.id, None, 9, 12)
    assert as_collection(collection) is collection
    assert as_collection(first.location).id == first.id
    assert as_collection(Path(first.location)).resolve(8)[1] == 8
    assert concat([first]).id == first.id


def test_records_and_names_are_numbered_through(first, second):
    collection = concat([first, second.location])
    assert (len(collection), collection.num_names) == (15, 18)
    for record in range(15):
        dataset, number = collection.resolve(record)
        assert (dataset.id, number) == ((first.id, record) if record < 9 else (second.id, record - 9))
    assert collection.tokens(every(15)[::-1]).tolist() == [num_tokens(n) for n in [*range(9), *range(6)]][::-1]
    records = collection.records_of(every(18)).tolist()
    names = [collection.name(slot) for slot in range(18)]
    listed = [*first.names(), *((name, record + 9) for name, record in second.names())]
    assert list(zip(names, records, strict=True)) == listed
    assert names[2:5] == ["first-2", "first-2-again-0", "first-2-again-1"]


def test_shards_end_where_the_next_begin(first, second):
    collection = concat([first, second])
    assert collection.shard_ends(0, names=False).tolist() == [4, 8, 9]
    assert collection.shard_ends(0, names=True).tolist() == [6, 10, 12]
    assert collection.shard_ends(1, names=True).tolist() == [5, 6]


@pytest.mark.parametrize("wrong", [-1, 15, 1 << 40])
def test_numbers_beyond_are_refused(first, second, wrong):
    collection = concat([first, second])
    for look_up in (
        lambda: collection.resolve(wrong),
        lambda: collection.tokens(np.array([0, wrong])),
        lambda: collection.records_of(np.array([wrong + 3 if wrong > 0 else wrong])),
        lambda: collection.name(wrong + 3 if wrong > 0 else wrong),
    ):
        with pytest.raises(LookupError, match=r"\[E080\]"):
            look_up()


@pytest.mark.parametrize("case", ["tables-in-parts", "aliases-and-unicode-names", "several-shards"])
def test_looking_up_many_agrees_with_looking_up_one(case):
    dataset = kvformat.open(VECTORS / "valid" / case / "dataset")
    collection = as_collection(dataset)
    index = dataset.index
    names = list(dataset.names())
    mixed = np.random.default_rng(0).permutation(len(names))
    assert collection.records_of(mixed).tolist() == [names[slot][1] for slot in mixed.tolist()]
    assert [collection.name(slot) for slot in range(len(names))] == [name for name, _ in names]
    records = np.random.default_rng(1).permutation(len(dataset))
    assert collection.tokens(records).tolist() == [dataset[n].num_tokens for n in records.tolist()]
    rows = [index.rows.locate(record) for record in records.tolist()]
    assert index.dims_of(records).tolist() == [columns.arrays["dims"][row].tolist() for columns, row in rows]
    starts = [index.shard(ordinal).first for ordinal in range(dataset.manifest.totals.shards)]
    assert index.shard_starts().tolist() == starts
    firsts = [next(slot for slot, (_, record) in enumerate(names) if record == first) for first in starts]
    assert collection.shard_ends(0, names=True).tolist() == [*firsts[1:], len(names)]
    assert index.dims_of(every(0)).shape == (0, dataset.num_dims)


def open_all(dataset):
    """What a sampler with windows and a token budget touches."""
    collection = as_collection(dataset)
    for names in (False, True):
        collection.shard_ends(0, names=names)
    collection.records_of(every(collection.num_names))
    collection.tokens(every(len(collection)))


@pytest.mark.parametrize(
    "case",
    ["E053-no-tokens", "E053-tokens-beyond", "E052-beyond-the-records", "E052-first-is-one", "E056-record-beyond"],
)
def test_damage_that_leads_outside_is_refused(case):
    with pytest.raises(kvformat.errors.FormatError, match=case[:4]):
        open_all(kvformat.open(VECTORS / "invalid" / case / "dataset"))


def test_ids(first, second):
    both = concat([first, second])
    assert both.id == collection_id([first.id, second.id]) != collection_id([second.id, first.id])
    assert both.id == mix({first: 1, second: 2}).id
    assert concat([both, first]).id == collection_id([first.id, second.id, first.id])


def test_weights_are_reduced(first, second):
    assert mix({first: 4, second: 6}).weights == (2, 3)
    assert mix([(first.location, 5)]).weights == (1,)
    assert mix({first: MAX_CYCLE - 1, second: 1}).weights == (MAX_CYCLE - 1, 1)
    assert mix({first: 2 * MAX_CYCLE - 2, second: 2}).weights == (MAX_CYCLE - 1, 1)


@pytest.mark.parametrize("weight", [0, -1, 1.5, "2", None, True, MAX_CYCLE])
def test_other_weights_are_refused(first, second, weight):
    with pytest.raises(ValueError, match=r"\[E081\].*weights"):
        mix([(first, 1), (second, weight)])


@pytest.mark.parametrize(
    "make",
    [
        lambda first: concat([]),
        lambda first: concat(first.location),
        concat,
        lambda first: concat(5),
        lambda first: concat([5]),
        lambda first: mix([]),
        lambda first: mix([first]),
        lambda first: mix({concat([first]): 1}),
        lambda first: concat([mix({first: 1})]),
        lambda first: as_collection(3),
        lambda first: as_collection(None),
    ],
)
def test_other_arguments_are_refused(first, make):
    with pytest.raises(ValueError, match=r"\[E081\]"):
        make(first)


def test_other_schemas_are_refused(first, home):
    other = make_dataset(home / "layers", 2, layers=2)
    with pytest.raises(ValueError, match=r"\[E081\].*schemas"):
        concat([first, other])


def test_other_known_contexts_are_refused_by_their_fields():
    """Fault 20: keys and values of two models in one batch."""
    one, other, unknown = (
        VECTORS / "valid" / case / "dataset" for case in ("model-context", "rope-kinds", "two-shards")
    )
    with pytest.raises(kvformat.errors.IdentityError, match=r"\[E083\].*rope"):
        concat([one, other])
    with pytest.raises(kvformat.errors.IdentityError, match=r"\[E083\]"):
        mix({one: 1, other: 1})
    assert len(concat([one, unknown, one])) == 7


def test_a_collection_pickles_to_locations(first, second):
    collection = mix({first: 2, second: 1})
    data = pickle.dumps(collection)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert isinstance(again, Collection)
    assert (again.id, again.weights, len(again)) == (collection.id, collection.weights, len(collection))


def test_repr(first, second):
    assert "one dataset (9 records" in repr(as_collection(first))
    assert "2 datasets (15 records" in repr(mix({first: 1, second: 1}))
    assert "weights (1, 1)" in repr(mix({first: 1, second: 1}))
