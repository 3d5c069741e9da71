"""What reading from afar must never do: ask for a header, keep what is damaged, try a third time, hang in a child."""

from __future__ import annotations

import asyncio
import http.server
import multiprocessing
import threading
from collections import Counter
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import pytest
import torch

import kvformat
from kvformat.errors import DamageError, DatasetNotFoundError, FormatError, KVFormatError
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.store import Buffer, DeniedFault
from kvformat.testing.memory_store import MemoryStore
from kvformat.testing.vectors import VALID
from tests.read.remote import FlippingStore, remote_over
from tests.read.test_remote import UNITS, flip_files, options_of, uniform
from tests.read.test_round_trip import check

__all__ = ["flip_files"]

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers on loopback have none, and a variable that names some decides which client there is."""
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)


class Moved(FlippingStore):
    """Notes (name, start, bytes) of all that is given out."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.moved: list[tuple[str, int, int]] = []

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        data = super().get(name, start, nbytes, timeout_s=timeout_s)
        self.moved.append((name, start, len(data)))
        return data

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        data = super().get_all(name, max_nbytes=max_nbytes, timeout_s=timeout_s)
        self.moved.append((name, 0, len(data)))
        return data

    def of(self, folder: str) -> list[tuple[str, int, int]]:
        return [one for one in self.moved if one[0].startswith(folder)]


def everything(dataset: kvformat.Dataset):
    return [(name, [(0, count)]) for name, count in dataset.slabs.items()]


def values(dataset: kvformat.Dataset) -> list[bytes]:
    return [record.component(name).view(torch.uint8).numpy().tobytes() for record in dataset for name in ("k", "v")]


def failure_of(work) -> KVFormatError | None:
    """What it raised; None where it went well."""
    try:
        work()
    except KVFormatError as error:
        return error
    return None


# --------------------------------------------------------------------------------------------------- what is fetched


@pytest.mark.parametrize("unit", ["none", "record"])
@pytest.mark.parametrize("announced", [False, True])
def test_headers_of_shards_are_never_read(unit: str, announced: bool, base, tmp_path) -> None:
    for name in VALID:
        store = Moved(dict(base(name).files()))
        dataset = kvformat.open(remote_over(store), **options_of(unit, tmp_path / name))
        assert store.of("shards/") == []
        if announced:
            dataset.announce(range(len(dataset)), everything(dataset))
        check(VALID[name], dataset)
        assert all(start >= dataset.manifest.header_size for _, start, _ in store.of("shards/"))


@pytest.mark.parametrize("unit", ["none", "record"])
@pytest.mark.parametrize("layers", [[0], [3], [6, 7]])
def test_a_few_layers_move_their_bytes_and_the_sums(unit: str, layers: list[int], tmp_path) -> None:
    store = Moved(uniform(tmp_path, tokens=[512], layers=8))
    dataset = kvformat.open(remote_over(store, request_nbytes=1 << 20), **options_of(unit, tmp_path))
    for layer in layers:
        assert torch.equal(dataset[0].slab("key", layer=layer), torch.zeros(512, 2, 16, dtype=torch.bfloat16))
    slab = 512 * 2 * 16 * 2
    # Between a slab and the table of sums may lie what is fetched and dropped, to save a request.
    extents = [(start, start + nbytes) for _, start, nbytes in store.of("shards/")]
    assert len(extents) <= 2 * len(layers)
    assert sum(end - start for start, end in extents) <= len(layers) * (slab + (256 << 10) + 4096)
    assert not dataset.shards.open_shards()[0]._whole


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_parts_of_the_index_are_mapped_from_the_cache(unit: str, base, tmp_path) -> None:
    store = Moved(dict(base("tables-in-parts").files()))
    options = options_of(unit, tmp_path)
    for _ in range(2):
        dataset = kvformat.open(remote_over(store), io="mmap", **options)
        values(dataset)
        opened = [file for file in dataset.index.rows._files if file is not None]
        assert opened
        assert all(file.mapped is not None for file in opened)
        assert all(Path(file.own).parent.parent == tmp_path / "cache" / "entries" for file in opened)
    assert max(Counter(name for name, _, _ in store.of("index/")).values()) == 1


def test_eight_threads_that_need_a_part_of_the_index_fetch_it_once_into_a_cache(base, tmp_path) -> None:
    store = Moved(dict(base("several-shards").files()))
    dataset = kvformat.open(remote_over(store), **options_of("record", tmp_path))
    barrier = threading.Barrier(8)
    expected = values(kvformat.open(remote_over(MemoryStore(objects=dict(store.objects)))))
    found: list[list[bytes]] = []

    def work() -> None:
        barrier.wait(PATIENCE_S)
        found.append(values(dataset))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [expected] * 8
    assert max(Counter(name for name, _, _ in store.of("index/")).values()) == 1
    assert max(Counter(store.of("shards/")).values()) == 1


# ---------------------------------------------------------------------------------------------------- on the wire


class Objects:
    """A server of objects by ``GET`` and ``HEAD``, as plain HTTP and S3 have them; it notes what is asked for."""

    def __init__(self, objects: dict[str, bytes], *, ranges: bool) -> None:
        self.asked: list[tuple[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                outer.asked.append((self.command, self.path))
                data = objects.get(unquote(self.path).removeprefix("/bucket/ds/"))
                wanted = self.headers.get("Range") if ranges else None
                body, code = (b"", 404) if data is None else (data, 200)
                if data and wanted:
                    first, last = wanted.removeprefix("bytes=").split("-")
                    body, code = data[int(first) : int(last) + 1], 206
                self.send_response(code)
                if code == 206:
                    self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{len(data or b'')}")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"abc"')
                self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 -- the name of http.server

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def location_of(kind: str, server: Objects) -> tuple[str, dict]:
    """URL and options of a dataset."""
    if kind == "http":
        return f"{server.endpoint}/bucket/ds", {}
    options = {"key": "k", "secret": "s", "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "eu-1"}}
    return "s3://bucket/ds", {
        "storage_options": options,
        "remote_options": kvformat.RemoteOptions(transport="fsspec" if kind == "s3fs" else kind),
    }


@pytest.mark.parametrize("kind", ["obstore", "s3fs", "http"])
def test_no_request_of_a_reader_is_a_listing(kind: str, base, tmp_path) -> None:
    """Packages list where nobody asked them to: to see whether an object is a directory, or where one is missing."""
    files = base("several-shards").files()
    expected = values(kvformat.open(remote_over(MemoryStore(objects=dict(files)))))
    names = {f"/bucket/ds/{name}" for name in files}
    with Objects(files, ranges=True) as server:
        url, options = location_of(kind, server)
        dataset = kvformat.open(url, **options)
        assert len(server.asked) <= 3
        for unit in UNITS:
            dataset = kvformat.open(url, **options, **options_of(unit, tmp_path / unit))
            assert values(dataset) == expected
        assert {command for command, _ in server.asked} <= {"GET", "HEAD"}
        assert {path.partition("?")[0] for _, path in server.asked} <= names
        assert not [path for _, path in server.asked if "list-type" in path or "prefix=" in path]
        server.asked.clear()
        files.clear()
        with pytest.raises(DatasetNotFoundError, match="E001"):
            kvformat.open(url, **options)
        assert {path.partition("?")[0] for _, path in server.asked} == {"/bucket/ds/kvformat.json"}


@pytest.mark.parametrize("kind", ["obstore", "s3fs", "http"])
def test_a_dataset_is_read_inside_one_event_loop_after_another(kind: str, base) -> None:
    """As in a notebook: the client has a loop of its own, and a loop that is running or gone does not matter."""
    files = base("several-shards").files()
    expected = values(kvformat.open(remote_over(MemoryStore(objects=dict(files)))))
    with Objects(files, ranges=True) as server:
        url, options = location_of(kind, server)

        async def opened() -> kvformat.Dataset:
            dataset = kvformat.open(url, **options)
            dataset[0].component("k")
            return dataset

        async def read(dataset: kvformat.Dataset) -> list[bytes]:
            return values(dataset)

        dataset = asyncio.run(opened())
        assert asyncio.run(read(dataset)) == expected
        assert values(dataset) == expected


def test_a_web_server_without_ranges_gives_right_bytes_or_says_so(base) -> None:
    files = base("several-shards").files()
    expected = values(kvformat.open(remote_over(MemoryStore(objects=dict(files)))))
    with Objects(files, ranges=False) as server:
        url, options = location_of("http", server)
        error = failure_of(lambda: values(kvformat.open(url, **options)) == expected or pytest.fail("wrong bytes"))
        assert error is None or error.code == "E203"


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("unit", UNITS)
def test_damage_is_fetched_twice_and_said_with_place_and_digests(unit: str, base, flip_files, tmp_path) -> None:
    store = Moved(flip_files("uniform-bf16", record=1, tensor="v"))
    dataset = kvformat.open(remote_over(store), **options_of(unit, tmp_path))
    shard = next(name for name in store.objects if name.startswith("shards/"))
    with pytest.raises(DamageError) as caught:
        dataset[1].component("v")
    if unit != "shard":
        assert (caught.value.code, caught.value.record, caught.value.layer) == ("E072", 1, 0)
    assert caught.value.path == f"memory://test/{shard}"
    assert "expected" in caught.value.message
    assert max(Counter(store.of("shards/")).values()) == 2
    kept = [path.name for path in (tmp_path / "cache").rglob("*.entry")]
    assert not [key for key in kept if key[:16] == shard.rpartition("-")[2][:16]]
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("unit", ["none", "record"])
def test_damage_of_a_layer_that_is_fetched_alone(unit: str, announced: bool, tmp_path) -> None:
    """Once on the way is mended; always is refused, with the layer, and a sound neighbour is read."""
    store = Moved(uniform(tmp_path, tokens=[512, 512], layers=8))
    name = next(name for name in store.objects if name.startswith("shards/"))
    sound = kvformat.open(remote_over(store))
    at = sound.manifest.header_size + sound[0]._placement.tensors["k"].offset + 5 * 512 * 2 * 16 * 2 + 77
    for times in (1, 10**6):
        store.flips[name] = at, times
        dataset = kvformat.open(remote_over(store), **options_of(unit, tmp_path / f"{times}"))
        if announced:
            dataset.announce([0, 1], [("k", [(5, 1)])])
        if times == 1:
            assert torch.equal(dataset[0].slab("key", layer=5), torch.zeros(512, 2, 16, dtype=torch.bfloat16))
            assert store.flips[name][1] == 0
        else:
            with pytest.raises(DamageError) as caught:
                dataset[0].slab("key", layer=5)
            assert (caught.value.code, caught.value.record, caught.value.layer) == ("E072", 0, 5)
            assert "expected" in caught.value.message
        assert torch.equal(dataset[1].slab("key", layer=5), torch.ones(512, 2, 16, dtype=torch.bfloat16))
        if not announced:  # else the failure of work ahead may be raised here
            assert torch.equal(dataset[0].slab("key", layer=4), torch.zeros(512, 2, 16, dtype=torch.bfloat16))


def test_ranges_close_together_come_in_one_request() -> None:
    data = bytes(range(256)) * 8192
    for gap, requests in ((0, 1), (4096, 1), (256 << 10, 1), ((256 << 10) + 1, 2)):
        store, found = Moved({"a": data}), bytearray(len(data))

        def write(at: int, piece: Buffer, found: bytearray = found) -> None:
            found[at : at + len(piece)] = piece

        remote_over(store).fetch("a", [(100, 50), (150 + gap, 50)], write)
        assert len(store.moved) == requests, gap
        other = 150 + gap
        assert found == bytes(100) + data[100:150] + bytes(gap) + data[other : other + 50] + bytes(
            len(data) - other - 50
        )


@pytest.mark.parametrize("kind", ["manifest/", "index/"])
@pytest.mark.parametrize("unit", UNITS)
def test_damaged_metadata_is_fetched_twice_and_refused(kind: str, unit: str, base, tmp_path) -> None:
    files = base("uniform-bf16").files()
    for name in [name for name in files if name.startswith(kind)]:
        damaged = bytearray(files[name])
        damaged[len(damaged) // 2] ^= 1
        store = Moved({**files, name: bytes(damaged)})
        options = options_of(unit, tmp_path / name.replace("/", "-"))

        def read(store: Moved = store, options: dict = options) -> None:
            dataset = kvformat.open(remote_over(store), **options)
            values(dataset)
            for record in dataset:
                assert dataset[next(iter(record.names))].index == record.index

        error = failure_of(read)
        if error is None:
            assert name not in {one[0] for one in store.moved}
        else:
            assert isinstance(error, DamageError | FormatError)
            assert (error.code, error.path) == ("E006", f"memory://test/{name}")
            assert Counter(store.of(kind))[name, 0, len(damaged)] == 2


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("announced", [False, True])
def test_a_byte_flipped_on_the_way_once_or_always(unit: str, announced: bool, base, tmp_path) -> None:
    """Anywhere in anything that has a digest: once is mended, always is an error, neither gives a wrong byte."""
    files = base("two-shards").files()
    expected = values(kvformat.open(remote_over(MemoryStore(objects=dict(files)))))
    number = 0
    for name in sorted(files):
        if name == "kvformat.json":
            continue
        size = len(files[name])
        for at in sorted({0, 1, size // 3, size // 2, size - 1, *range(8, size, max(1, size // 7))}):
            for times in (1, 10**6):
                number += 1
                store = Moved(dict(files))
                store.flips[name] = at, times
                options = options_of(unit, tmp_path / f"{number}")

                def read(store: Moved = store, options: dict = options) -> None:
                    dataset = kvformat.open(remote_over(store), **options)
                    if announced:
                        dataset.announce(range(len(dataset)), everything(dataset))
                    assert values(dataset) == expected

                error = failure_of(read)
                if error is not None:
                    assert times > 1, (name, at, error)
                    assert isinstance(error, DamageError | FormatError), (name, at, error)
                    assert error.path == f"memory://test/{name}"


def test_a_root_flipped_on_the_way_is_refused_or_harmless(base) -> None:
    """It has no digest but an id somebody pinned."""
    files = base("one-record").files()
    identity = kvformat.open(remote_over(MemoryStore(objects=dict(files)))).id
    for at in range(len(files["kvformat.json"])):
        store = FlippingStore(dict(files))
        store.flips["kvformat.json"] = at, 10**6
        with pytest.raises(KVFormatError) as caught:
            kvformat.open(remote_over(store))
        assert not caught.value.code.startswith("E2")
        with pytest.raises(KVFormatError, match="E007"):
            kvformat.open(remote_over(store), expected_id=identity)


# ------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_a_limit_below_what_is_read_names_the_number_needed(unit: str, tmp_path) -> None:
    files = uniform(tmp_path, tokens=[3, 900], layers=4)
    needed = max(len(data) for name, data in files.items() if name.startswith("shards/"))
    if unit == "record":
        dataset = kvformat.open(remote_over(MemoryStore(objects=files)))
        dataset[1].component("k")
        needed = dataset.shards.holding(1).file.identity.nbytes
    cache = CacheOptions(dir=str(tmp_path / "cache"), max_nbytes=needed - 1, unit=unit, min_free_nbytes=0)
    dataset = kvformat.open(remote_over(MemoryStore(objects=files)), cache=cache)
    with pytest.raises(KVFormatError, match=f"E210.*at least {needed}") as caught:
        dataset[1].component("k")
    assert caught.value.path.startswith("memory://test/shards/")


@pytest.mark.parametrize("unit", ["record", "shard"])
@pytest.mark.parametrize("left", [0, 1, 4095, 4096, -1])
def test_cached_files_cut_short_are_fetched_again_at_the_next_start(unit: str, left: int, base, tmp_path) -> None:
    store = Moved(dict(base("two-shards").files()))
    options = options_of(unit, tmp_path)
    expected = values(kvformat.open(remote_over(store), **options))
    entries = [path for path in (tmp_path / "cache" / "entries").rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(left if left >= 0 else size + left)
    before = len(store.moved)
    assert values(kvformat.open(remote_over(store), **options)) == expected
    assert len(store.moved) > before + 2
    before = len(store.moved)
    assert values(kvformat.open(remote_over(store), **options)) == expected
    assert {name.partition("/")[0] for name, _, _ in store.moved[before:]} == {"kvformat.json", "manifest"}


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_two_datasets_share_a_cache(unit: str, tmp_path) -> None:
    one = uniform(tmp_path / "one", tokens=[5, 6], layers=2)
    two = uniform(tmp_path / "two", tokens=[6, 5], layers=2)
    assert "kvformat.json" in set(one) & set(two)
    options = options_of(unit, tmp_path)
    stores = [MemoryStore(objects=files) for files in (one, two)]
    expected = [values(kvformat.open(remote_over(store))) for store in stores]
    assert expected[0] != expected[1]
    for _ in range(2):
        assert [values(kvformat.open(remote_over(store), **options)) for store in stores] == expected


# ------------------------------------------------------------------------------------------------------- processes


def _use(record, answers) -> None:
    answers.put(float(record.component("k")[0, 0, 0, 0]))


def test_a_record_of_the_parent_on_its_way_at_a_fork(tmp_path) -> None:
    """A thread of the parent holds what the record waits for, and does not exist in the child."""
    parent = multiprocessing.current_process().pid
    begun, released = threading.Event(), threading.Event()

    class Stalling(MemoryStore):
        def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
            if name.startswith("shards/") and multiprocessing.current_process().pid == parent:
                begun.set()
                released.wait(PATIENCE_S)
            return super().get(name, start, nbytes, timeout_s=timeout_s)

    dataset = kvformat.open(remote_over(Stalling(objects=uniform(tmp_path, tokens=[5] * 4, layers=2))))
    dataset.announce(range(4), everything(dataset))
    records = [dataset[number] for number in range(4)]
    assert begun.wait(PATIENCE_S)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_use, args=(record, answers), daemon=True) for record in records]
    try:
        for child in children:
            child.start()
        found = sorted(answers.get(timeout=PATIENCE_S) for _ in children)
    finally:
        released.set()
        for child in children:
            child.kill()
            child.join(PATIENCE_S)
    assert found == [0.0, 1.0, 2.0, 3.0]
    assert [float(record.component("k")[0, 0, 0, 0]) for record in records] == [0.0, 1.0, 2.0, 3.0]


# ------------------------------------------------------------------------------------------------------- work ahead


@pytest.mark.parametrize("unit", ["none", "record"])
def test_the_cause_of_a_failure_ahead_is_told_once_where_the_record_is_used(unit: str, tmp_path) -> None:
    """Not hidden by another attempt at the use, which would wait for all of a deadline once more."""
    tried = threading.Event()

    class Once(MemoryStore):
        def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
            if name.startswith("shards/") and not tried.is_set():
                tried.set()
                raise DeniedFault("no")
            return super().get(name, start, nbytes, timeout_s=timeout_s)

    dataset = kvformat.open(
        remote_over(Once(objects=uniform(tmp_path, tokens=[5], layers=2))), **options_of(unit, tmp_path)
    )
    dataset.announce([0], everything(dataset))
    assert tried.wait(PATIENCE_S)
    with pytest.raises(KVFormatError, match="E207"):
        dataset[0].component("k")
    assert float(dataset[0].component("k")[0, 0, 0, 0]) == 0.0
