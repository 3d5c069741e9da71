"""Room in a cache: limits, what goes first, what is pinned, and a count that heals."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvformat.errors import StorageError
from kvformat.storage import cache_ledger, cache_room
from kvformat.storage.cache import Cache
from tests.storage.caching import NBYTES, Origin, content, files, impatient, keys_of, ledger, options, usage


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Room for three."""
    return impatient(Cache(options(tmp_path / "cache", entries=3)), room_s=0.05)


def rescan(cache: Cache) -> None:
    """Look at all files, dropping nothing."""
    cache._room.make(0)


def set_atime(path: Path, seconds: float) -> None:
    status = path.stat()
    os.utime(path, ns=(int(seconds * 10**9), status.st_mtime_ns))


@pytest.mark.parametrize("limit", [0, 1, NBYTES - 1])
def test_a_limit_below_one_entry_names_the_number_needed(tmp_path, origin, limit):
    cache = Cache(options(tmp_path / "cache", max_nbytes=limit))
    with pytest.raises(StorageError, match=f"E210.*at least {NBYTES}"):
        origin.get(cache, "key")
    assert origin.fetched == []
    assert usage(tmp_path / "cache") == 0
    assert files(tmp_path / "cache", "parts") == []


def test_a_limit_of_exactly_one_entry(tmp_path, origin):
    cache = Cache(options(tmp_path / "cache", entries=1))
    for key in "abab":
        assert bytes(origin.get(cache, key).read(0, NBYTES)) == content(key)
        assert usage(tmp_path / "cache") == NBYTES


def test_what_is_there_is_used_whatever_the_limit_is_now(cache, origin):
    origin.get(cache, "key")
    small = Cache(options(cache.options.dir, max_nbytes=1))
    assert bytes(origin.get(small, "key").read(0, NBYTES)) == content("key")


def test_what_was_used_longest_ago_goes_first(cache, origin):
    for key in "abc":
        origin.get(cache, key)
    origin.get(cache, "a")
    origin.get(cache, "d")
    assert keys_of(cache.options.dir) == {"a", "c", "d"}
    origin.get(cache, "c")
    origin.get(cache, "e", use_mmap=False)
    assert keys_of(cache.options.dir) == {"c", "d", "e"}
    assert ledger(cache) == usage(cache.options.dir)


def test_reading_by_ranges_does_not_upset_the_order(cache, origin):
    for key in "abc":
        origin.get(cache, key)
    for key in "cba":
        origin.get(cache, key, use_mmap=False)
    origin.get(cache, "d")
    assert keys_of(cache.options.dir) == {"a", "b", "d"}


@pytest.mark.parametrize("use_mmap", [True, False])
def test_what_is_in_use_stays(cache, origin, use_mmap):
    held = origin.get(cache, "a", use_mmap=use_mmap)
    for key in "bcdefg":
        origin.get(cache, key)
        assert "a" in keys_of(cache.options.dir)
    assert held.is_current()
    del held
    for key in "hij":
        origin.get(cache, key)
    assert keys_of(cache.options.dir) == {"h", "i", "j"}


def test_a_view_pins_as_long_as_it_lives(cache, origin):
    view = origin.get(cache, "a").read(0, NBYTES)
    for key in "bcdef":
        origin.get(cache, key)
    assert "a" in keys_of(cache.options.dir)
    assert bytes(view) == content("a")


def test_the_cache_is_gone_past_where_all_is_in_use(cache, origin):
    held = [origin.get(cache, key) for key in "abc"]
    assert origin.get(cache, "d") is None
    assert origin.fetched == ["a", "b", "c"]
    assert files(cache.options.dir, "parts") == []
    assert ledger(cache) == 3 * NBYTES
    assert all(file.is_current() for file in held)
    del held[1]
    assert origin.get(cache, "d") is not None
    assert keys_of(cache.options.dir) == {"a", "c", "d"}


def test_what_was_waited_for_in_vain_is_not_waited_for_again_at_once(cache, origin):
    impatient(cache, room_s=0.2)
    held = [origin.get(cache, key) for key in "abc"]
    assert origin.get(cache, "d") is None
    impatient(cache, room_s=10**6)
    assert origin.get(cache, "e") is None  # and does not take for ever
    held.clear()
    assert origin.get(cache, "e") is not None


def test_room_is_waited_for(cache, origin):
    impatient(cache, room_s=60)
    held = [origin.get(cache, key) for key in "abc"]
    asked = threading.Event()
    real = cache._room.reserve

    def reserve(*args):
        got = real(*args)
        asked.set()
        return got

    cache._room.reserve = reserve
    found = []
    thread = threading.Thread(target=lambda: found.append(origin.get(cache, "d")))
    thread.start()
    assert asked.wait(60)
    held.clear()
    thread.join(60)
    assert bytes(found[0].read(0, NBYTES)) == content("d")


def test_room_is_reserved_before_the_first_byte(cache, origin):
    for key in "abc":
        origin.get(cache, key)
    seen = []

    def fill(write):
        seen.append((usage(cache.options.dir), ledger(cache), len(files(cache.options.dir, "entries"))))
        write(0, content("d"))

    origin.get(cache, "d", fill=fill)
    assert seen == [(3 * NBYTES, 3 * NBYTES, 2)]


def test_a_part_in_work_is_never_dropped(cache, origin):
    inner = Origin()

    def fill(write):
        write(0, content("a"))
        for key in "bcdef":
            assert bytes(inner.get(cache, key).read(0, NBYTES)) == content(key)
            assert usage(cache.options.dir) <= 3 * NBYTES

    assert bytes(origin.get(cache, "a", fill=fill).read(0, NBYTES)) == content("a")
    assert ledger(cache) == usage(cache.options.dir)


def test_a_large_entry_takes_the_place_of_several(tmp_path):
    small, large = Origin(1000), Origin(2500)
    cache = Cache(options(tmp_path / "cache", max_nbytes=4000))
    for key in "abcd":
        small.get(cache, key)
    large.get(cache, "large")
    assert keys_of(tmp_path / "cache") == {"d", "large"}


def test_many_entries_leave_some_spare_room(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_room, "_MANY", 10)
    looks = []
    real = cache_room.scan
    monkeypatch.setattr(cache_room, "scan", lambda folder: looks.append(1) or real(folder))
    origin = Origin(100)
    cache = Cache(options(tmp_path / "cache", max_nbytes=6400))
    for number in range(64):
        origin.get(cache, f"a{number}")
    looks.clear()
    for number in range(64):
        origin.get(cache, f"b{number}")
        assert usage(tmp_path / "cache") <= 6400
    assert 1 < len(looks) < 12
    assert len(keys_of(tmp_path / "cache")) > 64 * 7 // 8 - 2


# -- the floor, and a file system that is full


def floor(monkeypatch, cache, free):
    """A file system of which ``free()`` bytes are free."""

    class Found:
        f_frsize = 1

        @property
        def f_bavail(self):
            return free()

    monkeypatch.setattr(os, "statvfs", lambda path: Found())


def test_the_floor_of_free_bytes_is_kept(tmp_path, origin, monkeypatch):
    cache = impatient(Cache(options(tmp_path / "cache", min_free_nbytes=1000)), room_s=0.05)
    floor(monkeypatch, cache, lambda: 1000 + 2 * NBYTES - usage(tmp_path / "cache"))
    held = [origin.get(cache, key) for key in "ab"]
    assert origin.get(cache, "c") is None
    assert keys_of(tmp_path / "cache") == {"a", "b"}
    held.clear()
    assert bytes(origin.get(cache, "c").read(0, NBYTES)) == content("c")
    assert keys_of(tmp_path / "cache") == {"b", "c"}


def test_a_full_file_system_makes_room_of_the_cache(tmp_path, origin, monkeypatch):
    cache = Cache(options(tmp_path / "cache"))
    for key in "abcd":
        origin.get(cache, key)
    real = os.posix_fallocate

    def allocate(fd, offset, nbytes):
        if len(files(tmp_path / "cache", "entries")) > 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    origin.get(cache, "e")
    assert keys_of(tmp_path / "cache") == {"c", "d", "e"}
    assert ledger(cache) == usage(tmp_path / "cache")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_an_error_with_the_numbers(tmp_path, origin, monkeypatch, code):
    cache = Cache(options(tmp_path / "cache"))
    held = origin.get(cache, "held")
    origin.get(cache, "loose")

    def allocate(fd, offset, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(StorageError, match=f"E200.*{NBYTES:,} bytes are needed, .* are free"):
        origin.get(cache, "key")
    assert origin.fetched == ["held", "loose"]
    assert keys_of(tmp_path / "cache") == {"held"}
    assert files(tmp_path / "cache", "parts") == []
    assert ledger(cache) == usage(tmp_path / "cache")
    assert held.is_current()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
@pytest.mark.parametrize("at", [0, 1])
def test_full_while_it_is_filled(tmp_path, origin, monkeypatch, code, at):
    """Where a file system cannot allocate, it may turn out to be full later."""

    def allocate(fd, offset, nbytes):
        raise OSError(code, os.strerror(code))

    writes = []
    real = os.pwrite

    def pwrite(fd, data, offset):
        if len(data) > 16:  # not the ledger
            writes.append(offset)
            if len(writes) > at:
                raise OSError(errno.ENOSPC, "no space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    cache = Cache(options(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(StorageError, match="E200"):
            origin.get(cache, "key")
    assert usage(tmp_path / "cache") == 0
    assert files(tmp_path / "cache", "parts") == []
    assert ledger(cache) == 0
    assert bytes(origin.get(cache, "key").read(0, NBYTES)) == content("key")


def test_writes_may_be_short(tmp_path, origin, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))
    assert bytes(origin.get(Cache(options(tmp_path / "cache")), "key").read(0, NBYTES)) == content("key")


def test_a_bad_disk_is_said(tmp_path, origin, monkeypatch):
    cache = Cache(options(tmp_path / "cache"))
    real = os.pwrite

    def pwrite(fd, data, offset):
        if len(data) > 16:
            raise OSError(errno.EIO, "input/output error")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageError, match="E203"):
        origin.get(cache, "key")
    assert files(tmp_path / "cache", "parts") == []


# -- the ledger


@pytest.mark.parametrize("text", [b"", b"junk", bytes(16), bytes(17), b"\xff" * 16, b"x" * 4096, None])
def test_a_ledger_that_says_nothing_is_made_anew(cache, origin, text):
    for key in "abc":
        origin.get(cache, key)
    path = Path(cache._folder.ledger)
    path.unlink() if text is None else path.write_bytes(text)
    assert ledger(cache) is None
    origin.get(cache, "d")
    assert usage(cache.options.dir) == 3 * NBYTES == ledger(cache)


def test_a_ledger_from_before_the_machine_started_is_not_believed(cache, origin, monkeypatch):
    for key in "abc":
        origin.get(cache, key)
    with cache._room._ledger.locked() as page:
        page.used = 0  # as a crash of the machine may leave it
    monkeypatch.setattr(cache_ledger, "_started_at", lambda: time.time() + 100)
    origin.get(cache, "d")
    assert usage(cache.options.dir) <= 3 * NBYTES


def test_the_machine_started_in_the_past():
    assert cache_ledger._started_at() < time.time()


def test_a_ledger_that_is_too_high_heals(cache, origin):
    origin.get(cache, "a")
    with cache._room._ledger.locked() as page:
        page.used = 10**15
    origin.get(cache, "b")
    assert keys_of(cache.options.dir) == {"a", "b"}
    assert ledger(cache) == 2 * NBYTES


def test_entries_removed_by_hand_give_room_at_the_next_look(cache, origin):
    for key in "abc":
        origin.get(cache, key)
    for path in files(cache.options.dir, "entries"):
        path.unlink()
    for key in "def":
        origin.get(cache, key)
    assert keys_of(cache.options.dir) == {"d", "e", "f"}
    assert ledger(cache) == 3 * NBYTES


def test_a_held_ledger_is_not_waited_for_without_end(cache, origin):
    impatient(cache, ledger_s=0.05)
    origin.get(cache, "there")
    fd = os.open(cache._folder.ledger, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert origin.get(cache, "key") is None
        impatient(cache, ledger_s=10**6)
        assert origin.get(cache, "another") is None  # and does not take for ever
        assert bytes(origin.get(cache, "there").read(0, NBYTES)) == content("there")
        files(cache.options.dir, "entries")[0].write_bytes(bytes(NBYTES))
        assert origin.get(cache, "there") is None  # damaged, and cannot be removed now
    finally:
        os.close(fd)
    assert origin.fetched == ["there"]
    assert files(cache.options.dir, "parts") == []
    assert bytes(origin.get(cache, "there").read(0, NBYTES)) == content("there")


def test_parts_of_killed_processes_are_removed_at_the_start(cache, origin):
    origin.get(cache, "a")
    Path(cache._folder.part("dead")).write_bytes(bytes(NBYTES))
    with cache._room._ledger.locked() as page:
        page.used = 2 * NBYTES
    Cache(cache.options)
    assert files(cache.options.dir, "parts") == []
    assert ledger(cache) == NBYTES


@pytest.mark.parametrize("left", [0, 5, NBYTES, NBYTES + 5])
def test_a_part_of_a_killed_process_is_taken_over(cache, origin, left):
    for key in "ab":
        origin.get(cache, key)
    Path(cache._folder.part("key")).write_bytes(b"\xaa" * left)
    with cache._room._ledger.locked() as page:
        page.used = 2 * NBYTES + left
    assert bytes(origin.get(cache, "key").read(0, NBYTES)) == content("key")
    assert files(cache.options.dir, "parts") == []
    assert ledger(cache) == usage(cache.options.dir) <= 3 * NBYTES


def test_killed_between_its_two_names(cache, origin):
    """Published, and the part not yet removed: the same file twice."""
    origin.get(cache, "a")
    os.link(files(cache.options.dir, "entries")[0], cache._folder.part("a"))
    rescan(cache)
    assert ledger(cache) == NBYTES
    assert keys_of(cache.options.dir) == {"a"}
    assert files(cache.options.dir, "parts") == []
    os.link(files(cache.options.dir, "entries")[0], cache._folder.part("a"))
    held = origin.get(cache, "a")
    rescan(cache)
    assert ledger(cache) == NBYTES
    assert held.is_current()


# -- clocks


@pytest.mark.parametrize("seconds", [0, 1, 2**31, 2**32 + 5, 2**33])
def test_a_time_that_cannot_be_only_affects_who_goes_first(cache, origin, seconds):
    for key in "abc":
        origin.get(cache, key)
    set_atime(Path(cache._folder.entry("c")), seconds)
    origin.get(cache, "d")
    assert keys_of(cache.options.dir) == {"a", "b", "d"}
    assert ledger(cache) == usage(cache.options.dir)


@pytest.mark.parametrize("offset_s", [-(10**9), -3600, 3600, 10**9])
def test_a_clock_that_jumps(cache, origin, monkeypatch, offset_s):
    for key in "abc":
        origin.get(cache, key)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + offset_s * 10**9)
    monkeypatch.setattr(time, "time", lambda: (real() + offset_s * 10**9) / 1e9)
    for key in "defadefa":
        assert bytes(origin.get(cache, key).read(0, NBYTES)) == content(key)
        assert usage(cache.options.dir) <= 3 * NBYTES
    assert len(keys_of(cache.options.dir)) == 3
    assert files(cache.options.dir, "parts") == []


# -- against a model


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("get"), st.integers(0, 7)),
            st.tuples(st.just("hold"), st.integers(0, 7)),
            st.tuples(st.just("let go"), st.integers(0, 7)),
            st.tuples(st.just("damage"), st.integers(0, 7)),
            st.tuples(st.just("restart"), st.just(0)),
        ),
        max_size=40,
    ),
    st.integers(1, 5),
)
def test_like_a_model(tmp_path_factory, steps, room):
    """Right data, the least recently used dropped, never what is held, never too much."""
    directory = tmp_path_factory.mktemp("cache") / "cache"
    origin = Origin(100)
    given_options = options(directory, entries=room, nbytes=100)
    cache = impatient(Cache(given_options), room_s=0)
    model: list[int] = []  # least recently used first
    held: dict[int, object] = {}
    for step, number in steps:
        key = f"key{number}"
        if step == "restart":
            cache = impatient(Cache(given_options), room_s=0)
        elif step == "let go":
            held.pop(number, None)
        elif step == "damage":
            if number in model and number not in held:
                Path(cache._folder.entry(key)).write_bytes(bytes(100))
        else:
            file = None  # unpins
            file = origin.get(cache, key)
            if number in model:
                model.remove(number)
            elif len(model) == room:
                loose = [other for other in model if other not in held]
                if not loose:
                    assert file is None
                    continue
                model.remove(loose[0])
            model.append(number)
            assert bytes(file.read(0, 100)) == content(key, 100)
            if step == "hold":
                held[number] = file
        assert keys_of(directory) == {f"key{other}" for other in model}
        assert ledger(cache) in (len(model) * 100, None)
        assert files(directory, "parts") == []
    for number, file in held.items():
        assert file.is_current()
        assert bytes(file.read(0, 100)) == content(f"key{number}", 100)
