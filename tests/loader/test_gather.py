"""Records looked up by what a trainer knows them by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import KVFormatError, LookupFailedError, UsageError
from kvformat.loader.collection import concat
from kvformat.loader.dataset import KVDataset
from kvformat.loader.layouts import Packed
from kvformat.loader.lookup import gather
from kvformat.testing.vectors import COLLIDING_NAMES, VALID
from tests.loader.made import make_dataset
from tests.loader.making import assert_same, expected_of_names, open_case


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("gather")


@pytest.fixture(scope="module")
def dataset(home):
    """Thirty records with aliases for some; record n holds n and is named data-n."""
    return make_dataset(home / "data", 30, aliases=(3, 3, 17))


@pytest.fixture(scope="module")
def other(home):
    return make_dataset(home / "more", 5)


def values(batch) -> list[float]:
    """The value that each record is full of."""
    found = [part.unique().tolist() for part in batch["k"].split(batch.num_tokens, 1)]
    assert all(len(part) == 1 for part in found)
    return [part[0] for part in found]


def test_by_name(dataset):
    """In the order given, repeats and other names of one record included."""
    names = ["data-7", "data-3-again-1", "data-7", "data-3", "data-29", "data-0"]
    batch = gather(dataset, names)
    assert batch.records == [7, 3, 7, 3, 29, 0] == values(batch)
    assert batch.num_tokens == [7 % 5 + 1, 4, 3, 4, 5, 1]
    assert gather(dataset, tuple(names)).records == gather(dataset, np.array(names)).records == batch.records
    assert torch.equal(gather(KVDataset(dataset), names)["v"], -batch["k"])


def test_by_number_document_and_token_ids(dataset):
    numbers = [12, 0, 12, 29]
    documents = [dataset[number].document for number in numbers]
    ids = [[number + 1] * (number % 5 + 1) for number in numbers]
    arrays = [np.array(ids[0], np.int64), torch.tensor(ids[1]), tuple(ids[2]), np.array(ids[3], np.int32)]
    found = [
        gather(dataset, records=numbers),
        gather(dataset, records=np.array(numbers)),
        gather(dataset, documents=documents),
        gather(dataset, token_ids=ids),
        gather(dataset, token_ids=arrays),
    ]
    for batch in found:
        assert batch.records == numbers == values(batch)
        assert batch.documents == documents


def test_names_and_tables_in_parts(home):
    """Names of any characters, and look-up tables of several parts."""
    for name in ("aliases-and-unicode-names", "tables-in-parts"):
        dataset = open_case(VALID[name], home / name)
        pairs = [(given, number) for number, entry in enumerate(VALID[name].entries) for given in entry.names]
        batch = gather(dataset, [given for given, _ in pairs])
        assert_same(batch, expected_of_names(name, [number for _, number in pairs], Packed()))


def test_names_of_one_key(tmp_path):
    """Other names have the same key: the first one found is not the one."""
    all_names = [name for pair in COLLIDING_NAMES for name in pair]
    of = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=2)
    with kvformat.create(tmp_path / "data", schema=of, context=kvformat.Context.unknown()) as writer:
        for number, name in enumerate(all_names):
            value = torch.full((1, 1, 1, 2), float(number), dtype=torch.bfloat16)
            writer.add(name, {"k": value, "v": value}, token_ids=[number])
    dataset = kvformat.open(tmp_path / "data")
    for names in (all_names, all_names[::-1]):
        assert gather(dataset, names).records == [all_names.index(name) for name in names]
    assert dataset.index.find_names([all_names[1], "x", all_names[0]]) == [1, None, 0]


def test_of_several_datasets(dataset, other):
    """The first that has it."""
    both = concat([dataset, other])
    batch = gather(both, ["more-4", "data-29", "more-0"])
    assert batch.records == [34, 29, 30]
    assert values(batch) == [4, 29, 0]
    assert gather(both, documents=[dataset[2].document, dataset[20].document]).records == [2, 20]
    assert gather(concat([other, dataset]), documents=[dataset[2].document, dataset[20].document]).records == [2, 25]
    assert values(gather(both, records=[33, 3])) == [3, 3]
    with pytest.raises(LookupFailedError, match=r"2 of 3 names .*: 'more-5', 'data-30'"):
        gather(both, ["more-5", "more-4", "data-30"])


@pytest.mark.parametrize(
    ("kind", "keys", "message", "record"),
    [
        ("names", ["data-1", "x", "data-2", "y"], "2 of 4 names are not in the dataset: 'x', 'y'", "x"),
        ("names", [f"n{n}" for n in range(12)], "12 of 12 names .*'n8', 'n9' and 2 more", "n0"),
        ("names", [f"n{n}" for n in range(10)], "10 of 10 names .*'n8', 'n9'", "n0"),
        ("names", ["data-1", "\udcff"], "1 of 2 names", "\udcff"),
        ("records", [0, 30, -1], "2 of 3 records .*: 30, -1", 30),
        ("documents", [bytes(range(32))], "1 of 1 documents .*: 0001020304050607", None),
        ("token_ids", [[1], [1, 2, 3]], "1 of 2 token_ids .*: a document of 3 tokens", None),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_named(dataset, kind, keys, message, record):
    with pytest.raises(LookupFailedError, match=message) as caught:
        gather(dataset, **{kind: keys})
    assert (caught.value.code, caught.value.record, caught.value.path) == ("E080", record, dataset.location)
    assert ("more" in str(caught.value)) == (len(keys) > 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give one of names, documents, token_ids, records"),
        ({"names": ["a"], "records": [1]}, r"give one of .*found \['names', 'records'\]"),
        ({"names": []}, "at least one record"),
        ({"records": np.empty(0, np.int64)}, "at least one record"),
        ({"names": "data-1"}, "names is a sequence, found one str"),
        ({"documents": b"x" * 32}, "documents is a sequence, found one bytes"),
        ({"names": [1]}, "a name is a string, found int"),
        ({"names": [b"data-1"]}, "a name is a string, found bytes"),
        ({"documents": ["x" * 32]}, "a document digest is 32 bytes"),
        ({"documents": [b"x"]}, "a document digest is 32 bytes"),
        ({"records": ["1"]}, "a record number is an integer, found str"),
        ({"records": [1.0]}, "a record number is an integer, found float"),
        ({"records": [True]}, "a record number is an integer, found bool"),
        ({"records": 3}, "records is a sequence, found one int"),
        ({"names": iter(["data-1"])}, "names is a sequence, found one list_iterator"),
        ({"records": [1], "layout": "packd"}, "layout must be"),
    ],
)
def test_refused(dataset, given, message):
    with pytest.raises(UsageError, match=message) as caught:
        gather(dataset, **given)
    assert caught.value.code == "E081"


def test_no_location(dataset):
    """Opening is not for every batch."""
    for source in (dataset.location, None, 3, [dataset]):
        with pytest.raises(KVFormatError, match="open it once, and keep it") as caught:
            gather(source, ["data-1"])
        assert caught.value.code == "E081"


def test_pinned(dataset, fake_pinned):
    batch = gather(dataset, records=[1, 2], pin_memory=True)
    assert values(batch) == [1, 2]
    assert len(fake_pinned) == 1
