"""One cache, many processes and threads."""

from __future__ import annotations

import fcntl
import multiprocessing
import pickle
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvformat.errors import make_error
from kvformat.storage import cache_filling
from kvformat.storage.cache import Cache
from kvformat.storage.cache_filling import Patience
from kvformat.storage.cache_part import InWork
from tests.storage.caching import NBYTES, PATH, Origin, content, files, impatient, keys_of, ledger, options, usage

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 120


def note(path: Path, text: str = "x") -> None:
    """Add to a file that several processes write to."""
    with path.open("a") as file:
        file.write(text)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def until(condition) -> None:
    """Look again and again, for a generous time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def start(function, *args, context=FORK):
    process = context.Process(target=function, args=args)
    process.start()
    return process


def join(*processes, code=0) -> None:
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == code
        process.close()


def one_key(cache: Cache, notes: Path, everyone: int, use_mmap: bool) -> None:
    """Ask for the key everybody asks for; its fetch goes on until all have asked."""
    origin = Origin()

    def fill(write):
        note(notes / "fetched")
        until(lambda: size(notes / "asked") == everyone)
        data = content("key")
        for at in range(0, NBYTES, 1000):
            write(at, data[at : at + 1000])

    note(notes / "asked")
    file = origin.get(cache, "key", fill=fill, use_mmap=use_mmap)
    assert bytes(file.read(0, NBYTES)) == content("key")


@pytest.mark.parametrize("use_mmap", [True, False])
def test_sixteen_processes_fetch_one_key_once(tmp_path, use_mmap):
    cache = Cache(options(tmp_path / "cache"))
    join(*[start(one_key, cache, tmp_path, 16, use_mmap) for _ in range(16)])
    assert size(tmp_path / "fetched") == 1
    assert files(tmp_path / "cache", "parts") == []
    assert ledger(cache) == usage(tmp_path / "cache") == NBYTES


def test_sixteen_threads_fetch_one_key_once(tmp_path):
    cache = Cache(options(tmp_path / "cache"))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: one_key(cache, tmp_path, 16, True), range(16)))
    assert size(tmp_path / "fetched") == 1
    assert ledger(cache) == usage(tmp_path / "cache") == NBYTES


def many_keys(cache: Cache, notes: Path, seed: int) -> None:
    origin = Origin()
    past = 0
    for step in range(40):
        key = f"key{(seed * 7 + step * (seed + 1)) % 10}"
        file = None  # unpins
        file = origin.get(cache, key, use_mmap=bool(step % 2))
        if file is None:
            past += 1
        else:
            assert bytes(file.read(0, NBYTES)) == content(key)
    note(notes / "past", f"{past}\n")


def test_eight_processes_with_room_for_three(tmp_path):
    cache = Cache(options(tmp_path / "cache", entries=3))
    processes = [start(many_keys, cache, tmp_path, seed) for seed in range(8)]
    looks = []
    while any(process.is_alive() for process in processes):
        with cache._room._ledger.locked() as page:  # else a look would see what was there one after the other
            looks.append((usage(tmp_path / "cache"), page.used))
    join(*processes)
    assert max(used for used, _ in looks) == 3 * NBYTES
    assert all(noted is None or used <= noted for used, noted in looks)
    assert len((tmp_path / "past").read_text().splitlines()) == 8
    cache._room.make(0)
    assert ledger(cache) == usage(tmp_path / "cache") <= 3 * NBYTES
    assert files(tmp_path / "cache", "parts") == []


def test_what_another_process_uses_stays(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache", entries=2)), room_s=0.05)
    origin = Origin()

    def hold():
        file = Origin().get(cache, "held")
        note(tmp_path / "holding")
        until((tmp_path / "done").exists)
        assert file.is_current()

    process = start(hold)
    until((tmp_path / "holding").exists)
    for key in "abcd":
        assert origin.get(cache, key) is not None
        assert "held" in keys_of(tmp_path / "cache")
    mine = origin.get(cache, "e")
    assert origin.get(cache, "f") is None
    note(tmp_path / "done")
    join(process)
    assert origin.get(cache, "f") is not None
    assert mine.is_current()


def test_a_killed_process_gives_back_what_it_held(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache", entries=1)), room_s=0.05)

    def hold():
        file = Origin().get(cache, "held")
        note(tmp_path / "holding")
        signal.pause()
        assert file

    process = start(hold)
    until((tmp_path / "holding").exists)
    assert Origin().get(cache, "key") is None
    process.kill()
    join(process, code=-signal.SIGKILL)
    assert Origin().get(cache, "key") is not None


def test_waiters_take_over_from_a_killed_process_at_once(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache", entries=1)), stall_s=10**6, room_s=0)

    def fill_for_ever():
        def fill(write):
            write(0, b"\xff" * 100)
            note(tmp_path / "filling")
            signal.pause()

        Origin().get(cache, "key", fill=fill)

    def wait():
        note(tmp_path / "waiting")
        origin = Origin()
        file = origin.get(cache, "key")
        assert bytes(file.read(0, NBYTES)) == content("key")
        note(tmp_path / "fetched", "x" * len(origin.fetched))

    filler = start(fill_for_ever)
    until((tmp_path / "filling").exists)
    waiters = [start(wait) for _ in range(4)]
    until(lambda: size(tmp_path / "waiting") == 4)
    filler.kill()
    join(filler, code=-signal.SIGKILL)
    join(*waiters)
    assert size(tmp_path / "fetched") == 1
    assert ledger(cache) == usage(tmp_path / "cache") == NBYTES


def test_a_process_that_makes_no_progress_is_gone_past(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache")), stall_s=0.1)
    origin = Origin()
    release = threading.Event()

    def fill(write):
        note(tmp_path / "filling")
        assert release.wait(TIMEOUT_S)
        write(0, content("key"))

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(origin.get, cache, "key", fill=fill)
        until((tmp_path / "filling").exists)
        assert Origin().get(cache, "key") is None
        assert bytes(Origin().get(cache, "other").read(0, NBYTES)) == content("other")
        release.set()
        assert bytes(slow.result(TIMEOUT_S).read(0, NBYTES)) == content("key")
    assert ledger(cache) == usage(tmp_path / "cache")


def test_a_slow_process_that_goes_on_is_waited_for(tmp_path, monkeypatch):
    """With a clock that goes 20 seconds forward between two looks, and a patience of 30."""
    cache = Cache(options(tmp_path / "cache"))
    clock = SimpleNamespace(now=1.0, sleep=lambda seconds: None)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(cache_filling, "time", clock)

    def looks(seen):
        filling = cache_filling.Filling(
            cache._folder, cache._room, Patience(), "key", 0, path=PATH, fill=None, check=None, use_mmap=True
        )
        for number, found in enumerate(seen):
            if not filling._wait(found):
                return number
            clock.now += 20
        return len(seen)

    assert looks([InWork(1, 1, 5, mtime) for mtime in range(100)]) == 100  # it writes
    assert looks([InWork(1, inode, 0, 7) for inode in range(100)]) == 100  # one after the other gives up
    assert looks([InWork(1, 1, 5, 7)] * 100) == 2
    assert looks([None] * 100) == 2
    assert looks([InWork(1, 1, 5, look // 2) for look in range(100)]) == 100


def test_a_failed_process_is_followed_by_the_next(tmp_path):
    """Each says what went wrong for itself; one that succeeds serves those behind it."""
    cache = Cache(options(tmp_path / "cache"))
    fetches = Counter()
    lock = threading.Lock()

    def get(number):
        def fill(write):
            with lock:
                fetches["all"] += 1
                if fetches["all"] <= 3:
                    raise make_error("E208", "no answer", path=PATH)
            write(0, content("key"))

        try:
            file = Origin().get(cache, "key", fill=fill)
        except OSError as error:
            return error.code
        return bytes(file.read(0, NBYTES)) == content("key")

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(get, range(8))) == {"E208": 3, True: 5}
    assert fetches["all"] == 4
    assert ledger(cache) == usage(tmp_path / "cache")


def test_many_that_find_it_damaged_fetch_it_once(tmp_path):
    cache = Cache(options(tmp_path / "cache"))
    Origin().get(cache, "key")
    (path,) = files(tmp_path / "cache", "entries")
    path.write_bytes(bytes(NBYTES))
    barrier = threading.Barrier(8)
    origins = [Origin() for _ in range(8)]

    def get(origin):
        proper = origin.check("key")

        def check(file):
            if not origin.checked:
                barrier.wait(TIMEOUT_S)  # all of them look at the damaged one
            proper(file)

        return bytes(origin.get(cache, "key", check=check).read(0, NBYTES))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(get, origins)) == {content("key")}
    assert sum(len(origin.fetched) for origin in origins) == 1
    assert ledger(cache) == usage(tmp_path / "cache") == NBYTES


def test_no_room_is_said_to_all_that_wait_without_adding_up(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache", entries=1)), room_s=4)
    held = Origin().get(cache, "held")
    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: Origin().get(cache, "key"), range(16))) == [None] * 16
    assert time.monotonic() - began < 60, "one after the other would be 64"
    assert held.is_current()
    assert files(tmp_path / "cache", "parts") == []


def test_an_entry_that_cannot_be_pinned_is_gone_past(tmp_path):
    """As while another process that drops or publishes it is stopped."""
    cache = impatient(Cache(options(tmp_path / "cache")), stall_s=0.1)
    origin = Origin()
    origin.get(cache, "key")
    (path,) = files(tmp_path / "cache", "entries")
    with path.open("rb") as entry:
        fcntl.flock(entry, fcntl.LOCK_EX)
        assert origin.get(cache, "key") is None
    assert origin.get(cache, "key") is not None
    assert origin.fetched == ["key"]


# -- ways to start a process


def child(cache: Cache, notes: Path, held=None) -> None:
    origin = Origin()
    for key in ("before", "after", "new"):
        assert bytes(origin.get(cache, key).read(0, NBYTES)) == content(key)
    if held is not None:
        assert bytes(held.read(0, NBYTES)) == content("before")
    note(notes / "fetched", "".join(f"{key} " for key in origin.fetched))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_used_cache_works_in_a_child(tmp_path, method):
    cache = Cache(options(tmp_path / "cache"))
    origin = Origin()
    held = origin.get(cache, "before")
    origin.get(cache, "after")
    context = multiprocessing.get_context(method)
    join(start(child, cache, tmp_path, held if method == "fork" else None, context=context))
    assert (tmp_path / "fetched").read_text() == "new "
    origin.get(cache, "new")
    assert origin.fetched == ["before", "after"]
    assert held.is_current()


def test_a_fork_in_the_middle_of_a_fetch(tmp_path):
    """The child has a copy of the descriptor, and so of the lock, and lives longer than the fetch."""
    cache = impatient(Cache(options(tmp_path / "cache")), stall_s=10**6)
    origin = Origin()
    children = []

    def sleep():
        until((tmp_path / "done").exists)
        child(cache, tmp_path)

    def fill(write):
        write(0, content("before")[:100])
        children.append(start(sleep))
        write(100, content("before")[100:])

    def fail(write):
        children.append(start(sleep))
        raise ZeroDivisionError

    origin.get(cache, "before", fill=fill)
    with pytest.raises(ZeroDivisionError):
        origin.get(cache, "after", fill=fail)
    for key in ("before", "after"):
        assert bytes(origin.get(cache, key).read(0, NBYTES)) == content(key)
    note(tmp_path / "done")
    join(*children)
    assert Counter((tmp_path / "fetched").read_text().split()) == {"new": 1}


def test_a_fork_while_the_ledger_is_held(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache")), ledger_s=10**6)
    with cache._room._ledger.locked():
        process = start(until, (tmp_path / "done").exists)
    assert Origin().get(cache, "key") is not None
    note(tmp_path / "done")
    join(process)


def test_what_a_child_inherited_is_in_use_until_it_lets_go(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache", entries=1)), room_s=0.05)
    held = [Origin().get(cache, "held")]

    def use():
        until((tmp_path / "done").exists)
        assert held[0].is_current()

    process = start(use)
    held.clear()
    assert Origin().get(cache, "key") is None
    note(tmp_path / "done")
    join(process)
    assert Origin().get(cache, "key") is not None


def test_a_pickled_cache_is_small_and_opens_nothing(tmp_path):
    cache = Cache(options(tmp_path / "cache"))
    held = [Origin().get(cache, f"key{number}") for number in range(50)]
    data = pickle.dumps(cache)
    assert len(data) < 1000
    assert len(held) == 50
