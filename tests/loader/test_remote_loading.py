"""Batches of a remote dataset: the same as of a local one, from few requests, in every kind of process."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import kvformat
from kvformat.errors import DamageError, KVFormatError
from kvformat.loader.collection import mix
from kvformat.loader.dataset import Collate, KVDataset
from kvformat.loader.layouts import Packed
from kvformat.loader.lookup import gather
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.sampler import BatchSampler
from kvformat.read.dataset import Dataset
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.remote import Remote
from tests.loader.folder import folder_remote
from tests.loader.made import make_dataset, num_tokens
from tests.loader.making import flip

RECORDS = 46
UNITS = ["none", "record", "shard"]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("remote") / "data"
    make_dataset(found, RECORDS, aliases=(3, 3, 17), slots=8, layers=4)
    return found


@pytest.fixture
def remote(path, tmp_path) -> Remote:
    return folder_remote(path, tmp_path / "log")


def opened(remote: Remote, unit: str, tmp_path: Path, **options) -> Dataset:
    cache = None
    if unit != "none":
        cache = CacheOptions(dir=str(tmp_path / "cache"), max_nbytes=1 << 28, unit=unit, min_free_nbytes=0)
    return kvformat.open(remote, cache=cache, **options)


def ranges(tmp_path: Path) -> list[str]:
    """Ranges of shards that were read."""
    return [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("shards/")]


def content(batch):
    expected = torch.cat([torch.full((num_tokens(n),), float(n)) for n in batch.records])
    for row in range(len(batch["k"])):
        assert torch.equal(batch["k"][row, :, 0, 0].float(), expected)
    assert torch.equal(batch["v"], -batch["k"])
    assert batch.token_ids.tolist() == (expected.int() + 1).tolist()
    return batch.records, batch.names, batch.cursor


@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
def test_the_batches_of_a_local_dataset(path, remote, unit, shuffle, verify, tmp_path) -> None:
    local, dataset = kvformat.open(path), opened(remote, unit, tmp_path, verify=verify)
    options = {"batch_size": 5, "seed": 3, "shuffle": shuffle}
    expected = [content(batch) for batch in KVLoader(local, BatchSampler(local, **options))]
    for ahead in (0, 1 << 30):
        found = [
            content(batch) for batch in KVLoader(dataset, BatchSampler(dataset, **options), prefetch_nbytes=ahead)
        ]
        assert found == expected


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_a_second_epoch_comes_from_the_cache(remote, unit, tmp_path) -> None:
    dataset = opened(remote, unit, tmp_path)
    sampler = BatchSampler(dataset, batch_size=4, seed=1)
    counts = []
    for _ in range(3):
        for batch in KVLoader(dataset, sampler):
            content(batch)
        counts.append(len(ranges(tmp_path)))
    assert 0 < counts[0] == counts[1] == counts[2]


def test_layers_alone_are_fetched_and_kept(remote, tmp_path) -> None:
    dataset = opened(remote, "record", tmp_path)
    layout = Packed(layers=[1])
    sampler = BatchSampler(dataset, batch_size=4, seed=1)
    for _ in range(2):
        for batch in KVLoader(dataset, sampler, layout=layout):
            assert batch["k"].shape[0] == 1
            expected = torch.cat([torch.full((num_tokens(n),), float(n)) for n in batch.records])
            assert torch.equal(batch["k"][0, :, 0, 0].float(), expected)
        first = len(ranges(tmp_path))
    again = opened(remote, "record", tmp_path)
    for _ in KVLoader(again, BatchSampler(again, batch_size=4, seed=1), layout=layout):
        pass
    assert len(ranges(tmp_path)) == first


def test_neighbours_in_a_window_come_in_few_requests(remote, tmp_path) -> None:
    dataset = opened(remote, "none", tmp_path)
    sampler = BatchSampler(dataset, batch_size=8, seed=1, shuffle="window", window_shards=2)
    assert sum(len(batch) for batch in KVLoader(dataset, sampler)) >= RECORDS
    assert len(ranges(tmp_path)) <= dataset.manifest.totals.shards + 2


def test_work_ahead_is_bounded_in_bytes(remote, tmp_path) -> None:
    """With next to nothing allowed, no more than a batch beyond those being packed is fetched."""
    dataset = opened(remote, "none", tmp_path)
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=1, seed=1), prefetch_nbytes=1, num_threads=1)
    batches = iter(loader)
    next(batches)
    dataset.shards._ahead.forget()
    assert len(dataset.shards._announced) <= 3  # one that is handed over, one to be packed, one looked at
    batches.close()
    assert not dataset.shards._announced


def test_a_mix_of_a_local_and_a_remote_dataset(path, remote, tmp_path) -> None:
    local, dataset = kvformat.open(path), opened(remote, "record", tmp_path)
    both = mix([(local, 1), (dataset, 2)])
    total = 0
    for batch in KVLoader(both, BatchSampler(both, batch_size=6, seed=2)):
        values = batch["k"][0, :, 0, 0].float()
        expected = torch.cat([torch.full((num_tokens(n % RECORDS),), float(n % RECORDS)) for n in batch.records])
        assert torch.equal(values, expected)
        total += len(batch)
    assert total > RECORDS


@pytest.mark.parametrize("unit", UNITS)
def test_damage_in_the_store_ends_the_epoch_with_its_code(path, unit, tmp_path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(path, copied)
    flip(kvformat.open(copied), 20, "k")
    dataset = opened(folder_remote(copied, tmp_path / "log"), unit, tmp_path)
    with pytest.raises(DamageError, match="E077" if unit == "shard" else "E07[0-4]"):
        for batch in KVLoader(dataset, BatchSampler(dataset, batch_size=4, seed=1)):
            content(batch)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("unit", UNITS)
def test_a_used_handle_in_worker_processes(remote, unit, method, tmp_path) -> None:
    dataset = opened(remote, unit, tmp_path)
    dataset[0].component("k")
    source = KVDataset(dataset)
    sampler = BatchSampler(dataset, batch_size=4, seed=5)
    found = [
        content(batch)
        for batch in DataLoader(
            source,
            batch_sampler=sampler,
            num_workers=2,
            multiprocessing_context=method,
            collate_fn=Collate("packed"),
        )
    ]
    expected = [content(batch) for batch in KVLoader(dataset, BatchSampler(dataset, batch_size=4, seed=5))]
    assert found == expected


def _touch(dataset: Dataset, out) -> None:
    try:
        out.put([float(record.component("k")[0, 0, 0, 0]) for record in dataset])
    except KVFormatError as error:
        out.put(error.code)


@pytest.mark.parametrize("unit", UNITS)
def test_a_fork_in_the_middle_of_work_ahead(remote, unit, tmp_path) -> None:
    dataset = opened(remote, unit, tmp_path)
    dataset.announce(range(RECORDS), [(name, [(0, count)]) for name, count in dataset.slabs.items()])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_touch, args=(dataset, answers)) for _ in range(3)]
    for child in children:
        child.start()
    found = [answers.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
    assert found == [[float(n) for n in range(RECORDS)]] * 3


def test_gathering_by_name(remote, tmp_path) -> None:
    dataset = opened(remote, "none", tmp_path)
    names = [next(iter(dataset[n].names)) for n in (9, 2, 30)]
    batch = gather(dataset, names=names, layout="packed")
    assert batch.records == [9, 2, 30]
    content(batch)
