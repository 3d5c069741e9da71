"""Writing to an object store: the same dataset, nothing else left, and no byte of it replaced."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import DeniedFault, ExistsFault
from kvformat.testing.memory_store import MemoryStore
from kvformat.write import remote_target
from kvformat.write.spool import SpoolFiles
from kvformat.write.spool_places import default_spool, spools
from tests.write.make import ids, kv, read, tree, writer

RECORDS = 9
URL = "memory://test"


class LostError(Exception):
    """The machine went away."""


def remote(store, url=URL, **options):
    """A client of this store that gives up soon."""
    settings = {"attempt_timeout_s": 5.0, "deadline_s": 5.0, **options}
    return Remote(url, connect=lambda *_: store, options=RemoteOptions(**settings))


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def spool(tmp_path):
    return tmp_path / "spool"


def start(store, spool, **options):
    """A resuming writer with shards of two records."""
    return writer(remote(store), **{"shard_slots": 2, "resume": True, "spool": spool, **options})


def fill(out, first=0, last=RECORDS, *, seed=0):
    for number in range(first, last):
        out.add(f"{number}", kv(3 + number, seed), token_ids=ids(3 + number))


def download(store, directory):
    """What is in the store as a local dataset."""
    for name, data in store.objects.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def check_whole(store, directory, identity):
    """Exactly this dataset and nothing else is in the store."""
    assert read(download(store, directory)).id == identity


def staged(store):
    return sorted(name for name in store.objects if name.startswith(".staging/"))


def receipts(store):
    return [name for name in staged(store) if not name.endswith("plan.json")]


def wait_for_shards(out):
    """Until what was submitted is done: without that, nobody knows how far helper threads are."""
    for one in list(out._shards._finisher._waiting):
        one.exception(60)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    with writer(location, shard_slots=2) as out:
        fill(out)
    return out.id


@pytest.fixture
def interrupted(store, spool):
    """Three shards are there; a fourth was in work."""
    with pytest.raises(LostError), start(store, spool) as out:
        fill(out, 0, 7)
        raise LostError
    assert [name[-13:] for name in receipts(store)] == [f"0000000{n}.json" for n in range(3)]
    return store


# ------------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("request_nbytes", [64, 8 << 20])
def test_the_id_is_that_of_a_local_write(store, spool, tmp_path, undisturbed, resume, request_nbytes):
    """Whether index parts go in one piece or in several."""
    target = remote(store, request_nbytes=request_nbytes)
    with writer(target, shard_slots=2, resume=resume, spool=spool) as out:
        fill(out)
        assert not [name for name in store.objects if name == "kvformat.json"]
    assert out.id == undisturbed
    check_whole(store, tmp_path / "ds", undisturbed)
    assert tree(spool) == []


def test_everything_a_dataset_may_hold(store, spool, tmp_path):
    options = {"files": {"notes": b"n", "other": b""}, "provenance": {"torch": "1"}, "extensions": {"a": 1}}
    found = []
    for target in (remote(store), tmp_path / "local"):
        with writer(target, spool=spool, **options) as out:
            fill(out, 0, 3)
            out.alias("alias", "1")
            out.skip("nothing", "empty")
            assert (out.num_records, out.num_names) == (3, 4)
        found.append(out.id)
    assert found[0] == found[1]
    check_whole(store, tmp_path / "ds", found[0])


def test_nothing_is_listed_and_the_root_comes_last(store, spool):
    with start(store, spool) as out:
        fill(out)
    made = [name for operation, name in store.calls if operation in ("put", "create", "complete")]
    data = [name for name in made if not name.startswith(".staging/")]
    assert data[-1] == "kvformat.json"
    assert Counter(data).most_common(1)[0][1] == 1
    assert {operation for operation, _ in store.calls} <= {
        "put", "create", "stat", "get", "get_all", "begin", "part", "complete", "delete",
    }  # fmt: skip
    assert {name.partition("/")[0] for operation, name in store.calls if operation == "delete"} <= {".staging"}


def test_a_dataset_that_is_there_is_refused(store, spool):
    store.objects["kvformat.json"] = b"anything"
    with pytest.raises(kvformat.DatasetExistsError) as caught, start(store, spool):
        pass
    assert (caught.value.code, caught.value.path) == ("E100", URL)
    assert store.objects == {"kvformat.json": b"anything"}
    assert not spool.exists()


class Replacing(MemoryStore):
    """A store that does not know the precondition, and says nothing about it."""

    def create(self, name, data, *, timeout_s):
        self.put(name, data, timeout_s=timeout_s)


def test_a_store_that_replaces_is_refused_before_any_work(spool):
    store = Replacing()
    with pytest.raises(kvformat.StorageError) as caught, start(store, spool):
        pytest.fail("hours of work")
    assert caught.value.code == "E209"
    assert store.objects == {}
    assert tree(spool) == []


class ReadOnly(MemoryStore):
    def put(self, name, data, *, timeout_s):
        raise DeniedFault(name)

    def create(self, name, data, *, timeout_s):
        raise DeniedFault(name)

    def begin(self, name, *, timeout_s):
        raise DeniedFault(name)


@pytest.mark.parametrize("resume", [False, True])
def test_a_store_that_may_not_be_written_to(interrupted, spool, resume):
    denying = ReadOnly(objects=interrupted.objects)
    with pytest.raises(kvformat.StorageError) as caught, start(denying, spool, resume=resume):
        pytest.fail("hours of work")
    assert caught.value.code == "E207"
    assert tree(spool) == []


def test_an_empty_dataset_leaves_nothing(store, spool):
    with pytest.raises(kvformat.InputError) as caught, start(store, spool, resume=False):
        pass
    assert caught.value.code == "E114"
    assert store.objects == {}
    assert tree(spool) == []


@pytest.mark.parametrize(
    "options",
    [{"storage_options": "key"}, {"remote_options": {"deadline_s": 1}}, {"spool": ""}],
)
def test_arguments_that_make_no_sense(spool, options):
    with pytest.raises(kvformat.UsageError) as caught:
        writer("s3://bucket/ds", **{"spool": spool, **options})
    assert caught.value.code == "E081"


# ------------------------------------------------------------------------------------------------------------- failing


class Failing(MemoryStore):
    """Refuses what is asked for by name, from some call on."""

    def __init__(self, fails, after=0, fault=DeniedFault):
        super().__init__()
        self.fails = fails
        self.left = after
        self.fault = fault

    def _maybe(self, operation, name):
        if self.fails(operation, name):
            if self.left <= 0:
                raise self.fault(name)
            self.left -= 1

    def put(self, name, data, *, timeout_s):
        self._maybe("put", name)
        super().put(name, data, timeout_s=timeout_s)

    def create(self, name, data, *, timeout_s):
        self._maybe("create", name)
        super().create(name, data, timeout_s=timeout_s)

    def begin(self, name, *, timeout_s):
        self._maybe("begin", name)
        return super().begin(name, timeout_s=timeout_s)

    def delete(self, name, *, timeout_s):
        self._maybe("delete", name)
        super().delete(name, timeout_s=timeout_s)


def is_data(folder):
    return lambda operation, name: operation in ("put", "begin") and name.startswith(folder)


FAILURES = {
    "first-shard": (is_data("shards/"), 0),
    "third-shard": (is_data("shards/"), 2),
    "plan": (lambda operation, name: name.endswith("plan.json"), 0),
    "first-receipt": (lambda operation, name: operation == "create" and "/0000" in name, 0),
    "second-receipt": (lambda operation, name: operation == "create" and "/0000" in name, 1),
    "index": (is_data("index/"), 1),
    "manifest": (is_data("manifest/"), 0),
    "root": (lambda operation, name: operation == "create" and name == "kvformat.json", 0),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_anywhere_publishes_nothing_and_the_next_run_completes(failure, spool, tmp_path, undisturbed):
    fails, after = FAILURES[failure]
    store = Failing(fails, after)
    with pytest.raises(kvformat.StorageError) as caught, start(store, spool) as out:
        fill(out)
    assert caught.value.code == "E207"
    assert "kvformat.json" not in store.objects
    assert tree(spool) == []
    numbers = [int(name[-13:-5]) for name in receipts(store)]
    assert numbers == list(range(len(numbers)))
    store.fails = lambda *_: False
    with start(store, spool) as out:
        assert out._replay.num_shards == len(numbers)
        fill(out)
    assert out.id == undisturbed
    check_whole(store, tmp_path / "ds", undisturbed)
    assert tree(spool) == []


@pytest.mark.parametrize("failure", [name for name in FAILURES if "receipt" not in name and name != "plan"])
def test_without_resuming_a_failure_leaves_data_alone(failure, spool):
    fails, after = FAILURES[failure]
    store = Failing(fails, after)
    with pytest.raises(kvformat.StorageError), start(store, spool, resume=False) as out:
        fill(out)
    assert {name.partition("/")[0] for name in store.objects} <= {"shards", "index", "manifest"}
    assert tree(spool) == []


def test_what_cannot_be_removed_after_the_commit_is_no_error(spool, undisturbed):
    store = Failing(lambda operation, name: operation == "delete" and ".json" in name)
    with start(store, spool) as out:
        fill(out)
    assert out.id == undisturbed
    assert staged(store) != []


def test_an_earlier_failure_is_the_one_that_is_told(spool):
    """The second shard's receipt waits for the first one's, which never comes."""
    first, go = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, name, data, *, timeout_s):
            if "/00000000-" in name:
                first.set()
                assert go.wait(60)
                raise DeniedFault("the first")
            if "/00000001-" in name:
                assert first.wait(60)
            super().put(name, data, timeout_s=timeout_s)
            if "/00000001-" in name:
                go.set()

    store = Slow()
    with pytest.raises(kvformat.StorageError) as caught, start(store, spool) as out:
        fill(out)
    assert caught.value.code == "E207"
    assert "/00000000-" in caught.value.path
    assert receipts(store) == []


class LateFiles(SpoolFiles):
    """A disk that is full from some shard on."""

    def __init__(self, ordinal):
        self._name = f"{ordinal:08d}.shard"

    def write(self, fd, buffers, offset, path):
        if path.name == self._name:
            raise make_error("E200", "the disk is full", path=path)
        return super().write(fd, buffers, offset, path)


def test_a_spool_without_room_keeps_what_was_uploaded(store, spool, tmp_path, undisturbed):
    with pytest.raises(kvformat.StorageError) as caught, start(store, spool, filesystem=LateFiles(2)) as out:
        fill(out)
    assert (caught.value.code, Path(caught.value.path).name) == ("E200", "00000002.shard")
    assert [name[-13:] for name in receipts(store)] == ["00000000.json", "00000001.json"]
    assert tree(spool) == []
    with start(store, spool) as out:
        fill(out)
    check_whole(store, tmp_path / "ds", undisturbed)


# ------------------------------------------------------------------------------------------------------- interrupting


def test_an_exception_lets_complete_shards_arrive(interrupted, spool, tmp_path, undisturbed):
    assert tree(spool) == []
    before = dict(interrupted.objects)
    interrupted.calls.clear()
    with start(interrupted, spool) as out:
        fill(out)
    assert out.id == undisturbed
    made = [name for operation, name in interrupted.calls if operation == "put" and name.startswith("shards/")]
    assert not set(made) & set(before)
    check_whole(interrupted, tmp_path / "ds", undisturbed)


class Held(MemoryStore):
    """Uploads of shards do not end before they are let go."""

    def __init__(self):
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def put(self, name, data, *, timeout_s):
        if name.startswith("shards/"):
            self.begun.release()
            assert self.go.wait(60)
        super().put(name, data, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("resume", "error"), [(True, KeyboardInterrupt), (False, LostError), (False, KeyboardInterrupt)]
)
def test_an_interrupt_waits_for_no_more_than_one_request(spool, monkeypatch, resume, error):
    store = Held()
    with pytest.raises(error), start(store, spool, resume=resume) as out:
        stop = out._staging.stop
        monkeypatch.setattr(out._staging, "stop", lambda *given: (stop(*given), store.go.set()))
        fill(out, 0, 7)  # three complete shards, two of them on their way
        assert store.begun.acquire(timeout=60)
        assert store.begun.acquire(timeout=60)
        raise error
    assert len([name for name in store.objects if name.startswith("shards/")]) <= 2
    assert receipts(store) == []
    assert tree(spool) == []


def test_an_interrupt_does_not_wait_for_a_store_that_hangs(spool, monkeypatch):
    """Not for the minutes a request may take."""
    monkeypatch.setattr(remote_target, "_PATIENCE_S", 0.1)
    store = Held()
    target = remote(store, attempt_timeout_s=100.0, deadline_s=100.0)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), writer(target, shard_slots=2, resume=True, spool=spool) as out:
        fill(out, 0, 5)
        assert store.begun.acquire(timeout=60)
        raise KeyboardInterrupt
    store.go.set()
    assert time.monotonic() - begun < 50
    assert receipts(store) == []
    assert tree(spool) == []


def test_an_interrupt_aborts_an_upload_in_parts(spool):
    aborted, sent, go = [], threading.Event(), threading.Event()

    class Watched(MemoryStore):
        def begin(self, name, *, timeout_s):
            upload = super().begin(name, timeout_s=timeout_s)
            part = upload.part

            def held(number, data, *, timeout_s):
                part(number, data, timeout_s=timeout_s)
                sent.set()
                assert number == 1 or go.wait(60)

            upload.part, upload.abort = held, lambda *, timeout_s: aborted.append(name)
            return upload

    store = Watched()
    target = remote(store, request_nbytes=5 << 20, attempt_timeout_s=60.0, deadline_s=60.0)
    schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=16, head_dim=256, dtype="F32")
    values = np.zeros((1, 400, 16, 256), np.float32)
    options = {"context": kvformat.Context.unknown(), "spool": spool, "resume": True}
    with pytest.raises(KeyboardInterrupt), kvformat.create(target, schema=schema, **options) as out:
        stop = out._staging.stop
        out._staging.stop = lambda *given: (stop(*given), go.set())
        out.add("0", {"k": values, "v": values}, token_ids=ids(400))
        out._shards.close_shard()
        assert sent.wait(60)
        raise KeyboardInterrupt
    assert len(aborted) == 1
    assert not [name for name in store.objects if name.startswith("shards/")]
    assert receipts(store) == []
    assert tree(spool) == []


def test_a_failed_call_swallowed_by_the_caller_publishes_nothing(store, spool):
    with pytest.raises(kvformat.UsageError) as caught, start(store, spool) as out:
        fill(out, 0, 3)
        out._state = "failed"
    assert caught.value.code == "E115"
    assert "kvformat.json" not in store.objects
    assert tree(spool) == []


# ------------------------------------------------------------------------------------------------------------ resuming


def test_any_machine_continues(interrupted, tmp_path, undisturbed):
    with start(interrupted, tmp_path / "another" / "spool") as out:
        assert out._replay.num_shards == 3
        for number in range(6):  # documents alone
            document = kvformat.Document.of(ids(3 + number))
            assert out.replay(f"{number}", document)
        fill(out, 6)
    assert out.id == undisturbed
    check_whole(interrupted, tmp_path / "ds", undisturbed)


def test_many_receipts_are_read_in_order(store, spool, tmp_path):
    """More than are asked for side by side."""
    options = {"shard_slots": 1}
    with pytest.raises(LostError), start(store, spool, **options) as out:
        fill(out, 0, 41)
        raise LostError
    with start(store, spool, **options) as out:
        assert out._replay.num_shards == 40
        fill(out, 0, 41)
    check_whole(store, tmp_path / "ds", out.id)


def test_a_writer_that_does_not_resume_leaves_receipts_alone(interrupted, spool, undisturbed):
    before = staged(interrupted)
    with start(interrupted, spool, resume=False) as out:
        fill(out)
    assert out.id == undisturbed
    assert staged(interrupted) == before


@pytest.mark.parametrize("options", [{"tag": "other"}, {"shard_nbytes": 1 << 20}, {"shard_slots": 3}])
def test_another_plan_starts_anew(interrupted, spool, options):
    before = staged(interrupted)
    with start(interrupted, spool, **options) as out:
        assert out._replay.num_shards == 0
        fill(out)
    assert staged(interrupted) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: fill(out, 1), "another document as record 0"),
        (lambda out: fill(out, seed=1), "another values of the same document as record 0"),
        (lambda out: fill(out, 0, 5), "staged more than was replayed"),
    ],
)
def test_other_inputs_are_refused_and_what_is_there_stays(interrupted, spool, call, message):
    before = dict(interrupted.objects)
    with pytest.raises(kvformat.ConflictError, match=message) as caught, start(interrupted, spool) as out:
        call(out)
    assert (caught.value.code, caught.value.path) == ("E112", URL)
    assert interrupted.objects == before


def damage_cut(data):
    return data[:-1]


def damage_digit(data):
    """One digit of a checksum; still a receipt."""
    at = data.index(b'"record_sum":"') + 14
    return data[:at] + (b"1" if data[at : at + 1] != b"1" else b"2") + data[at + 1 :]


def damage_plan(data):
    at = data.index(b'"plan":"') + 8
    return data[:at] + b"0" * 16 + data[at + 16 :]


def damage_ordinal(data):
    return data.replace(b'"ordinal":1', b'"ordinal":2')


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_digit, damage_plan, damage_ordinal, lambda _: b"", lambda _: b"{}"]
)
def test_a_damaged_receipt_is_refused(interrupted, spool, damage):
    name = receipts(interrupted)[1]
    changed = damage(interrupted.objects[name])
    assert changed != interrupted.objects[name]
    interrupted.objects[name] = changed
    with pytest.raises(kvformat.DamageError, match="kvformat clean") as caught, start(interrupted, spool):
        pytest.fail("it was taken")
    assert (caught.value.code, caught.value.path) == ("E116", f"{URL}/{name}")
    assert tree(spool) == []


@pytest.mark.parametrize("damage", [None, damage_cut])
def test_a_shard_that_is_gone_or_short_is_refused(interrupted, spool, damage):
    name = next(name for name in interrupted.objects if "/00000001-" in name)
    data = interrupted.objects.pop(name)
    if damage is not None:
        interrupted.objects[name] = damage(data)
    with pytest.raises(kvformat.DamageError, match="kvformat clean") as caught, start(interrupted, spool):
        pytest.fail("it was taken")
    assert (caught.value.code, caught.value.path) == ("E116", f"{URL}/{name}")


def test_another_plan_in_its_place_is_refused(interrupted, spool):
    name = next(name for name in interrupted.objects if name.endswith("plan.json"))
    interrupted.objects[name] = canonical.encode({"a": 1})
    with pytest.raises(kvformat.DamageError) as caught, start(interrupted, spool):
        pytest.fail("it was taken")
    assert (caught.value.code, caught.value.path) == ("E116", f"{URL}/{name}")


def test_a_run_that_finishes_no_shard_leaves_nothing(store, spool):
    with pytest.raises(LostError), start(store, spool) as out:
        fill(out, 0, 2)
        raise LostError
    assert store.objects == {}
    assert tree(spool) == []


def test_what_stands_beyond_a_gap_is_met_again(interrupted, spool, tmp_path, undisturbed):
    """Equal bytes are equal receipts, whoever made them."""
    del interrupted.objects[receipts(interrupted)[0]]
    with start(interrupted, spool) as out:
        assert out._replay.num_shards == 0
        fill(out)
    check_whole(interrupted, tmp_path / "ds", undisturbed)


# -------------------------------------------------------------------------------------------------------------- racing


def test_the_first_of_two_equal_writers_decides_and_both_publish(store, spool, tmp_path, undisturbed):
    with start(store, spool) as first:
        fill(first, 0, 5)
        with start(store, spool) as second:
            fill(second)
        fill(first, 5)
    assert first.id == second.id == undisturbed
    check_whole(store, tmp_path / "ds", undisturbed)
    assert tree(spool) == []


def test_a_writer_of_the_same_plan_with_other_values_is_told(store, spool, undisturbed, tmp_path):
    conflict = pytest.raises(kvformat.ConflictError, match="values of the same documents as shard 0")
    with start(store, spool) as first:
        with conflict as caught, start(store, spool) as second:
            fill(first, 0, 5)
            wait_for_shards(first)
            fill(second, seed=1)
        assert caught.value.code == "E112"
        fill(first, 5)
    assert first.id == undisturbed
    assert kvformat.verify(download(store, tmp_path / "ds")).ok


def test_a_loser_at_the_commit_is_told(store, spool, tmp_path, undisturbed):
    conflict = pytest.raises(kvformat.ConflictError, match="kvformat diff")
    with conflict as caught, start(store, spool, tag="loser") as loser:
        fill(loser, seed=1)
        with start(store, spool, tag="winner") as winner:
            fill(winner)
    assert (caught.value.code, caught.value.path) == ("E113", f"{URL}/kvformat.json")
    assert winner.id == undisturbed
    assert kvformat.verify(download(store, tmp_path / "ds")).id == undisturbed
    assert {name.split("/")[1] for name in staged(store)} == {loser._plan.digest}


def test_a_lost_answer_of_the_commit_is_no_loss(spool, undisturbed):
    """The store made the root, and the answer says that it was there already."""

    class Forgetful(MemoryStore):
        def create(self, name, data, *, timeout_s):
            super().create(name, data, timeout_s=timeout_s)
            if name == "kvformat.json":
                raise ExistsFault(name)

    with start(Forgetful(), spool) as out:
        fill(out)
    assert out.id == undisturbed


# ----------------------------------------------------------------------------------------------------------- the spool


def test_the_spool_is_bounded_and_private(spool):
    """However slow the store is: four shards at most, one of them in work."""
    seen = []

    class Looking(MemoryStore):
        def put(self, name, data, *, timeout_s):
            if name.startswith("shards/"):
                seen.append(len([one for one in tree(spool) if one.endswith(".shard")]))
            super().put(name, data, timeout_s=timeout_s)

    with start(Looking(), spool, shard_slots=1) as out:
        assert out._staging.path.stat().st_mode & 0o777 == 0o700
        for number in range(30):
            out.add(f"{number}", kv(3 + number), token_ids=ids(3 + number))
            seen.append(len([one for one in tree(spool) if one.endswith(".shard")]))
    assert len(seen) == 60
    assert 1 < max(seen) <= 4


def test_a_shard_leaves_the_spool_when_it_is_uploaded(store, spool):
    with start(store, spool) as out:
        fill(out, 0, 5)
        wait_for_shards(out)
        assert [path.name for path in out._staging.path.iterdir()] == ["00000002.shard"]
        fill(out, 5)


def test_nothing_is_synced(store, spool, monkeypatch):
    def refuse(fd):
        pytest.fail("synced")

    monkeypatch.setattr("os.fsync", refuse)
    with start(store, spool) as out:
        fill(out)


def left_behind(base):
    """A spool directory as a killed writer leaves it, and a file in it that no writer made."""
    path = base / f"{'a' * 16}-{'b' * 16}-{'c' * 8}"
    path.mkdir(parents=True)
    (path / "00000003.shard").write_bytes(b"123")
    (path / "00000000.part").write_bytes(b"")
    return path


def test_the_next_writer_removes_what_a_killed_one_left(store, spool):
    gone, foreign, live = left_behind(spool), spool / "mine", spool / f"{'1' * 16}-{'2' * 16}-{'3' * 8}"
    foreign.mkdir()
    (foreign / "00000000.shard").write_bytes(b"mine")
    linked = spool / f"{'4' * 16}-{'5' * 16}-{'6' * 8}"
    linked.symlink_to(foreign)
    live.mkdir()
    (live / "00000000.shard").write_bytes(b"live")
    lease = DirectoryLease.take(live)
    with start(store, spool) as out:
        assert not gone.exists()
        fill(out)
    lease.release()
    assert (foreign / "00000000.shard").read_bytes() == b"mine"
    assert (live / "00000000.shard").read_bytes() == b"live"
    assert linked.is_symlink()


def test_a_foreign_file_in_a_spool_keeps_its_directory(store, spool):
    path = left_behind(spool)
    (path / "notes.txt").write_bytes(b"mine")
    with start(store, spool) as out:
        fill(out)
    assert tree(path) == ["notes.txt"]


def test_two_writers_have_spools_of_their_own(spool):
    one, other = MemoryStore(), MemoryStore()
    with start(one, spool) as first, start(other, spool) as second:
        assert first._staging.path != second._staging.path
        assert len(spools(spool)) == 2
        fill(first)
        fill(second)
    assert first.id == second.id
    assert tree(spool) == []


def test_a_spool_is_found_by_its_url(store, spool):
    with start(store, spool) as out:
        assert spools(spool, URL) == [out._staging.path]
        assert spools(spool, URL + "/other") == []
        fill(out)
    assert spools(spool / "nowhere") == []


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_the_way_of_the_spool(store, tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(kvformat.StorageError, match="file stands") as caught, start(store, tmp_path / "file" / below):
        pass
    assert caught.value.code == "E207"


def test_the_default_spool_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_spool() == tmp_path / "kvformat" / "spool"
    with writer(remote(MemoryStore())) as out:
        assert out._staging.path.parent == default_spool()
        fill(out, 0, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_spool() == tmp_path / "home" / ".cache" / "kvformat" / "spool"

    def nowhere():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(KVFormatError, match="spool=") as caught:
        default_spool()
    assert caught.value.code == "E081"
