"""Slabs summed as they arrive: wherever a record is cut, all of it is proved, and what came whole is hashed once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import kvformat
from kvformat.errors import DamageError, FormatError
from kvformat.read import copyable, fetched
from kvformat.spec import digests
from kvformat.storage import obtaining
from kvformat.testing.memory_store import MemoryStore
from kvformat.testing.vectors import VALID
from tests.read.remote import FlippingStore, opened, remote_over
from tests.read.test_remote import uniform
from tests.read.test_round_trip import check, check_copies

REQUESTS = [97, 1000, 8 << 20]


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(fetched, "WORTH_NBYTES", 0)


@pytest.fixture
def hashed(monkeypatch):
    """Bytes hashed as slabs, call by call."""
    found = []
    real = digests.slab_sums
    monkeypatch.setattr(digests, "slab_sums", lambda data, rows: (found.append(len(data)), real(data, rows))[1])
    return found


def fetch(dataset, number):
    """All of a record."""
    return dataset.read_into(number, memoryview(bytearray(dataset[number].nbytes)))


def summed(files, number):
    return [placed for placed in files.placement(number).tensors.values() if placed.bit >= 0]


@pytest.mark.parametrize("request_nbytes", REQUESTS)
@pytest.mark.parametrize("name", VALID)
def test_wherever_a_record_is_cut(name, request_nbytes, base) -> None:
    store = MemoryStore(objects=base(name).files())
    dataset = kvformat.open(remote_over(store, request_nbytes=request_nbytes))
    check_copies(VALID[name], dataset)
    check(VALID[name], dataset)


@pytest.mark.parametrize("request_nbytes", REQUESTS)
def test_damage_anywhere_on_the_way_is_fetched_again_and_in_the_store_refused(request_nbytes, base) -> None:
    files = base("uniform-bf16")
    name = files.shard_paths()[0]
    sound = dict(files.files())
    for placed in (*summed(files, 0), files.placement(0).sums):
        for at in {placed.offset, placed.offset + placed.nbytes // 2, placed.offset + placed.nbytes - 1}:
            store = FlippingStore(dict(sound))
            dataset = kvformat.open(remote_over(store, request_nbytes=request_nbytes))
            store.flips[name] = files.locate(0)[1] + at, 1
            fetch(dataset, 0)
            assert store.flips[name][1] == 0
            check(VALID["uniform-bf16"], dataset)

            store.flips[name] = files.locate(0)[1] + at, 1 << 30
            dataset = kvformat.open(remote_over(store, request_nbytes=request_nbytes))
            with pytest.raises(DamageError) as caught:
                fetch(dataset, 0)
            code = {"sums": "E070", "token_ids": "E073"}.get(placed.name, "E072")
            assert (caught.value.code, caught.value.record) == (code, 0)
            assert caught.value.layer == ((at - placed.offset) // placed.slab_nbytes if code == "E072" else None)


def test_slabs_in_parts_between_slabs_that_came_whole(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(copyable, "_GROUP_NBYTES", 1)
    objects = uniform(tmp_path, tokens=[64], layers=12)
    shard = next(name for name in objects if name.startswith("shards/"))
    sound = kvformat.open(remote_over(MemoryStore(objects=objects)))
    placed, start = sound[0].placement.tensors["v"], sound.shards.holding(0).origin
    for layer in range(12):
        store = FlippingStore(dict(objects))
        store.flips[shard] = start + placed.offset + layer * placed.slab_nbytes, 1 << 30
        dataset = kvformat.open(remote_over(store, request_nbytes=3 * placed.slab_nbytes))
        with pytest.raises(DamageError, match="E072") as caught:
            fetch(dataset, 0)
        assert caught.value.layer == layer


def test_exchanged_tensors_are_named(base) -> None:
    files = base("uniform-bf16")
    k, v = files.tensor(0, "k"), files.tensor(0, "v")
    k[:], v[:] = v.copy(), k.copy()
    with pytest.raises(DamageError, match="E071"):
        fetch(opened(files)[0], 0)


def test_scales_are_looked_at_as_well(base) -> None:
    files = base("int8-with-scales")
    files.tensor(0, "k_scale")[:] = 0
    files.reseal("sums")
    with pytest.raises(FormatError, match="E074"):
        fetch(opened(files)[0], 0)


def test_what_came_whole_is_hashed_once(base, hashed) -> None:
    files = base("uniform-bf16")
    dataset, _ = opened(files)
    fetch(dataset, 0)
    assert sum(hashed) == sum(placed.nbytes for placed in summed(files, 0))
    before = len(hashed)
    dataset[0].component("k")
    assert len(hashed) == before
    assert dataset.verify_s > 0


def test_what_came_in_parts_is_hashed_in_the_end(base, hashed) -> None:
    files = base("uniform-bf16")
    dataset = kvformat.open(remote_over(MemoryStore(objects=files.files()), request_nbytes=97))
    fetch(dataset, 0)
    assert sum(hashed) == sum(placed.nbytes for placed in summed(files, 0))


def test_what_stands_in_its_place_is_summed_not_what_came(base, monkeypatch) -> None:
    damaged = []
    slab = base("uniform-bf16").placement(0).tensors["k"].slab_nbytes

    def copyto(into, data):
        np.copyto(into, data)
        if len(data) % slab == 0 and not damaged:
            into[0] ^= 1
            damaged.append(len(data))

    fake = SimpleNamespace(copyto=copyto, frombuffer=np.frombuffer, empty=np.empty, uint8=np.uint8)
    dataset, store = opened(base("uniform-bf16"))
    assert dataset[0].names  # what is fetched next is the record
    monkeypatch.setattr(obtaining, "np", fake)
    fetch(dataset, 0)
    assert damaged
    shard = dataset.shards.holding(0).row.path
    assert [name for verb, name in store.calls if verb == "get"].count(shard) == 2
    check(VALID["uniform-bf16"], dataset)


def test_nothing_is_hashed_where_nothing_is_verified(base, hashed) -> None:
    dataset, _ = opened(base("uniform-bf16"), verify="off")
    fetch(dataset, 0)
    assert hashed == []
