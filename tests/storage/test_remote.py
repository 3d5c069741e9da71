"""One process's use of an object store: bounds, turns, deadlines, interrupts, forks, and what comes of it all."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import pickle
import threading
import time
import weakref

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.remote import _INHERITED, Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import (
    ShortFault,
    Stat,
    StoreFault,
    TransportFault,
    UnsupportedFault,
)
from kvformat.testing.faulty_store import (
    FaultyStore,
    Rule,
    blocked,
    conflict,
    cut_after,
    denied,
    expired,
    flipped,
    lost,
    missing,
    raised,
    refused_own,
    stale,
    throttled,
    timed_out,
)
from kvformat.testing.memory_store import MemoryStore
from tests.storage.clock import Clock

DATA = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(256))  # 8 KiB
PATIENCE_S = 60.0


def remote_of(store, *, clock=None, **options) -> Remote:
    given = {"request_nbytes": 1024, **options}
    timing = {} if clock is None else {"clock": clock, "sleep": clock.sleep}
    return Remote("memory://test/", connect=lambda *_: store, options=RemoteOptions(**given), **timing)


def faulty(*rules: Rule, objects=None) -> FaultyStore:
    return FaultyStore(MemoryStore(objects={"a": DATA} if objects is None else dict(objects)), rules)


class Target:
    """What `write` is called with; complains of a byte that comes twice."""

    def __init__(self, nbytes: int = len(DATA)) -> None:
        self.data = bytearray(nbytes)
        self.count = bytearray(nbytes)
        self.lock = threading.Lock()

    def __call__(self, start: int, data) -> None:
        with self.lock:
            for offset in range(start, start + len(data)):
                self.count[offset] += 1
            self.data[start : start + len(data)] = data

    @property
    def is_whole(self) -> bool:
        return self.data == DATA and set(self.count) == {1}


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvformat-remote"]


# --------------------------------------------------------------------------------------------------------- reading


def test_fetch_gives_every_byte_once() -> None:
    store = faulty()
    with_gaps = [(6000, 100), (0, 1024), (1024, 3000), (5000, 10), (8191, 1), (4500, 0)]
    remote, target = remote_of(store), Target()
    remote.fetch("a", with_gaps, target)
    for start, nbytes in with_gaps:
        assert target.data[start : start + nbytes] == DATA[start : start + nbytes]
        assert set(target.count[start : start + nbytes]) <= {1}
    assert sum(target.count) == sum(nbytes for _, nbytes in with_gaps)
    remote.fetch("a", [], target)
    remote.close()


def test_a_record_takes_no_more_requests_than_its_size_does() -> None:
    store, target = faulty(), Target()
    remote = remote_of(store)
    remote.fetch("a", [(start, 64) for start in range(0, len(DATA), 64)], target)
    assert target.is_whole
    assert [verb for verb, _ in store.calls] == ["get"] * 8
    remote.close()


def test_a_missing_object() -> None:
    remote = remote_of(faulty())
    for call in (lambda: remote.fetch("b", [(0, 1)], Target()), lambda: remote.read("b", nbytes=3)):
        with pytest.raises(KVFormatError, match="restore") as caught:
            call()
        assert (caught.value.code, caught.value.path) == ("E002", "memory://test/b")
    assert remote.stat("b") is None
    assert remote.stat("a") == Stat("a", len(DATA), hashlib.md5(DATA).hexdigest())
    remote.close()


def test_an_object_that_ends_before() -> None:
    store, clock = faulty(), Clock(1000.0)
    remote = remote_of(store, clock=clock)
    with pytest.raises(KVFormatError, match=r"ends at 8192, expected 8200") as caught:
        remote.fetch("a", [(8000, 200)], Target(9000))
    assert caught.value.code == "E005"
    assert sum(clock.slept) < 5, "no use trying until the deadline"
    remote.close()


@pytest.mark.parametrize("nbytes", [len(DATA) - 1, len(DATA) + 1, 0, 5000])
@pytest.mark.parametrize("request_nbytes", [1024, 1 << 20], ids=["ranges", "one request"])
def test_a_size_that_was_not_expected(nbytes, request_nbytes) -> None:
    remote = remote_of(faulty(), request_nbytes=request_nbytes)
    with pytest.raises(KVFormatError, match=f"8192 bytes, expected {nbytes}") as caught:
        remote.read("a", nbytes=nbytes)
    assert caught.value.code == "E005"
    assert remote.read("a", nbytes=len(DATA)) == DATA
    remote.close()


def test_objects_of_unknown_size() -> None:
    remote = remote_of(faulty(objects={"a": DATA, "empty": b""}))
    assert remote.read("a") == DATA
    assert remote.read("a", max_nbytes=len(DATA)) == DATA
    assert remote.read("empty", max_nbytes=0) == b""
    assert remote.read("empty", nbytes=0) == b""
    with pytest.raises(KVFormatError, match="E004"):
        remote.read("a", max_nbytes=len(DATA) - 1)
    remote.close()


def test_a_store_without_sizes_is_taken_at_its_word() -> None:
    remote = remote_of(faulty(Rule("stat", raised(UnsupportedFault))))
    assert remote.read("a") == DATA
    with pytest.raises(KVFormatError, match="E203"):
        remote.stat("a")
    remote.close()


def test_what_write_raises_is_raised_and_ends_the_fetch() -> None:
    store = faulty()
    remote = remote_of(store, max_requests=1)
    calls = []

    def write(start, data) -> None:
        calls.append(start)
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        remote.fetch("a", [(0, len(DATA))], write)
    assert calls == [0], "what is queued is cancelled"
    assert len(store.calls) <= 2
    remote.close()


def test_a_list_in_pages_is_complete(monkeypatch) -> None:
    monkeypatch.setattr("kvformat.storage.remote._LISTED_AT_ONCE", 7)
    objects = {f"x/{n:03}": b"." * n for n in range(50)} | {"y": b""}
    remote = remote_of(faulty(objects=objects))
    assert [(stat.name, stat.nbytes) for stat in remote.list("x/")] == [(f"x/{n:03}", n) for n in range(50)]
    assert [stat.name for stat in remote.list("z")] == []
    assert len(list(remote.list())) == 51
    remote.close()


@pytest.mark.parametrize("count", range(12))
def test_a_list_that_fails_half_way_begins_again(monkeypatch, count) -> None:
    monkeypatch.setattr("kvformat.storage.remote._LISTED_AT_ONCE", 3)
    objects = {f"{n:03}": b"" for n in range(10)}
    clock = Clock(1000.0)
    store = faulty(Rule("list", cut_after(count), nth=range(2)), objects=objects)
    remote = remote_of(store, clock=clock)
    assert [stat.name for stat in remote.list()] == sorted(objects)
    remote.close()


def test_a_list_that_never_ends_well_ends_at_the_deadline(monkeypatch) -> None:
    monkeypatch.setattr("kvformat.storage.remote._LISTED_AT_ONCE", 3)
    clock = Clock(1000.0)
    remote = remote_of(faulty(Rule("list", cut_after(7)), objects={f"{n:03}": b"" for n in range(10)}), clock=clock)
    names = []
    with pytest.raises(KVFormatError, match="E208"):
        names.extend(stat.name for stat in remote.list())
    assert clock.now - 1000 <= 310
    remote.close()


def test_a_stale_list_is_passed_on() -> None:
    remote = remote_of(faulty(Rule("list", stale([Stat("gone", 3)], without="a")), objects={"a": b"", "b": b""}))
    assert [stat.name for stat in remote.list()] == ["gone", "b"]
    remote.close()


# ------------------------------------------------------------------------------------------------- bounds and turns


class Meeting(MemoryStore):
    """Every ``get`` waits for as many others, and counts them."""

    def __init__(self, count: int) -> None:
        super().__init__(objects={"a": DATA})
        self.barrier = threading.Barrier(count)
        self.lock = threading.Lock()
        self.under_way = self.most = 0

    def get(self, name, start, nbytes, *, timeout_s):
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        self.barrier.wait(PATIENCE_S)
        try:
            return super().get(name, start, nbytes, timeout_s=timeout_s)
        finally:
            with self.lock:
                self.under_way -= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_requests": 4}, 4),
        ({"max_requests": 16, "max_inflight_nbytes": 4096}, 4),
        ({"max_requests": 16, "max_inflight_nbytes": 5119}, 4),
        ({"max_requests": 16, "max_inflight_nbytes": 100, "request_nbytes": 1024}, 1),
        ({"max_requests": 8}, 8),
    ],
)
def test_as_many_requests_at_once_as_allowed(options, expected) -> None:
    store = Meeting(expected)
    remote, target = remote_of(store, **options), Target()
    for _ in range(3):
        remote.fetch("a", [(0, 8192 if expected > 1 else 500)], Target())
    if expected > 1:
        remote.fetch("a", [(0, 8192)], target)
        assert target.is_whole
    assert store.most == expected
    remote.close()


def test_a_small_read_is_not_behind_a_large_one() -> None:
    """Operations take turns, so that the small one is second whatever the large one has queued."""
    released, begun = threading.Event(), threading.Event()
    store = faulty(Rule("get", blocked(released, begun), nth=0))
    remote = remote_of(store, max_requests=1)
    large = threading.Thread(target=remote.fetch, args=("a", [(0, 8192)], Target()))
    large.start()
    assert begun.wait(PATIENCE_S)
    small = threading.Thread(target=remote.read, args=("a",), kwargs={"max_nbytes": 9000})
    small.start()
    pool = remote._session._pool
    wait_until(lambda: len(pool._turns) == 2)
    released.set()
    large.join(PATIENCE_S)
    small.join(PATIENCE_S)
    assert [verb for verb, _ in store.calls].index("get_all") <= 2
    remote.close()


def wait_until(condition) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.001)


def test_nothing_is_left_after_close() -> None:
    remote = remote_of(Meeting(8), max_requests=8)
    wait_until(lambda: not threads())  # of other tests, that have nothing to do
    remote.fetch("a", [(0, 8192)], Target())
    assert len(threads()) == 8
    remote.close()
    assert not threads()
    remote.fetch("a", [(0, 8192)], Target())  # and the next use begins anew
    remote.close()
    assert not threads()
    remote.close()


def test_threads_without_work_end(monkeypatch) -> None:
    """A remote that nobody refers to is not closed by anybody."""
    monkeypatch.setattr("kvformat.storage.requests._IDLE_S", 0.01)
    remote = remote_of(Meeting(4), max_requests=4)
    remote.fetch("a", [(0, 8192)], Target())
    wait_until(lambda: not threads())
    remote.fetch("a", [(0, 8192)], Target())
    remote.close()


def test_a_remote_of_the_parent_is_not_let_go_in_the_child() -> None:
    remote = remote_of(faulty())
    session = remote._sessions[-1] = remote._session  # as of another process
    del remote
    gc.collect()
    assert session in _INHERITED
    _INHERITED.remove(session)
    session.close()


def test_close_ends_what_is_under_way_in_other_threads() -> None:
    released, begun = threading.Event(), threading.Event()
    remote = remote_of(faulty(Rule("get", blocked(released, begun))))
    outcome: list[object] = []

    def fetch() -> None:
        try:
            remote.fetch("a", [(0, 8192)], Target())
        except KVFormatError as error:
            outcome.append(error.code)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert begun.wait(PATIENCE_S)
    session = remote._session
    closing = threading.Thread(target=remote.close)
    closing.start()
    thread.join(PATIENCE_S)
    assert outcome == ["E203"]
    released.set()
    closing.join(PATIENCE_S)
    wait_until(lambda: not session._pool._threads)


# ------------------------------------------------------------------------------------------------ stalls, interrupts


def test_a_stalled_attempt_frees_its_place_and_its_answer_is_dropped() -> None:
    """The store ignores its time-out: both places of two are taken by attempts that do not come back."""
    released = threading.Event()
    store = faulty(Rule("get", blocked(released), nth=range(2)))
    remote, target = remote_of(store, max_requests=2, attempt_timeout_s=0.2), Target()
    try:
        remote.fetch("a", [(0, len(DATA))], target)
        assert target.is_whole
    finally:
        released.set()
    pool = remote._session._pool
    wait_until(lambda: pool._stuck == 0)  # the late answers have come
    assert target.is_whole
    assert (pool._held, pool._held_nbytes) == (0, 0)
    remote.close()


def test_a_store_that_never_answers_is_unreachable_at_the_deadline() -> None:
    released = threading.Event()
    remote = remote_of(faulty(Rule("*", blocked(released))), attempt_timeout_s=0.2, deadline_s=1.0)
    begun = time.monotonic()
    try:
        with pytest.raises(KVFormatError, match="E208"):
            remote.fetch("a", [(0, len(DATA))], Target())
        with pytest.raises(KVFormatError, match="E208"):
            remote.stat("a")
        assert time.monotonic() - begun < PATIENCE_S
    finally:
        released.set()
    remote.close()


def test_write_is_not_called_after_a_failure() -> None:
    released, begun = threading.Event(), threading.Event()
    store = faulty(Rule("get", blocked(released, begun), nth=0), Rule("get", after(begun, denied())))
    remote, target = remote_of(store, max_requests=4), Target()
    with pytest.raises(KVFormatError, match="E207"):
        remote.fetch("a", [(0, len(DATA))], target)
    released.set()
    pool = remote._session._pool
    wait_until(lambda: not pool._running)
    assert sum(target.count) == 0
    assert (pool._held, pool._held_nbytes, pool._ready) == (0, 0, type(pool._ready)())
    assert len(store.calls) <= 4, "what was queued is not asked for"
    remote.close()


def after(event, effect):
    def wait(operation):
        assert event.wait(PATIENCE_S)
        return effect(operation)

    return wait


def test_a_failure_waits_for_a_write_under_way() -> None:
    writing, failed, go_on = threading.Event(), threading.Event(), threading.Event()
    remote = remote_of(faulty(Rule("get", after(writing, denied()), nth=1)), max_requests=2)
    finished = []

    def write(start, data) -> None:
        writing.set()
        go_on.wait(PATIENCE_S)
        finished.append(failed.is_set())

    def fetch() -> None:
        with pytest.raises(KVFormatError, match="E207"):
            remote.fetch("a", [(0, 2048)], write)
        failed.set()

    thread = threading.Thread(target=fetch)
    thread.start()
    assert writing.wait(PATIENCE_S)
    pool = remote._session._pool
    wait_until(lambda: not pool._batches)  # the fetch has failed, and waits
    assert not failed.is_set()
    go_on.set()
    thread.join(PATIENCE_S)
    assert finished == [False]
    remote.close()


def test_an_interrupt_cancels() -> None:
    """Raised where the waiting thread looks at the clock, as a signal is handled between two of its steps."""
    released, begun = threading.Event(), threading.Event()
    armed = []

    def clock() -> float:
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            raise KeyboardInterrupt
        return time.monotonic()

    store = faulty(Rule("get", blocked(released), nth=range(1, 2)))
    remote = Remote(
        "memory://test",
        connect=lambda *_: store,
        options=RemoteOptions(request_nbytes=1024, max_requests=2),
        clock=clock,
    )
    target = Target()

    def write(start, data) -> None:
        armed.append(1)
        begun.set()
        target(start, data)

    with pytest.raises(KeyboardInterrupt):
        remote.fetch("a", [(0, len(DATA))], write)
    before = sum(target.count)
    released.set()
    pool = remote._session._pool
    wait_until(lambda: not pool._running)
    assert sum(target.count) == before
    assert pool._held == 0
    assert remote.read("a") == DATA, "and it is as good as new"
    remote.close()


# ------------------------------------------------------------------------------------------------------- recovery


def test_a_storm_of_503s_is_over_when_it_is_over() -> None:
    """All of the first 60 requests are refused; then each comes at the first go, and as many at once as ever."""
    clock, inner = Clock(1000.0), Meeting(1)
    store = FaultyStore(inner, [Rule("get", throttled(), nth=range(60))])
    remote, target = remote_of(store, clock=clock, max_requests=4), Target()
    remote.fetch("a", [(0, len(DATA))], target)
    assert target.is_whole
    assert len(store.calls) == 60 + 8
    slept = len(clock.slept)
    inner.barrier = threading.Barrier(4)
    remote.fetch("a", [(0, len(DATA))], Target())
    assert inner.most == 4
    assert len(clock.slept) == slept, "nothing is remembered of the storm"
    remote.close()


def test_a_store_that_never_answered_is_given_up_sooner() -> None:
    clock = Clock(1000.0)
    remote = remote_of(faulty(Rule("get", timed_out(), nth=range(10**6))), clock=clock, deadline_s=1000)
    for _ in range(2):
        begun = clock.now
        with pytest.raises(KVFormatError, match="E208"):
            remote.fetch("a", [(0, 10)], Target())
        assert 20 < clock.now - begun <= 61
    remote.stat("a")
    begun = clock.now
    with pytest.raises(KVFormatError, match="E208"):
        remote.fetch("a", [(0, 10)], Target())
    assert 500 < clock.now - begun <= 1001
    remote.close()


def test_a_store_that_refuses_for_now_is_there() -> None:
    clock = Clock(1000.0)
    remote = remote_of(faulty(Rule("get", throttled(), nth=range(10**6))), clock=clock, deadline_s=1000)
    begun = clock.now
    with pytest.raises(KVFormatError, match="E208"):
        remote.fetch("a", [(0, 10)], Target())
    assert 500 < clock.now - begun <= 1001
    remote.close()


@pytest.mark.parametrize(("status", "code", "kind"), [(400, "", StoreFault), (400, "BadDigest", TransportFault)])
def test_a_client_error_nobody_knows_is_not_repeated(status, code, kind) -> None:
    from kvformat.storage.store_faults import fault_of_status

    assert type(fault_of_status(status, code)) is kind


def test_while_a_store_refuses_it_is_asked_less() -> None:
    """What was refused keeps its place: 100 others do not run into the same refusal meanwhile."""
    clock = Clock(1000.0)
    store = faulty(Rule("get", throttled()))
    remote = remote_of(store, clock=clock, request_nbytes=64, max_requests=2, deadline_s=60)
    with pytest.raises(KVFormatError, match="E208"):
        remote.fetch("a", [(start, 64) for start in range(0, len(DATA), 64)], Target())
    assert len(store.calls) < 60
    remote.close()


def test_credentials_are_renewed_once() -> None:
    made = []

    def connect(*_):
        rules = [] if made else [Rule("get", expired())]
        made.append(faulty(*rules))
        return made[-1]

    remote, target = Remote("memory://test", connect=connect, options=RemoteOptions(request_nbytes=1024)), Target()
    remote.fetch("a", [(0, len(DATA))], target)
    assert target.is_whole
    assert len(made) == 2, "one new client for all requests that found the old one outdated"
    remote.close()


def test_credentials_that_stay_outdated_are_refused() -> None:
    made = []

    def connect(*_):
        made.append(faulty(Rule("get", expired())))
        return made[-1]

    remote = Remote("memory://test", connect=connect)
    with pytest.raises(KVFormatError, match=r"E207.*expired"):
        remote.fetch("a", [(0, len(DATA))], Target())
    assert len(made) == 2
    remote.close()


def test_attempts_are_shorter_near_the_deadline() -> None:
    clock, given = Clock(1000.0), []

    class Slow(MemoryStore):
        def stat(self, name, *, timeout_s):
            given.append(timeout_s)
            clock.now += timeout_s
            raise TransportFault("time-out")

    remote = remote_of(Slow(), clock=clock, attempt_timeout_s=30, deadline_s=100)
    with pytest.raises(KVFormatError, match=r"attempts in 1?\d\d s failed, the last with TransportFault: time-out"):
        remote.stat("a")
    assert given[0] == 30
    assert 0 < given[-1] < 30
    assert clock.now - 1000 <= 100.1
    remote.close()


def test_a_foreign_exception_of_a_store_has_a_code() -> None:
    remote = remote_of(faulty(Rule("stat", raised(ZeroDivisionError))))
    with pytest.raises(KVFormatError, match=r"E203.*ZeroDivisionError"):
        remote.stat("a")
    remote.close()


def test_delete_is_repeated_and_does_not_mind() -> None:
    store = faulty(Rule("delete", lost(), nth=0), Rule("delete", missing(), nth=0))
    remote = remote_of(store, clock=Clock(1000.0))
    remote.delete("a")
    assert remote.stat("a") is None
    remote.delete("a")
    remote.close()


# -------------------------------------------------------------------------------------------------- processes


def known(url, storage_options, options):
    """A store that every process can make."""
    return MemoryStore(url, {"a": DATA})


def read_in_child(remote, queue) -> None:
    target = Target()
    remote.fetch("a", [(0, len(DATA))], target)
    queue.put((target.is_whole, remote.read("a", nbytes=len(DATA)) == DATA, os.getpid()))
    remote.close()
    assert not threads()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_used_handle_works_in_a_child(method) -> None:
    remote = Remote("memory://test", connect=known, options=RemoteOptions(request_nbytes=1024))
    remote.fetch("a", [(0, len(DATA))], Target())
    in_children(remote, method)
    target = Target()
    remote.fetch("a", [(0, len(DATA))], target)
    assert target.is_whole
    remote.close()


def in_children(remote, method="fork") -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=read_in_child, args=(remote, queue)) for _ in range(2)]
    for child in children:
        child.start()
    results = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert all(result[:2] == (True, True) for result in results)
    assert os.getpid() not in {process for _, _, process in results}


def test_a_fork_in_the_middle_of_a_fetch() -> None:
    released, begun = threading.Event(), threading.Event()
    parent = os.getpid()

    def connect(url, *_):
        rules = [Rule("get", blocked(released, begun))] if os.getpid() == parent else []
        return FaultyStore(MemoryStore(url, {"a": DATA}), rules)

    remote, target = Remote("memory://test", connect=connect, options=RemoteOptions(request_nbytes=1024)), Target()
    thread = threading.Thread(target=remote.fetch, args=("a", [(0, len(DATA))], target))
    thread.start()
    assert begun.wait(PATIENCE_S)
    in_children(remote)
    released.set()
    thread.join(PATIENCE_S)
    assert target.is_whole
    remote.close()


def test_locks_held_at_a_fork_do_not_matter() -> None:
    remote = Remote("memory://test", connect=known, options=RemoteOptions(request_nbytes=1024))
    remote.fetch("a", [(0, len(DATA))], Target())
    session = remote._session
    with session._lock, session._pool._lock:
        in_children(remote)
    remote.close()


def test_pickled_it_is_url_and_options() -> None:
    options = RemoteOptions(max_requests=3)
    remote = Remote("memory://test/", connect=known, options=options, storage_options={"key": "x"})
    remote.fetch("a", [(0, 10)], Target())
    again = pickle.loads(pickle.dumps(remote))
    assert (again.url, again.options, again._storage_options, again._connect) == (
        "memory://test",
        options,
        {"key": "x"},
        known,
    )
    assert not again._sessions
    assert again.read("a", nbytes=len(DATA)) == DATA
    again.close()
    remote.close()


# --------------------------------------------------------------------------------------------------------- commit


@pytest.mark.parametrize("there", [None, b"mine", b"theirs", b"mine and more", b""], ids=repr)
@pytest.mark.parametrize(
    "rules",
    [
        [],
        [Rule("create", lost(), nth=0)],
        [Rule("create", lost(), nth=0), Rule("get_all", timed_out(), nth=range(3))],
        [Rule("create", lost(), nth=0), Rule("create", timed_out(), nth=range(1, 10_000))],
        [Rule("create", refused_own(), nth=0)],
        [Rule("create", conflict(), nth=range(3))],
        [Rule("create", timed_out(), nth=range(2)), Rule("create", lost(), nth=0)],
        [Rule("create", throttled(), nth=range(5))],
        [Rule("get_all", flipped(), nth=0)],
        [Rule("create", expired(), nth=0)],
        [Rule("stat", timed_out(), nth=0), Rule("create", lost(), nth=0)],
    ],
    ids=lambda rules: "-".join(f"{rule.verb}.{rule.effect.__qualname__.split('.')[0]}" for rule in rules) or "none",
)
def test_create_says_whether_the_object_is_ours(there, rules) -> None:
    objects = {} if there is None else {"root": there}
    if there == b"" and any(rule.verb == "get_all" for rule in rules):
        rules = [rule for rule in rules if rule.verb != "get_all"]  # nothing to flip
    fresh = [Rule(rule.verb, rule.effect, rule.name, rule.nth) for rule in rules]
    store, clock = faulty(*fresh, objects=objects), Clock(1000.0)
    remote = remote_of(store, clock=clock)
    assert remote.create("root", b"mine") is (there in {None, b"mine"})
    assert store._store.objects["root"] == (b"mine" if there is None else there)
    assert clock.now - 1000 < 300
    remote.close()


def test_create_without_an_answer_ends_at_the_deadline() -> None:
    clock = Clock(1000.0)
    remote = remote_of(faulty(Rule("create", timed_out())), clock=clock)
    with pytest.raises(KVFormatError, match=r"E208.*attempts"):
        remote.create("root", b"mine")
    assert clock.now - 1000 <= 300
    remote.close()


def test_create_needs_a_precondition() -> None:
    remote = remote_of(faulty(Rule("create", raised(UnsupportedFault))))
    with pytest.raises(KVFormatError, match="local disk") as caught:
        remote.create("root", b"mine")
    assert caught.value.code == "E209"
    remote.close()


def test_of_many_that_create_one_wins_and_the_others_know() -> None:
    store = MemoryStore()
    remotes = [remote_of(store) for _ in range(8)]
    results: dict[int, bool] = {}
    start = threading.Barrier(8)

    def create(place: int) -> None:
        start.wait(PATIENCE_S)
        results[place] = remotes[place].create("root", b"writer %d" % place)

    racing = [threading.Thread(target=create, args=(place,)) for place in range(8)]
    for thread in racing:
        thread.start()
    for thread in racing:
        thread.join(PATIENCE_S)
    (winner,) = [place for place, won in results.items() if won]
    assert store.objects["root"] == b"writer %d" % winner
    for remote in remotes:
        remote.close()


class Overwriting(MemoryStore):
    """Ignores the precondition."""

    def create(self, name, data, *, timeout_s):
        self.put(name, data, timeout_s=timeout_s)


class LyingOverwriting(MemoryStore):
    """Refuses, and replaces all the same."""

    def create(self, name, data, *, timeout_s):
        there = name in self.objects
        self.put(name, data, timeout_s=timeout_s)
        if there:
            raise StoreFault("412, says the gateway")


@pytest.mark.parametrize("rules", [[], [Rule("create", lost(), nth=0)], [Rule("create", lost(), nth=1)]])
def test_a_store_that_honours_the_precondition_passes(rules) -> None:
    store = faulty(*rules)
    remote = remote_of(store, clock=Clock(1000.0))
    remote.require_create("x/")
    assert set(store._store.objects) == {"a"}, "the probe is gone"
    assert all(name == "a" or name.startswith("x/") for _, name in store.calls)
    remote.close()


@pytest.mark.parametrize(
    ("store", "code"),
    [
        (Overwriting(), "E209"),
        (LyingOverwriting(), "E203"),
        (FaultyStore(Overwriting(), [Rule("create", lost(), nth=1)]), "E209"),
        (FaultyStore(MemoryStore(), [Rule("create", raised(UnsupportedFault))]), "E209"),
        (FaultyStore(MemoryStore(), [Rule("create", denied(), nth=1)]), "E207"),
        (FaultyStore(MemoryStore(), [Rule("create", timed_out())]), "E208"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_others_are_refused_and_the_probe_removed(store, code) -> None:
    remote = remote_of(store, clock=Clock(1000.0))
    with pytest.raises(KVFormatError) as caught:
        remote.require_create("")
    assert caught.value.code == code
    assert (getattr(store, "_store", store)).objects == {}
    remote.close()


def test_short_faults_of_a_healthy_object_are_transport() -> None:
    clock = Clock(1000.0)
    remote = remote_of(faulty(Rule("get", raised(ShortFault))), clock=clock)
    with pytest.raises(KVFormatError, match="E208"):
        remote.fetch("a", [(0, 10)], Target())
    assert clock.now - 1000 <= 300
    remote.close()


def test_nothing_that_was_fetched_waits_for_a_garbage_collection() -> None:
    """Into memory of records, which is used again once nothing refers to it."""

    class Sink(Target):
        pass

    remote = remote_of(faulty(), max_requests=2)
    gc.collect()
    gc.disable()
    try:
        kept = []
        for wanted in ([(0, len(DATA))], [(5, 10)], [(0, 3000), (5000, 50)]):
            sink = Sink()
            kept.append(weakref.ref(sink))
            remote.fetch("a", wanted, sink)
            del sink
        deadline = time.monotonic() + PATIENCE_S
        while any(ref() is not None for ref in kept) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of the pool may still hold the last call for a moment
        assert [ref() for ref in kept] == [None] * 3
    finally:
        gc.enable()
    remote.close()
