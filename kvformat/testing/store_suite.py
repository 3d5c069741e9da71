"""What every object store must do, as tests: subclass :class:`StoreSuite` and give it a ``store``.

Example
-------
>>> class TestMine(StoreSuite):  # doctest: +SKIP
...     @pytest.fixture
...     def store(self):
...         return MyStore("mine://bucket/prefix")
"""

# ruff: noqa: D102, S311 -- a test says what it shows in its name; seeded numbers make equal runs

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from kvformat.storage.store import (
    DeniedFault,
    ExistsFault,
    MissingFault,
    ShortFault,
    Store,
    StoreFault,
    UnsupportedFault,
)

__all__ = ["StoreSuite"]

_TIMEOUT_S = 60.0
_DATA = bytes(range(256)) * 40
_PART_NBYTES = 5 << 20
_NAMES = [
    "plain",
    "deep/er/name",
    "with space",
    "ünïcödé/名前",
    "plus+plus",
    "percent%20sign",
    "percent%",
    "hash#tag",
    "amp&and=equals",
    "tilde~(brackets)[x]",
    "quote'\"",
    "question?mark",
    "star*",
    "at@colon:semi;comma,",
    ".hidden",
]


class StoreSuite:
    """Tests of every operation and fault of a :class:`~kvformat.storage.store.Store`.

    Fixtures to override: ``store``, empty and of its own for each test; ``unknown_bucket`` and ``denied``, stores
    that have none and that are refused.

    Attributes
    ----------
    num_listed
        Objects in the test of long listings: more than a page of the store.
    names
        Names the store must take.
    """

    num_listed: ClassVar[int] = 1003
    names: ClassVar[list[str]] = _NAMES

    @pytest.fixture
    def store(self) -> Store:
        """A store with no objects."""
        raise NotImplementedError("the suite needs a fixture `store`")

    @pytest.fixture
    def unknown_bucket(self) -> Store:
        """A store whose bucket does not exist."""
        pytest.skip("this store has no buckets")

    @pytest.fixture
    def denied(self) -> Store:
        """A store with wrong credentials."""
        pytest.skip("this store has no credentials")

    # -- reading -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("start", "nbytes"),
        [
            (0, 1),
            (0, len(_DATA)),
            (1, 1),
            (255, 2),
            (0, len(_DATA) - 1),
            (1, len(_DATA) - 1),
            (len(_DATA) - 1, 1),
            (4096, 4096),
        ],
    )
    def test_ranges_are_exact(self, store: Store, start: int, nbytes: int) -> None:
        store.put("a", _DATA, timeout_s=_TIMEOUT_S)
        found = store.get("a", start, nbytes, timeout_s=_TIMEOUT_S)
        assert len(found) == nbytes
        assert bytes(found) == _DATA[start : start + nbytes]

    @pytest.mark.parametrize(
        ("start", "nbytes"), [(0, len(_DATA) + 1), (len(_DATA) - 1, 2), (len(_DATA), 1), (len(_DATA) + 1000, 10)]
    )
    def test_ranges_past_the_end_are_short(self, store: Store, start: int, nbytes: int) -> None:
        store.put("a", _DATA, timeout_s=_TIMEOUT_S)
        with pytest.raises(ShortFault):
            store.get("a", start, nbytes, timeout_s=_TIMEOUT_S)

    def test_random_ranges(self, store: Store) -> None:
        data = random.Random(0).randbytes(1 << 20)
        store.put("a", data, timeout_s=_TIMEOUT_S)
        generator = random.Random(1)
        for _ in range(30):
            start = generator.randrange(len(data))
            nbytes = generator.randint(1, len(data) - start)
            assert bytes(store.get("a", start, nbytes, timeout_s=_TIMEOUT_S)) == data[start : start + nbytes]

    def test_an_empty_object(self, store: Store) -> None:
        store.put("empty", b"", timeout_s=_TIMEOUT_S)
        assert store.stat("empty", timeout_s=_TIMEOUT_S).nbytes == 0
        assert store.get_all("empty", max_nbytes=0, timeout_s=_TIMEOUT_S) == b""
        with pytest.raises(ShortFault):
            store.get("empty", 0, 1, timeout_s=_TIMEOUT_S)

    def test_whole_objects_up_to_a_limit(self, store: Store) -> None:
        store.put("a", _DATA, timeout_s=_TIMEOUT_S)
        assert store.get_all("a", max_nbytes=len(_DATA), timeout_s=_TIMEOUT_S) == _DATA
        assert store.get_all("a", max_nbytes=len(_DATA) * 2, timeout_s=_TIMEOUT_S) == _DATA
        for limit in (0, 1, len(_DATA) - 1):
            found = store.get_all("a", max_nbytes=limit, timeout_s=_TIMEOUT_S)
            assert len(found) > limit
            assert _DATA.startswith(found)

    def test_what_is_not_there(self, store: Store) -> None:
        store.put("there", b"1", timeout_s=_TIMEOUT_S)
        for name in ("nothing", "there-too", "the", "folder/nothing"):
            with pytest.raises(MissingFault):
                store.get(name, 0, 1, timeout_s=_TIMEOUT_S)
            with pytest.raises(MissingFault):
                store.get_all(name, max_nbytes=10, timeout_s=_TIMEOUT_S)
            with pytest.raises(MissingFault):
                store.stat(name, timeout_s=_TIMEOUT_S)

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.put("folder/inside", b"1", timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            store.stat("folder", timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            store.get("folder", 0, 1, timeout_s=_TIMEOUT_S)

    # -- writing -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_every_buffer(self, store: Store, kind: Callable[[bytes], bytes]) -> None:
        store.put("a", kind(_DATA), timeout_s=_TIMEOUT_S)
        store.create("b", kind(_DATA), timeout_s=_TIMEOUT_S)
        assert store.get_all("a", max_nbytes=1 << 20, timeout_s=_TIMEOUT_S) == _DATA
        assert store.get_all("b", max_nbytes=1 << 20, timeout_s=_TIMEOUT_S) == _DATA

    def test_put_replaces_and_nothing_is_cached(self, store: Store) -> None:
        seen = set()
        for data in (b"first", b"the second, longer", b"3"):
            store.put("a", data, timeout_s=_TIMEOUT_S)
            found = store.stat("a", timeout_s=_TIMEOUT_S)
            assert (found.name, found.nbytes) == ("a", len(data))
            seen.add(found.etag)
            assert [(each.name, each.nbytes) for each in store.list(timeout_s=_TIMEOUT_S)] == [("a", len(data))]
            assert store.get_all("a", max_nbytes=100, timeout_s=_TIMEOUT_S) == data
        assert len(seen) == 3 or seen == {None}
        assert not any(each and '"' in each for each in seen)

    def test_create_makes_and_never_replaces(self, store: Store) -> None:
        store.create("a", b"first", timeout_s=_TIMEOUT_S)
        with pytest.raises(ExistsFault):
            store.create("a", b"second", timeout_s=_TIMEOUT_S)
        with pytest.raises(ExistsFault):
            store.create("a", b"first", timeout_s=_TIMEOUT_S)
        assert store.get_all("a", max_nbytes=100, timeout_s=_TIMEOUT_S) == b"first"
        store.delete("a", timeout_s=_TIMEOUT_S)
        store.create("a", b"third", timeout_s=_TIMEOUT_S)
        assert store.get_all("a", max_nbytes=100, timeout_s=_TIMEOUT_S) == b"third"

    def test_of_racing_creates_one_wins(self, store: Store) -> None:
        barrier = threading.Barrier(8)

        def race(number: int) -> int | None:
            barrier.wait(_TIMEOUT_S)
            try:
                store.create("commit", b"%d" % number * 1000, timeout_s=_TIMEOUT_S)
            except ExistsFault:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [each for each in pool.map(race, range(8)) if each is not None]
        assert len(winners) == 1
        assert store.get_all("commit", max_nbytes=1 << 20, timeout_s=_TIMEOUT_S) == b"%d" % winners[0] * 1000

    def test_deleting_twice(self, store: Store) -> None:
        store.put("a", b"1", timeout_s=_TIMEOUT_S)
        store.delete("a", timeout_s=_TIMEOUT_S)
        store.delete("a", timeout_s=_TIMEOUT_S)
        store.delete("never/was", timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            store.stat("a", timeout_s=_TIMEOUT_S)
        assert list(store.list(timeout_s=_TIMEOUT_S)) == []

    # -- parts ---------------------------------------------------------------------------------------------------

    def test_parts_out_of_order_and_repeated(self, store: Store) -> None:
        parts = {number: random.Random(number).randbytes(_PART_NBYTES) for number in (1, 2)}
        parts[3] = b"the last is short"
        upload = store.begin("big", timeout_s=_TIMEOUT_S)
        upload.part(3, parts[3], timeout_s=_TIMEOUT_S)
        upload.part(1, bytes(_PART_NBYTES), timeout_s=_TIMEOUT_S)
        upload.part(2, memoryview(parts[2]), timeout_s=_TIMEOUT_S)
        upload.part(1, parts[1], timeout_s=_TIMEOUT_S)
        upload.part(2, bytearray(parts[2]), timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            store.stat("big", timeout_s=_TIMEOUT_S)
        assert list(store.list(timeout_s=_TIMEOUT_S)) == []
        upload.complete(timeout_s=_TIMEOUT_S)
        whole = parts[1] + parts[2] + parts[3]
        assert store.stat("big", timeout_s=_TIMEOUT_S).nbytes == len(whole)
        assert store.get_all("big", max_nbytes=len(whole), timeout_s=_TIMEOUT_S) == whole
        edge = _PART_NBYTES - 3
        assert bytes(store.get("big", edge, 6, timeout_s=_TIMEOUT_S)) == whole[edge : edge + 6]
        assert [each.name for each in store.list(timeout_s=_TIMEOUT_S)] == ["big"]

    def test_parts_from_threads(self, store: Store) -> None:
        parts = [random.Random(number).randbytes(_PART_NBYTES) for number in range(4)]
        upload = store.begin("big", timeout_s=_TIMEOUT_S)
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(upload.part, n, part, timeout_s=_TIMEOUT_S) for n, part in enumerate(parts, 1)]
            for each in sent:
                each.result()
        upload.complete(timeout_s=_TIMEOUT_S)
        assert store.get_all("big", max_nbytes=1 << 30, timeout_s=_TIMEOUT_S) == b"".join(parts)

    def test_an_upload_replaces(self, store: Store) -> None:
        store.put("a", b"before", timeout_s=_TIMEOUT_S)
        upload = store.begin("a", timeout_s=_TIMEOUT_S)
        upload.part(1, b"after", timeout_s=_TIMEOUT_S)
        assert store.get_all("a", max_nbytes=100, timeout_s=_TIMEOUT_S) == b"before"
        upload.complete(timeout_s=_TIMEOUT_S)
        assert store.get_all("a", max_nbytes=100, timeout_s=_TIMEOUT_S) == b"after"

    def test_a_missing_part_is_noticed(self, store: Store) -> None:
        upload = store.begin("a", timeout_s=_TIMEOUT_S)
        upload.part(1, b"one", timeout_s=_TIMEOUT_S)
        upload.part(3, b"three", timeout_s=_TIMEOUT_S)
        with pytest.raises(StoreFault):
            upload.complete(timeout_s=_TIMEOUT_S)
        upload.abort(timeout_s=_TIMEOUT_S)

    def test_an_upload_given_up_leaves_nothing(self, store: Store) -> None:
        upload = store.begin("a", timeout_s=_TIMEOUT_S)
        upload.part(1, b"1" * 100, timeout_s=_TIMEOUT_S)
        upload.abort(timeout_s=_TIMEOUT_S)
        upload.abort(timeout_s=_TIMEOUT_S)
        assert list(store.list(timeout_s=_TIMEOUT_S)) == []
        with pytest.raises(MissingFault):
            store.stat("a", timeout_s=_TIMEOUT_S)

    def test_an_upload_of_no_parts(self, store: Store) -> None:
        upload = store.begin("a", timeout_s=_TIMEOUT_S)
        upload.complete(timeout_s=_TIMEOUT_S)
        assert store.stat("a", timeout_s=_TIMEOUT_S).nbytes == 0

    # -- names and listings --------------------------------------------------------------------------------------

    def test_names_of_all_kinds(self, store: Store) -> None:
        for name in self.names:
            store.put(name, name.encode(), timeout_s=_TIMEOUT_S)
        for name in self.names:
            data = name.encode()
            assert store.get_all(name, max_nbytes=1000, timeout_s=_TIMEOUT_S) == data, name
            assert bytes(store.get(name, 1, len(data) - 1, timeout_s=_TIMEOUT_S)) == data[1:], name
            assert store.stat(name, timeout_s=_TIMEOUT_S).nbytes == len(data), name
            with pytest.raises(ExistsFault):
                store.create(name, b"", timeout_s=_TIMEOUT_S)
        assert sorted(each.name for each in store.list(timeout_s=_TIMEOUT_S)) == sorted(self.names)
        for name in self.names:
            store.delete(name, timeout_s=_TIMEOUT_S)
        assert list(store.list(timeout_s=_TIMEOUT_S)) == []

    def test_prefixes_end_anywhere(self, store: Store) -> None:
        for name in ("shards/one", "shards/only", "shards/two", "shardsize", "index", "deep/er/shards/one"):
            store.put(name, name.encode(), timeout_s=_TIMEOUT_S)

        def listed(prefix: str) -> list[tuple[str, int]]:
            return sorted((each.name, each.nbytes) for each in store.list(prefix, timeout_s=_TIMEOUT_S))

        assert listed("shards/o") == [("shards/one", 10), ("shards/only", 11)]
        assert listed("shards/") == [("shards/one", 10), ("shards/only", 11), ("shards/two", 10)]
        assert [name for name, _ in listed("shards")] == ["shards/one", "shards/only", "shards/two", "shardsize"]
        assert listed("deep/") == [("deep/er/shards/one", 18)]
        assert listed("nothing") == []
        assert listed("nothing/") == []
        assert len(listed("")) == 6

    @pytest.mark.slow
    def test_long_listings(self, store: Store) -> None:
        names = [f"many/{number:06d}" for number in range(self.num_listed)]
        with ThreadPoolExecutor(8) as pool:
            for each in [pool.submit(store.put, name, b"1", timeout_s=_TIMEOUT_S) for name in names]:
                each.result()
        store.put("other", b"1", timeout_s=_TIMEOUT_S)
        assert sorted(each.name for each in store.list("many/", timeout_s=_TIMEOUT_S)) == names
        assert len(list(store.list(timeout_s=_TIMEOUT_S))) == len(names) + 1

    # -- threads, buckets, credentials ---------------------------------------------------------------------------

    def test_64_threads(self, store: Store) -> None:
        data = random.Random(0).randbytes(64 << 10)
        store.put("a", data, timeout_s=_TIMEOUT_S)

        def use(number: int) -> None:
            name = f"threads/{number}"
            for step in range(3):
                start = (number * 997 + step) % 60_000
                assert bytes(store.get("a", start, 4096, timeout_s=_TIMEOUT_S)) == data[start : start + 4096]
            store.put(name, data[:number], timeout_s=_TIMEOUT_S)
            assert store.stat(name, timeout_s=_TIMEOUT_S).nbytes == number
            with pytest.raises(MissingFault):
                store.get(f"{name}/no", 0, 1, timeout_s=_TIMEOUT_S)

        with ThreadPoolExecutor(64) as pool:
            for each in [pool.submit(use, number) for number in range(64)]:
                each.result()
        assert len(list(store.list("threads/", timeout_s=_TIMEOUT_S))) == 64

    def test_a_bucket_that_is_not_there(self, unknown_bucket: Store) -> None:
        with pytest.raises(MissingFault):
            unknown_bucket.get("a", 0, 1, timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            unknown_bucket.stat("a", timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            unknown_bucket.get_all("a", max_nbytes=1, timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            unknown_bucket.put("a", b"1", timeout_s=_TIMEOUT_S)
        with pytest.raises(MissingFault):
            list(unknown_bucket.list(timeout_s=_TIMEOUT_S))

    def test_wrong_credentials(self, denied: Store) -> None:
        calls: list[Callable[[], object]] = [
            lambda: denied.get("a", 0, 1, timeout_s=_TIMEOUT_S),
            lambda: denied.get_all("a", max_nbytes=1, timeout_s=_TIMEOUT_S),
            lambda: denied.stat("a", timeout_s=_TIMEOUT_S),
            lambda: denied.put("a", b"1", timeout_s=_TIMEOUT_S),
            lambda: denied.create("a", b"1", timeout_s=_TIMEOUT_S),
            lambda: self._upload(denied),
            lambda: list(denied.list(timeout_s=_TIMEOUT_S)),
            lambda: denied.delete("a", timeout_s=_TIMEOUT_S),
        ]
        for call in calls:
            with pytest.raises(DeniedFault):
                call()

    @staticmethod
    def _upload(store: Store) -> None:
        upload = store.begin("a", timeout_s=_TIMEOUT_S)
        try:
            upload.part(1, b"1", timeout_s=_TIMEOUT_S)
            upload.complete(timeout_s=_TIMEOUT_S)
        finally:
            upload.abort(timeout_s=_TIMEOUT_S)

    def test_closing(self, store: Store) -> None:
        store.put("a", b"1", timeout_s=_TIMEOUT_S)
        store.close()

    def test_the_url_has_no_final_slash(self, store: Store) -> None:
        assert not store.url.endswith("/")
        assert "://" in store.url
        assert issubclass(UnsupportedFault, StoreFault)
