"""What people new to it do wrong is refused with what to do instead, and never leads to other data than was meant."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import kvformat
from kvformat.errors import IdentityError, KVFormatWarning, LookupFailedError, UsageError
from kvformat.loader import BatchSampler, Collate, KVDataset, KVLoader, LayerStager, Packed, gather, mix
from tests.loader.made import make_dataset


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    home = tmp_path_factory.mktemp("mistakes")
    return [make_dataset(home / name, count) for name, count in (("first", 6), ("second", 4))]


def test_a_sampler_of_another_dataset(two) -> None:
    sampler = BatchSampler(two[0], batch_size=2)
    wrong = DataLoader(KVDataset(two[1]), batch_sampler=sampler, collate_fn=Collate())
    with pytest.raises(UsageError, match=r"\[E081\].*give both the same"):
        list(wrong)
    with pytest.raises(UsageError, match=r"\[E081\].*give both the same"):
        KVLoader(two[1], sampler)
    with pytest.raises(UsageError, match=r"\[E081\].*give both the same"):
        list(KVLoader(two[1], list(sampler)))  # nor by way of something that wraps it


def test_a_state_after_a_batch_of_another_dataset(two) -> None:
    training, validation = (KVLoader(dataset, BatchSampler(dataset, batch_size=2)) for dataset in two)
    batch = next(iter(validation))
    for sampler in (training, training.sampler):
        with pytest.raises(UsageError, match=r"\[E081\].*give one of its own"):
            sampler.state_dict(after=batch)
    assert validation.state_dict(after=batch)["dataset"] == two[1].id


def test_a_loop_over_epochs_that_forgets_where_it_resumed(two) -> None:
    sampler = BatchSampler(two[0], batch_size=2)
    sampler.set_epoch(1)
    state = sampler.state_dict(after=next(iter(sampler)))
    resumed = BatchSampler(two[0], batch_size=2)
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.set_epoch(1)
    with pytest.warns(KVFormatWarning, match=r"\[W004\].*epoch 0 leaves the state that was loaded, in epoch 1"):
        resumed.set_epoch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.set_epoch(2)  # it was said
        resumed.load_state_dict(state)
        list(resumed)
        resumed.set_epoch(0)  # it was gone on from


def test_a_batch_sampler_given_as_a_sampler(two) -> None:
    with pytest.raises(UsageError, match=r"\[E081\].*batch_sampler="):
        list(DataLoader(KVDataset(two[0]), sampler=BatchSampler(two[0], batch_size=2), collate_fn=Collate()))


def test_a_dataset_that_is_no_kvdataset(two) -> None:
    with pytest.raises(UsageError, match=r"\[E081\].*KVDataset\(dataset\)"):
        list(DataLoader(two[0], batch_size=2, collate_fn=Collate()))


def test_a_class_in_place_of_an_object(two) -> None:
    with pytest.raises(UsageError, match=r"\[E081\].*write Packed\(\)"):
        gather(two[0], records=[0], layout=Packed)
    with pytest.raises(UsageError, match=r"\[E081\].*collate_fn=Collate\(\)"):
        list(DataLoader(KVDataset(two[0]), batch_size=2, collate_fn=Collate))


def test_a_loader_in_place_of_a_batch(two) -> None:
    with pytest.raises(UsageError, match=r"\[E081\] expected a batch, found KVLoader"):
        LayerStager(KVLoader(two[0], BatchSampler(two[0], batch_size=2)), "cpu")


def test_token_ids_of_one_document_that_are_not_in_a_list(two) -> None:
    with pytest.raises(UsageError, match=r"\[E081\].*list of documents"):
        gather(two[0], token_ids=[1, 2, 3])


def test_a_role_in_place_of_a_component(two) -> None:
    batch = gather(two[0], records=[0])
    for tensors in (batch, batch.components):
        with pytest.raises(LookupFailedError, match=r"\[E082\] no 'key'.*k, v"):
            tensors["key"]


def test_integers_of_numpy_and_torch(two) -> None:
    for numbers in (np.array([2, 0]), torch.tensor([2, 0])):
        assert gather(two[0], records=numbers).records == [2, 0]
    assert mix([(two[0], np.int64(6)), (two[1], 2)]).weights == (3, 1)


def test_a_collective_of_torch_itself(two) -> None:
    def fills(object_list, obj) -> None:
        raise AssertionError

    with pytest.raises(UsageError, match=r"\[E081\].*takes an object and returns those of all ranks.*\[None\]"):
        two[0].assert_same_across(fills)


def test_a_shortened_id(two) -> None:
    with pytest.raises(IdentityError, match=r"\[E007\].*64 digits"):
        kvformat.open(two[0].location, expected_id=two[0].id[:16])


def test_ranks_count_from_0(two) -> None:
    with pytest.raises(UsageError, match=r"\[E081\] rank 2 of a world of 2, where ranks count from 0"):
        BatchSampler(two[0], batch_size=1, rank=2, world_size=2)


def test_a_sampler_says_what_it_is(two) -> None:
    assert repr(BatchSampler(two[0], batch_size=2, seed=9)) == (
        "<kvformat.loader.BatchSampler batch_size=2, over=names, shuffle=global, seed=9, rank 0 of 1>"
    )
