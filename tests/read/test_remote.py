"""A dataset in an object store is read as if it were on disk: same values, same refusals, few requests."""

from __future__ import annotations

import threading
from math import ceil

import pytest
import torch

import kvformat
from kvformat.errors import DamageError, DatasetNotFoundError, FormatError, IdentityError, KVFormatError
from kvformat.storage import remote_read
from kvformat.storage.cache_options import CacheOptions
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.memory_store import MemoryStore
from kvformat.testing.vectors import VALID
from tests.read.remote import FlippingStore, opened, remote_over
from tests.read.test_round_trip import check, check_copies, stored

UNITS = ["none", "record", "shard"]


def options_of(unit: str, tmp_path, **more) -> dict:
    if unit == "none":
        return more
    return {
        "cache": CacheOptions(dir=str(tmp_path / "cache"), max_nbytes=1 << 28, unit=unit, min_free_nbytes=0),
        **more,
    }


def gets(store: MemoryStore, prefix: str = "") -> list[str]:
    return [name for verb, name in store.calls if verb in ("get", "get_all") and name.startswith(prefix)]


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", VALID)
def test_every_kind_of_dataset_is_read_alike(name: str, unit: str, verify: str, io: str, base, tmp_path) -> None:
    dataset, store = opened(base(name), verify=verify, io=io, **options_of(unit, tmp_path))
    check(VALID[name], dataset)
    check_copies(VALID[name], dataset)
    again = kvformat.open(remote_over(store), verify=verify, io=io, **options_of(unit, tmp_path))
    check_copies(VALID[name], again)
    check(VALID[name], again)
    assert not [call for call in store.calls if call[0] in ("list", "put", "create", "delete", "begin")]


def test_opening_is_two_reads_and_index_parts_come_as_they_are_needed(base) -> None:
    """And the size of the root is asked for: it has no digest that would tell an answer that was cut short."""
    dataset, store = opened(base("tables-in-parts"))
    assert sorted(verb for verb, _ in store.calls) == ["get_all", "get_all", "stat"]
    assert {name.partition("/")[0] for _, name in store.calls} == {"kvformat.json", "manifest"}
    dataset[0].component("k")
    first = set(gets(store, "index/"))
    assert 0 < len(first) < sum(len(dataset.manifest.parts(table)) for table in ("shards", "rows", "names"))
    dataset[0].component("v")
    assert len(gets(store, "index/")) == len(first)


def test_a_cache_is_asked_before_the_store(base, tmp_path) -> None:
    for unit in ("record", "shard"):
        options = options_of(unit, tmp_path / unit)
        dataset, store = opened(base("several-shards"), **options)
        everything = [record.component("k").clone() for record in dataset]
        store.calls.clear()
        again = kvformat.open(remote_over(store), **options)
        for record, known in zip(again, everything, strict=True):
            assert torch.equal(record.component("k"), known)
        assert set(gets(store)) == {"kvformat.json", next(n for n in store.objects if n.startswith("manifest/"))}


def test_a_slab_is_fetched_alone(tmp_path) -> None:
    files = uniform(tmp_path, tokens=[512], layers=8)
    dataset, store = opened(files)
    found = dataset[0].slab("key", layer=3)
    assert found.shape == (512, 2, 16)
    assert len(gets(store, "shards/")) <= 2
    holder = dataset.shards.open_shards()[0]
    assert found.nbytes <= holder.held_nbytes <= found.nbytes + 4096
    dataset[0].component("k")
    dataset[0].component("v")
    assert holder.held_nbytes == dataset[0].nbytes


def test_small_neighbours_come_in_one_request(tmp_path) -> None:
    files = uniform(tmp_path, tokens=[3] * 200, layers=2)
    dataset, store = opened(files)
    bits = (1 << len(dataset.slabs)) - 1
    wanted = [(name, [(0, count)]) for name, count in dataset.slabs.items()]
    places = dataset.places(list(range(200)), bits, wanted)
    assert all(place[1] is not None for place in places)
    assert len(gets(store, "shards/")) <= 20


def test_large_records_come_in_requests_of_the_size_asked_for(tmp_path) -> None:
    files = uniform(tmp_path, tokens=[4096], layers=8)
    store = MemoryStore(objects=files)
    dataset = kvformat.open(remote_over(store, request_nbytes=1 << 20))
    nbytes = dataset[0].nbytes
    dataset.read_into(0, memoryview(bytearray(nbytes)))
    assert len(gets(store, "shards/")) <= ceil(nbytes / (1 << 20)) + 1


def test_threads_that_want_a_shard_wait_for_one_that_fetches_and_proves_it(base, monkeypatch, tmp_path) -> None:
    hashed: list[int] = []
    real = remote_read.sha256_of
    monkeypatch.setattr(remote_read, "sha256_of", lambda file, nbytes: (hashed.append(nbytes), real(file, nbytes))[1])
    begun, go = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def get(self, name, start, nbytes, *, timeout_s):
            if name.startswith("shards/"):
                begun.set()
                assert go.wait(60)
            return super().get(name, start, nbytes, timeout_s=timeout_s)

    files = base("uniform-bf16").files()
    shard = next(len(data) for name, data in files.items() if name.startswith("shards/"))
    dataset = kvformat.open(remote_over(Slow(objects=files)), **options_of("shard", tmp_path))
    dataset.announce([0], [])
    assert begun.wait(60)
    threads = [threading.Thread(target=lambda: dataset[0].component("k")) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert hashed.count(shard) == 1


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", ["kvformat.json", "manifest/", "index/", "shards/"])
def test_damage_on_the_way_is_fetched_again(kind: str, unit: str, base, tmp_path) -> None:
    files = base("uniform-bf16").files()
    for name in [name for name in files if name.startswith(kind)]:
        store = FlippingStore(dict(files))
        store.flips[name] = len(files[name]) // 2 + 1, 1
        dataset = kvformat.open(remote_over(store), **options_of(unit, tmp_path / name.replace("/", "-")))
        check(VALID["uniform-bf16"], dataset)
        assert (store.flips[name][1] == 0) == (name in gets(store))


@pytest.mark.parametrize("unit", UNITS)
def test_damage_in_the_store_is_refused_and_never_kept(unit: str, base, flip_files, tmp_path) -> None:
    files = flip_files("uniform-bf16", record=0, tensor="k")
    options = options_of(unit, tmp_path)
    dataset, store = opened(files, **options)
    shard = next(name for name in store.objects if name.startswith("shards/"))
    with pytest.raises(DamageError) as caught:
        dataset[0].component("k")
    assert caught.value.code == ("E077" if unit == "shard" else "E072")
    assert caught.value.path == f"memory://test/{shard}"
    if unit != "shard":
        assert (caught.value.record, caught.value.layer) == (0, 0)
        assert "expected" in caught.value.message
        torch.testing.assert_close(dataset[1].component("k"), VALID_DATASET(base)[1].component("k"), rtol=0, atol=0)
    assert len(gets(store, shard)) >= 2
    store.objects.update(base("uniform-bf16").files())
    check(VALID["uniform-bf16"], kvformat.open(remote_over(store), **options))


def VALID_DATASET(base) -> kvformat.Dataset:  # noqa: N802 -- reads like the constant
    return opened(base("uniform-bf16"))[0]


def test_verify_off_gives_what_is_there(base, flip_files) -> None:
    dataset, _ = opened(flip_files("uniform-bf16", record=0, tensor="k"), verify="off")
    found, sound = dataset[0].component("k"), VALID_DATASET(base)[0].component("k")
    assert stored(found) != stored(sound)


@pytest.mark.parametrize("left", [None, -1, 0])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", ["kvformat.json", "manifest/", "index/", "shards/"])
def test_missing_and_cut_objects_have_the_codes_of_missing_and_cut_files(
    kind: str, unit: str, left: int | None, base, tmp_path
) -> None:
    objects = base("two-shards").files()
    name = next(name for name in objects if name.startswith(kind))
    data = objects.pop(name)
    if left is not None:
        objects[name] = data[:left]
    for path, content in objects.items():
        (tmp_path / "local" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / path).write_bytes(content)
    expected = refusal(lambda: touch(kvformat.open(tmp_path / "local")))
    remote = remote_over(MemoryStore(objects=objects))
    found = refusal(lambda: touch(kvformat.open(remote, **options_of(unit, tmp_path))))
    assert found.code == expected.code
    assert type(found) is type(expected)
    assert found.path.startswith("memory://test/")


def test_what_is_not_there_is_not_found() -> None:
    with pytest.raises(DatasetNotFoundError, match="E001"):
        kvformat.open(remote_over(MemoryStore()))


def test_a_pinned_id_is_insisted_on(base) -> None:
    files = base("one-record").files()
    with pytest.raises(IdentityError, match="E007"):
        kvformat.open(remote_over(MemoryStore(objects=files)), expected_id="0" * 64)


@pytest.mark.parametrize("body", [b"", b"<Error><Code>SlowDown</Code></Error>", b"{}"])
def test_another_body_in_place_of_the_root_is_refused(body: bytes, base) -> None:
    files = {**base("one-record").files(), "kvformat.json": body}
    with pytest.raises(FormatError):
        kvformat.open(remote_over(MemoryStore(objects=files)))


# ------------------------------------------------------------------------------------------------------ announcements


def test_what_was_announced_is_fetched_once_and_found(tmp_path) -> None:
    files = uniform(tmp_path, tokens=[5] * 40, layers=2)
    dataset, store = opened(files)
    wanted = [(name, [(0, count)]) for name, count in dataset.slabs.items()]
    assert dataset.announce(range(40), wanted) > 0
    assert dataset.announce(range(40), wanted) == 0
    for number in range(40):
        dataset[number].component("k")
        dataset[number].component("v")
    assert len(gets(store, "shards/")) <= 4


def test_the_failure_of_work_ahead_is_raised_where_the_record_is_used_and_tried_again_later(tmp_path) -> None:
    class Broken(MemoryStore):
        down = True

        def get(self, name, start, nbytes, *, timeout_s):
            if self.down and name.startswith("shards/"):
                tried.set()
                from kvformat.storage.store import DeniedFault

                raise DeniedFault("no")
            return super().get(name, start, nbytes, timeout_s=timeout_s)

    tried = threading.Event()
    store = Broken(objects=uniform(tmp_path, tokens=[5] * 4, layers=2))
    dataset = kvformat.open(remote_over(store))
    wanted = [(name, [(0, count)]) for name, count in dataset.slabs.items()]
    dataset.announce(range(4), wanted)
    assert tried.wait(30)
    with pytest.raises(KVFormatError, match="E207"):
        dataset[0].component("k")
    store.down = False
    for number in range(4):
        while True:
            try:
                dataset[number].component("k")
            except KVFormatError as error:
                assert error.code == "E207"  # from the work ahead, once  # noqa: PT017
            else:
                break


# ------------------------------------------------------------------------------------------------------------ helpers


def uniform(tmp_path, *, tokens: list[int], layers: int) -> dict[str, bytes]:
    """A dataset of K and V, as objects."""
    schema = kvformat.Schema.uniform(num_layers=layers, num_kv_heads=2, head_dim=16)
    path = tmp_path / "made"
    with kvformat.create(path, schema=schema, context=kvformat.Context.unknown()) as out:
        for number, count in enumerate(tokens):
            k = torch.full((layers, count, 2, 16), float(number), dtype=torch.bfloat16)
            out.add(f"r{number}", {"k": k, "v": -k}, token_ids=[number + 1] * count)
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def touch(dataset: kvformat.Dataset) -> None:
    for record in dataset:
        record.component("k")
        assert record.names


def refusal(work) -> KVFormatError:
    with pytest.raises(KVFormatError) as caught:
        work()
    return caught.value


@pytest.fixture
def flip_files(base):
    """The objects of a valid dataset with one bit of a stored tensor flipped."""

    def change(name: str, *, record: int, tensor: str) -> dict[str, bytes]:
        made: DatasetFiles = base(name)
        shard, start = made.locate(record)
        files = dict(made.files())
        path = made.shard_paths()[shard]
        data = bytearray(files[path])
        data[start + made.placement(record).tensors[tensor].offset] ^= 1
        files[path] = bytes(data)
        return files

    return change
