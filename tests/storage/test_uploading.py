"""Uploads: in parts within bounds, confirmed without trust, and never in place of another content."""

from __future__ import annotations

import hashlib
import threading

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage import uploading
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import MissingFault, Stat, TransportFault
from kvformat.testing.faulty_store import (
    FaultyStore,
    Rule,
    answered,
    blocked,
    denied,
    expired,
    flipped,
    flipped_on_the_way,
    full,
    lost,
    raised,
    throttled,
    timed_out,
)
from kvformat.testing.memory_store import MemoryStore
from tests.storage.clock import Clock

DATA = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(250))  # 8000 bytes
PART = 1024
PATIENCE_S = 60.0


class S3Like(MemoryStore):
    """ETags as S3 makes them, of bodies and of parts; or others."""

    def __init__(self, objects=None, *, etags: str = "md5") -> None:
        super().__init__(objects=objects)
        self.etags = etags
        self.states_crc32 = etags == "crc32"
        self.made: dict[str, str] = {}
        self.uploads: list[object] = []

    def stat(self, name, *, timeout_s) -> Stat:
        found = super().stat(name, timeout_s=timeout_s)
        etag = {"md5": self.made.get(name, found.etag), "other": "0" * 32, "opaque": "0x8DB"}.get(self.etags)
        return found._replace(etag=etag)

    def begin(self, name, *, timeout_s):
        upload = super().begin(name, timeout_s=timeout_s)
        self.uploads.append(upload)
        complete = upload.complete

        def complete_and_note(*, timeout_s) -> None:
            if not upload._parts:
                raise MissingFault("NoSuchUpload")
            complete(timeout_s=timeout_s)
            md5s = b"".join(hashlib.md5(upload._parts[number]).digest() for number in sorted(upload._parts))
            self.made[name] = f"{hashlib.md5(md5s).hexdigest()}-{len(upload._parts)}"
            upload._parts.clear()

        upload.complete = complete_and_note
        return upload

    @property
    def leftovers(self) -> int:
        return sum(len(upload._parts) for upload in self.uploads)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(uploading, "_LEAST_PART", 1)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(DATA)
    return path


def remote_of(store, **options) -> Remote:
    given = {"request_nbytes": PART, **options}
    clock = Clock(1000.0)
    return Remote(
        "memory://test",
        connect=lambda *_: store,
        options=RemoteOptions(**given),
        clock=clock,
        sleep=clock.sleep,
    )


def verbs(store) -> list[str]:
    return [verb for verb, _ in store.calls]


# --------------------------------------------------------------------------------------------------- what is sent


def test_a_file_goes_in_parts_and_is_confirmed_by_its_etag(file) -> None:
    store = S3Like()
    remote, told = remote_of(store), []
    remote.put_file("x", file, progress=told.append)
    assert store.objects == {"x": DATA}
    assert verbs(store).count("part") == 8
    assert not {"get", "get_all", "put"} & set(verbs(store)), "no byte is read back"
    assert sorted(told) == [832, *[1024] * 7]
    remote.close()


def test_a_small_file_goes_in_one_piece(file) -> None:
    store = S3Like()
    remote, told = remote_of(store, request_nbytes=len(DATA)), []
    remote.put_file("x", file, progress=told.append)
    assert verbs(store) == ["stat", "put", "stat"]
    assert told == [len(DATA)]
    remote.close()


@pytest.mark.parametrize("nbytes", [0, 1, PART - 1, PART, PART + 1, 7 * PART])
@pytest.mark.parametrize("etags", ["md5", "none", "other", "opaque", "crc32"])
def test_all_sizes_arrive(tmp_path, nbytes, etags) -> None:
    path = tmp_path / "f"
    path.write_bytes(DATA[:nbytes])
    store = S3Like(etags=etags)
    remote = remote_of(store)
    remote.put_file("x", path)
    remote.put("y", memoryview(DATA)[:nbytes])
    assert store.objects == {"x": DATA[:nbytes], "y": DATA[:nbytes]}
    remote.close()


def test_where_etags_say_nothing_the_object_is_read_back_and_no_more_is_hashed(file, monkeypatch) -> None:
    hashed = []
    md5 = uploading._md5
    monkeypatch.setattr(uploading, "_md5", lambda data: (hashed.append(len(data)), md5(data))[1])
    store = S3Like(etags="other")
    remote = remote_of(store)
    remote.put_file("x", file)
    assert verbs(store).count("get") == 8
    before = len(hashed)
    remote.put_file("y", file)
    assert verbs(store).count("get") == 16
    assert len(hashed) == before
    remote.close()


def test_where_the_store_says_what_arrived_nothing_is_read_back_or_hashed(file, monkeypatch) -> None:
    monkeypatch.setattr(uploading, "_md5", lambda data: pytest.fail("hashed"))
    inner = S3Like(etags="crc32")
    store = FaultyStore(inner, [Rule("part", flipped_on_the_way(7), nth=2)])
    remote = remote_of(store)
    remote.put_file("x", file)
    assert inner.objects == {"x": DATA}
    assert [verb for verb, _ in store.calls].count("part") == 9, "the damaged one again, before the object is made"
    assert not {"get", "get_all"} & {verb for verb, _ in store.calls}
    remote.close()


def test_parts_grow_where_there_would_be_too_many(file, monkeypatch) -> None:
    monkeypatch.setattr(uploading, "_MOST_PARTS", 3)
    monkeypatch.setattr(uploading.plan_parts, "__kwdefaults__", {"align": 16})
    store = S3Like()
    remote = remote_of(store)
    remote.put_file("x", file)
    assert verbs(store).count("part") == 3
    assert store.objects == {"x": DATA}
    remote.close()


def test_parts_are_of_five_mebibytes_at_least(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(uploading, "_LEAST_PART", 5 << 20)
    path = tmp_path / "f"
    path.write_bytes(bytes(11 << 20))
    store = S3Like()
    remote = remote_of(store, request_nbytes=1 << 20)
    remote.put_file("x", path)
    assert verbs(store).count("part") == 3
    remote.close()


def test_as_many_parts_at_once_as_allowed(file) -> None:
    """Four wait for each other; memory is bounded by those under way."""
    barrier, lock, most = threading.Barrier(4), threading.Lock(), [0, 0]

    def meet(operation):
        with lock:
            most[0] += 1
            most[1] = max(most)
        barrier.wait(PATIENCE_S)
        with lock:
            most[0] -= 1
        return operation.do()

    remote = remote_of(FaultyStore(S3Like(), [Rule("part", meet)]), max_requests=16, max_inflight_nbytes=4 * PART)
    remote.put_file("x", file)
    assert most[1] == 4
    remote.close()


# ------------------------------------------------------------------------------------------------ what is there


@pytest.mark.parametrize(
    "there", [DATA[:-1], DATA + b"x", DATA[:-1] + b"x", b""], ids=["short", "long", "other", "no"]
)
def test_another_content_is_never_replaced(file, there) -> None:
    store = S3Like({"x": there})
    remote = remote_of(store)
    for put in (lambda: remote.put_file("x", file), lambda: remote.put("x", DATA)):
        with pytest.raises(KVFormatError, match="nothing was replaced") as caught:
            put()
        assert caught.value.code == "E113"
    assert store.objects == {"x": there}
    assert not {"put", "part", "begin", "delete"} & set(verbs(store))
    remote.close()


@pytest.mark.parametrize("rules", [[], [Rule("get", flipped(5), nth=3)]], ids=["whole", "flipped once on the way"])
def test_the_same_content_is_not_sent_again(file, rules) -> None:
    store = FaultyStore(S3Like({"x": DATA}), [Rule(rule.verb, rule.effect, rule.name, rule.nth) for rule in rules])
    remote, told = remote_of(store), []
    remote.put_file("x", file, progress=told.append)
    remote.put("x", DATA)
    assert not {"put", "part", "begin"} & set(verbs(store))
    assert told == [len(DATA)]
    remote.close()


# -------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "rule",
    [
        Rule("stat", timed_out(), nth=range(2)),
        Rule("begin", timed_out(), nth=range(2)),
        Rule("begin", lost(), nth=0),
        Rule("part", timed_out(), nth=range(5)),
        Rule("part", lost(), nth=range(3)),
        Rule("part", throttled(), nth=range(40)),
        Rule("part", flipped_on_the_way(7), nth=2),
        Rule("part", expired(), nth=3),
        Rule("complete", timed_out(), nth=range(2)),
        Rule("complete", lost(), nth=0),
        Rule("complete", expired(), nth=0),
        Rule("put", lost(), nth=0),
        Rule("put", throttled(), nth=range(9)),
        Rule("put", flipped_on_the_way(), nth=0),
        Rule("put", expired(), nth=0),
        Rule("stat", raised(MissingFault), nth=1),
    ],
    ids=lambda rule: f"{rule.verb}-{rule.effect.__qualname__.split('.')[0]}",
)
@pytest.mark.parametrize("etags", ["md5", "none", "crc32"])
def test_what_mends_ends_well(file, rule, etags) -> None:
    inner = S3Like(etags=etags)
    store = FaultyStore(inner, [Rule(rule.verb, rule.effect, rule.name, rule.nth)])
    remote, told = remote_of(store), []
    if rule.verb == "put":
        remote.put("x", DATA[:PART])
        assert inner.objects == {"x": DATA[:PART]}
    else:
        remote.put_file("x", file, progress=told.append)
        assert sum(told) == len(DATA)
        assert inner.objects == {"x": DATA}
    remote.close()


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (Rule("begin", denied()), "E207"),
        (Rule("begin", raised(MissingFault)), "E203"),
        (Rule("part", denied(), nth=5), "E207"),
        (Rule("part", full(), nth=5), "E200"),
        (Rule("part", timed_out(), nth=range(6, 10_000)), "E208"),
        (Rule("part", expired()), "E207"),
        (Rule("part", flipped_on_the_way()), "E212"),
        (Rule("complete", timed_out()), "E208"),
        (Rule("complete", raised(MissingFault)), "E203"),
        (Rule("stat", timed_out(), nth=range(1, 10_000)), "E208"),
        (Rule("stat", raised(MissingFault)), "E212"),
        (Rule("put", full()), "E200"),
        (Rule("put", flipped_on_the_way()), "E212"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.verb}-{value.effect.__qualname__.split('.')[0]}",
)
@pytest.mark.parametrize("etags", ["md5", "none", "crc32"])
def test_what_does_not_mend_has_a_code_and_frees_what_was_sent(file, rule, code, etags) -> None:
    inner = S3Like(etags=etags)
    store = FaultyStore(inner, [Rule(rule.verb, rule.effect, rule.name, rule.nth)])
    remote = remote_of(store)
    with pytest.raises(KVFormatError) as caught:
        if rule.verb == "put":
            remote.put("x", DATA[:PART])
        else:
            remote.put_file("x", file)
    assert caught.value.code == code
    assert caught.value.path == "memory://test/x"
    assert inner.leftovers == 0
    assert "delete" not in verbs(store)
    remote.close()


def test_an_interrupt_aborts(file) -> None:
    inner = S3Like()
    store = FaultyStore(inner)
    remote = remote_of(store)

    def progress(nbytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remote.put_file("x", file, progress=progress)
    assert "abort" in verbs(store)
    assert inner.leftovers == 0
    assert inner.objects == {}
    remote.close()


def test_abort_waits_for_parts_under_way(file) -> None:
    """A part that arrives after the abort would be kept, and paid for, for ever."""
    released, begun = threading.Event(), threading.Event()
    inner = S3Like()

    def denied_and_released(operation):
        assert begun.wait(PATIENCE_S)
        threading.Timer(0.05, released.set).start()
        return denied()(operation)

    rules = [Rule("part", blocked(released, begun), nth=0), Rule("part", denied_and_released, nth=1)]
    remote = remote_of(FaultyStore(inner, rules), max_requests=2)
    with pytest.raises(KVFormatError, match="E207"):
        remote.put_file("x", file)
    assert released.is_set()
    assert inner.leftovers == 0
    remote.close()


def test_a_failing_abort_does_not_hide_the_failure(file) -> None:
    store = FaultyStore(S3Like(), [Rule("part", full()), Rule("abort", raised(TransportFault))])
    remote = remote_of(store)
    with pytest.raises(KVFormatError, match="E200"):
        remote.put_file("x", file)
    remote.close()


def test_a_file_that_shrinks_is_found(file) -> None:
    def shrink(operation):
        file.write_bytes(DATA[:100])
        return operation.do()

    remote = remote_of(FaultyStore(S3Like(), [Rule("begin", shrink)]))
    with pytest.raises(KVFormatError, match="ends at") as caught:
        remote.put_file("x", file)
    assert (caught.value.code, caught.value.path) == ("E005", str(file))
    remote.close()


def test_a_file_that_is_not_there(tmp_path) -> None:
    remote = remote_of(S3Like())
    with pytest.raises(KVFormatError, match="E002"):
        remote.put_file("x", tmp_path / "none")
    remote.close()


def test_error_pages_are_no_content(file) -> None:
    """With status 200, whenever the object is read back."""
    remote = remote_of(FaultyStore(S3Like({"x": DATA}), [Rule("get", answered(b"<Error/>"), nth=range(6))]))
    remote.put_file("x", file)
    remote.close()
