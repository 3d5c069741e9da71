"""Whole datasets read from, and written to, stores and disks that fail: right data or the right error, and no rest."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import socket
import struct
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

import kvformat
from kvformat.errors import KVFormatError, KVFormatWarning, StorageError
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.sampler import BatchSampler
from kvformat.storage.cache import Cache
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.fsspec_store import FsspecStore
from kvformat.storage.obstore_store import ObstoreStore
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import Stat
from kvformat.testing.faulty_store import (
    ERROR_BODY,
    FaultyStore,
    Rule,
    answered,
    conflict,
    denied,
    empty,
    expired,
    flipped,
    flipped_on_the_way,
    full,
    long_by,
    lost,
    missing,
    refused_own,
    reset_after,
    short_by,
    stale,
    throttled,
    timed_out,
)
from kvformat.testing.memory_store import MemoryStore
from tests.loader.folder import folder_remote
from tests.reliability import small
from tests.storage.caching import NBYTES, Origin, content, files, impatient, ledger, options, usage
from tests.storage.clock import Clock
from tests.storage.test_faults_of_stores import DATA, Scripted, ranged

URL = "memory://test"
DEADLINE_S = 100.0
UNITS = ["none", "record", "shard"]


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers on loopback have none, and a variable that names some decides which client there is."""
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)


def remote_of(store, clock: Clock | None = None) -> Remote:
    clock = clock or Clock()
    timing = {"clock": clock, "sleep": clock.sleep}
    return Remote(URL, connect=lambda *_: store, options=RemoteOptions(deadline_s=DEADLINE_S), **timing)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[str, dict[str, bytes]]:
    """Id and files of the small dataset."""
    location = tmp_path_factory.mktemp("published") / "ds"
    with small.create(location) as writer:
        small.fill(writer)
    return writer.id, {p.relative_to(location).as_posix(): p.read_bytes() for p in location.rglob("*") if p.is_file()}


def cache_of(unit: str, directory: Path, max_nbytes: int = 1 << 28) -> CacheOptions | None:
    if unit == "none":
        return None
    return CacheOptions(dir=str(directory), max_nbytes=max_nbytes, unit=unit, min_free_nbytes=0)


def check_records(dataset: kvformat.Dataset, numbers=None) -> None:
    for number in range(len(dataset)) if numbers is None else numbers:
        components, token_ids = small.tensors(number)
        for name, found in components.items():
            assert dataset[number].component(name).numpy().tobytes() == found.tobytes()
        assert dataset[number].extra("token_ids").tolist() == token_ids.tolist()


# ----------------------------------------------------------------------------------------------------------- reading

MENDS = {
    "a storm of 503": (throttled(), 4),
    "timeout": (timed_out(), 2),
    "reset after 0": (reset_after(0), 2),
    "reset after 7": (reset_after(7), 1),
    "short": (short_by(1), 1),
    "long": (long_by(1), 1),
    "xml": (answered(ERROR_BODY), 1),
    "empty": (empty(), 2),
    "expired": (expired(), 1),
    "flipped": (flipped(1), 1),
}
LASTS = {
    "404": (missing(), {"E001", "E002"}),
    "403": (denied(), {"E207"}),
    "503": (throttled(), {"E208"}),
    "timeout": (timed_out(), {"E208"}),
    "reset": (reset_after(3), {"E208"}),
    "xml": (answered(ERROR_BODY), {"E208"}),
    "empty": (empty(), {"E208"}),
    "expired": (expired(), {"E207"}),
    "507": (full(), {"E200"}),
    "409": (conflict(), {"E203"}),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("fault", MENDS)
def test_every_read_of_a_dataset_may_fail_for_a_while(fault: str, unit: str, published, tmp_path) -> None:
    effect, times = MENDS[fault]
    identity, objects = published
    number, failed = 0, True
    while failed:
        rules = [Rule(verb, effect, nth=range(number, number + times)) for verb in ("get", "get_all")]
        store, clock = FaultyStore(MemoryStore(objects=dict(objects)), rules), Clock()
        remote = remote_of(store, clock)
        try:
            dataset = kvformat.open(remote, expected_id=identity, cache=cache_of(unit, tmp_path / f"{number}"))
            check_records(dataset)
        except KVFormatError as error:
            assert (fault, number, error.code) == ("flipped", 0, "E007")  # noqa: PT017 -- only of the root, whose id is pinned
        failed = any(rule.calls > number for rule in rules)
        assert not [verb for verb, _ in store.calls if verb not in ("get", "get_all", "stat")]
        assert clock.now <= DEADLINE_S
        remote.close()
        number += 1
    assert number > 4


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("fault", LASTS)
@pytest.mark.parametrize("folder", ["kvformat.json", "manifest/*", "index/*", "shards/*"])
def test_what_does_not_mend_has_its_code_and_leaves_nothing(
    folder, fault: str, unit: str, published, tmp_path
) -> None:
    effect, codes = LASTS[fault]
    rules = [Rule(verb, effect, folder) for verb in ("get", "get_all")]
    clock, cache = Clock(), cache_of(unit, tmp_path / "cache")
    remote = remote_of(FaultyStore(MemoryStore(objects=dict(published[1])), rules), clock)
    with pytest.raises(KVFormatError) as caught:
        check_records(kvformat.open(remote, cache=cache))
    assert caught.value.code in codes
    assert caught.value.path.startswith(f"{URL}/{folder.rstrip('*')}")
    assert clock.now <= DEADLINE_S
    remote.close()
    assert cache is None or files(cache.dir, "parts") == []
    sound = remote_of(MemoryStore(objects=dict(published[1])))
    check_records(kvformat.open(sound, cache=cache))
    sound.close()


def test_a_stale_listing_accuses_nobody(published) -> None:
    """It lacks what is there, and names what is gone: verification asks for each file, and warns of the others."""
    ghost = "shards/00000/00000099-0123456789abcdef.safetensors"
    for without in ("shards/*", "index/*", "*"):
        rules = [Rule("list", stale([Stat(ghost, 5)], without=without))]
        remote = remote_of(FaultyStore(MemoryStore(objects=dict(published[1])), rules))
        report = kvformat.verify(remote)
        assert (report.ok, report.id, report.findings) == (True, published[0], ())
        assert [(warning.code, warning.path) for warning in report.warnings] == [("W001", f"{URL}/{ghost}")]
        remote.close()


class Moved(MemoryStore):
    """Notes the ranges of shards that are given out."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects=objects)
        self.moved: list[tuple[str, int]] = []
        self.moved_nbytes = 0

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float):
        data = super().get(name, start, nbytes, timeout_s=timeout_s)
        if name.startswith("shards/"):
            self.moved.append((name, start))
            self.moved_nbytes += nbytes
        return data


STORES: dict[str, Moved] = {}


def known(url: str, *_: object) -> Moved:
    """A store that can be named in a pickle."""
    return STORES[url]


@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
def test_what_the_sampler_will_draw_is_fetched_before_it_is_asked_for(shuffle, published, tmp_path) -> None:
    """All of an epoch, where the cache has room, while the consumer has its first batch and next to none is packed."""
    url = f"memory://{shuffle}"
    store = STORES[url] = Moved(dict(published[1]))
    remote = Remote(url, connect=known)
    dataset = kvformat.open(remote, cache=cache_of("record", tmp_path / "cache"))
    sampler = BatchSampler(dataset, batch_size=1, seed=3, shuffle=shuffle)
    batches = iter(KVLoader(dataset, sampler, prefetch_nbytes=1, num_threads=1))
    next(batches)
    deadline = time.monotonic() + 60
    whole = sum(record.nbytes for record in dataset)
    while store.moved_nbytes < whole:
        assert time.monotonic() < deadline, "nothing is fetched ahead"
        time.sleep(0.002)
    assert len(list(batches)) >= small.NUM_RECORDS - 1
    assert store.moved_nbytes == whole
    assert len(store.moved) <= small.NUM_RECORDS
    remote.close()


# ----------------------------------------------------------------------------------------- connections that are reset


@pytest.fixture
def server():
    scripted = Scripted()
    yield scripted
    scripted.close()


def client_of(kind: str, server: Scripted):
    given = {"key": "k", "secret": "s", "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    if kind == "obstore":
        return ObstoreStore("s3://bucket/ds", given, max_requests=4, timeout_s=30)
    if kind == "s3fs":
        return FsspecStore("s3://bucket/ds", given, max_requests=4)
    return FsspecStore(f"{server.endpoint}/ds", {}, max_requests=4)


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("kind", ["obstore", "s3fs", "http"])
def test_a_connection_that_ends_after_any_number_of_bytes(kind: str, how: str, server: Scripted) -> None:
    """On the wire: a client that takes a part for the whole, or goes on at a wrong offset, gives wrong bytes."""
    left = [0]

    def answer(request) -> None:
        sent, left[0] = left[0], -1
        if sent < 0:
            ranged(request)
            return
        ranged(request, sent=sent)
        request.wfile.flush()
        if how == "reset":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    server.answer = answer
    store = client_of(kind, server)
    for sent in range(len(DATA)):
        left[0] = sent
        into, counts = bytearray(len(DATA)), Counter()
        remote = remote_of(store)

        def write(start, data, into=into, counts=counts) -> None:
            into[start : start + len(data)] = data
            counts.update(range(start, start + len(data)))

        remote.fetch("a", [(0, len(DATA))], write)
        assert bytes(into) == DATA
        assert set(counts.values()) == {1}
        assert left[0] == -1
    store.close()


# ----------------------------------------------------------------------------------------------------------- writing


def publish(store, spool: Path) -> str:
    """Id of the small dataset, written to a store."""
    remote = remote_of(store)
    try:
        with kvformat.create(
            remote,
            schema=small.SCHEMA,
            context=kvformat.Context.unknown(),
            provenance={"variant": "0"},
            files=small.COVERED,
            shard_slots=2,
            resume=True,
            spool=spool,
        ) as writer:
            small.fill(writer)
        return writer.id
    finally:
        remote.close()


WRITES = {
    "503": throttled(),
    "timeout": timed_out(),
    "lost": lost(),
    "reset": reset_after(3),
    "expired": expired(),
}


@pytest.mark.parametrize("fault", WRITES)
def test_every_request_of_a_publication_may_fail_once(fault: str, published, tmp_path) -> None:
    identity, _ = published
    number, failed = 0, True
    while failed:
        rule = Rule("*", WRITES[fault], nth=number)
        inner = MemoryStore()
        assert publish(FaultyStore(inner, [rule]), tmp_path / "spool") == identity, number
        failed = rule.calls > number
        assert not [name for name in inner.objects if name.startswith(".staging/")], number
        remote = remote_of(inner)
        assert kvformat.verify(remote).ok
        remote.close()
        assert list((tmp_path / "spool").iterdir()) == []
        number += 1
    assert number > 20


@pytest.mark.parametrize(
    ("verb", "effect"),
    [
        ("create", refused_own()),
        ("create", conflict()),
        ("put", flipped_on_the_way(3)),
        ("put", refused_own()),
    ],
    ids=["412 for its own", "409", "flipped on the way", "412 of a put"],
)
def test_every_write_of_a_publication_may_be_misunderstood_once(verb, effect, published, tmp_path) -> None:
    number, failed = 0, True
    while failed:
        rule = Rule(verb, effect, nth=number)
        inner = MemoryStore()
        try:
            assert publish(FaultyStore(inner, [rule]), tmp_path / "spool") == published[0], number
        except KVFormatError as error:
            assert (verb, error.code[:2]) == ("put", "E2"), number  # noqa: PT017 -- else it went well
            assert "kvformat.json" not in inner.objects
            assert publish(inner, tmp_path / "spool") == published[0]
        failed = rule.calls > number
        remote = remote_of(inner)
        report = kvformat.verify(remote)
        assert (report.ok, report.id) == (True, published[0])
        remote.close()
        number += 1
    assert number > 4


def test_a_spool_never_holds_more_than_four_shards(published, tmp_path) -> None:
    """Nothing is uploaded for a while: time enough for a writer that does not wait."""
    spool, seen = tmp_path / "spool", [0]

    class Slow(MemoryStore):
        patience_s = 2.0

        def put(self, name: str, data, *, timeout_s: float) -> None:
            end = time.monotonic() + self.patience_s
            while name.startswith("shards/") and time.monotonic() < end and seen[0] <= 4:
                seen[0] = max(seen[0], len(list(spool.rglob("*.shard"))))
                time.sleep(0.002)
            self.patience_s = 0.0
            super().put(name, data, timeout_s=timeout_s)

    remote = remote_of(Slow())
    with kvformat.create(
        remote, schema=small.SCHEMA, context=kvformat.Context.unknown(), shard_slots=1, spool=spool
    ) as writer:
        for repeat in range(4):
            for number in range(small.NUM_RECORDS):
                components, token_ids = small.tensors(number, variant=repeat)
                writer.add(f"{repeat}-{number}", components, token_ids=token_ids + 1000 * repeat)
    assert 2 <= seen[0] <= 4
    assert kvformat.verify(remote).ok
    remote.close()


# ------------------------------------------------------------------------------------------------------- a full disk


class Disk:
    """Takes so many bytes, the last write perhaps in part, and is full then."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.left = room
        self.monkeypatch = monkeypatch
        self._pwrite, self._pwritev = os.pwrite, os.pwritev
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def pwrite(self, fd, data, offset):
        if len(data) == 16:  # the ledger, whose bytes are there
            return self._pwrite(fd, data, offset)
        return self._pwrite(fd, memoryview(data).cast("B")[: self._take(len(data))], offset)

    def pwritev(self, fd, buffers, offset):
        data = b"".join(bytes(each) for each in buffers)
        return self._pwrite(fd, data[: self._take(len(data))], offset)

    def _take(self, nbytes: int) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(nbytes, self.left)
        self.left -= taken
        return taken


def no_allocation(fd, offset, nbytes):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_disk_of_a_cache_that_is_full_after_any_number_of_bytes(tmp_path, monkeypatch) -> None:
    """Where the file system cannot allocate, it is found out byte by byte."""
    monkeypatch.setattr(os, "posix_fallocate", no_allocation)
    cache = Cache(options(tmp_path / "cache"))
    for room in [*range(0, NBYTES, 211), NBYTES // 2 - 1, NBYTES // 2, NBYTES // 2 + 1, NBYTES - 1]:
        with monkeypatch.context() as patched:
            Disk(patched, room)
            with pytest.raises(StorageError, match="E200"):
                Origin().get(cache, "key")
        assert usage(tmp_path / "cache") == ledger(cache) == 0
        assert files(tmp_path / "cache", "parts") == []
    with monkeypatch.context() as patched:
        Disk(patched, NBYTES)
        assert bytes(Origin().get(cache, "key").read(0, NBYTES)) == content("key")


def test_a_spool_that_is_full_after_any_number_of_bytes(published, tmp_path, monkeypatch) -> None:
    identity, objects = published
    total, spool = sum(len(data) for name, data in objects.items() if name.startswith("shards/")), tmp_path / "spool"
    for room in range(0, total, total // 23):
        store = MemoryStore()
        with monkeypatch.context() as patched:
            Disk(patched, room)
            with pytest.raises(StorageError, match="E200"):
                publish(store, spool)
        assert list(spool.iterdir()) == []
        assert "kvformat.json" not in store.objects
        assert publish(store, spool) == identity
        assert {name: data for name, data in store.objects.items() if name in objects} == objects


def test_a_disk_a_copy_goes_to_that_is_full_after_any_number_of_bytes(published, tmp_path, monkeypatch) -> None:
    identity, objects = published
    total = sum(map(len, objects.values()))
    target, step = tmp_path / "target", sum(map(len, objects.values())) // 23
    remote = remote_of(MemoryStore(objects=dict(objects)))
    for room in range(0, total // 2, step):
        with monkeypatch.context() as patched:
            Disk(patched, room)
            try:
                kvformat.copy(remote, target, threads=2)
            except StorageError as error:
                assert error.code == "E200"  # noqa: PT017 -- else there was room
                assert not (target / "kvformat.json").exists()
            else:
                break
        assert not list(target.rglob("*.part"))
        for path in target.rglob("*"):
            assert path.is_dir() or path.read_bytes() == objects[path.relative_to(target).as_posix()]
    assert kvformat.copy(remote, target).id == identity
    small.check_complete(target, identity)
    remote.close()


@pytest.mark.parametrize("spare", [0, -1])
def test_the_floor_of_free_bytes_is_kept_to_the_byte(spare: int, tmp_path, monkeypatch) -> None:
    floor = 7 * NBYTES

    class Found:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return floor + NBYTES + spare - usage(tmp_path / "cache")

    cache = impatient(Cache(options(tmp_path / "cache", min_free_nbytes=floor)), room_s=0)
    monkeypatch.setattr(os, "statvfs", lambda path: Found())
    assert (Origin().get(cache, "key") is None) == (spare < 0)
    assert usage(tmp_path / "cache") == (NBYTES if spare == 0 else 0)


# ------------------------------------------------------------------------------------------------- many processes


def run_all(function, number: int, *args) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=function, args=(seed, *args)) for seed in range(number)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0


def read_at_random(seed: int, remote: Remote, cache: CacheOptions, repeats: int) -> None:
    warnings.simplefilter("ignore", KVFormatWarning)  # W005: where all are in use, it is gone past
    chance = random.Random(seed)
    dataset = kvformat.open(remote, cache=cache, max_open_files=1)
    for _ in range(repeats):
        check_records(dataset, [chance.randrange(small.NUM_RECORDS)])
    with impatient(Cache(cache), ledger_s=60.0)._room._ledger.locked():  # nothing comes or goes meanwhile
        assert usage(cache.dir) <= cache.max_nbytes


def saved(published, directory: Path) -> Path:
    for name, data in published[1].items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_sixteen_processes_read_a_dataset_that_is_fetched_once(unit: str, published, tmp_path) -> None:
    remote = folder_remote(saved(published, tmp_path / "data"), tmp_path / "log")
    run_all(read_at_random, 16, remote, cache_of(unit, tmp_path / "cache"), 12)
    fetched = Counter((tmp_path / "log").read_text().splitlines())
    assert fetched
    assert max(fetched.values()) == 1
    assert files(tmp_path / "cache", "parts") == []


def test_eight_processes_with_room_for_three_records(published, tmp_path) -> None:
    remote = folder_remote(saved(published, tmp_path / "data"), tmp_path / "log")
    index = sum(len(data) for name, data in published[1].items() if name.startswith("index/"))
    cache = cache_of("record", tmp_path / "cache", max_nbytes=index + 3 * 4096)
    run_all(read_at_random, 8, remote, cache, 30)
    assert usage(tmp_path / "cache") <= cache.max_nbytes
    assert files(tmp_path / "cache", "parts") == []
