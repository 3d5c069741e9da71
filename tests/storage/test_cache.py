"""A cache in one process: what it trusts, what it fetches again, and what it leaves behind."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest

from kvformat.errors import DamageError, KVFormatError
from kvformat.storage import cache_entry, cache_locks
from kvformat.storage.cache import Cache
from kvformat.storage.local_read import FileIdentity, OpenFile
from tests.storage.caching import (
    NBYTES,
    PATH,
    Origin,
    content,
    descriptors,
    files,
    impatient,
    keys_of,
    ledger,
    options,
    usage,
)

BOTH = pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "pread"])


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(options(tmp_path / "cache"))


def the_entry(cache: Cache) -> Path:
    (found,) = files(cache.options.dir, "entries")
    return found


def is_clean(cache: Cache) -> bool:
    """Nothing but whole entries, and a ledger that says so."""
    return files(cache.options.dir, "parts") == [] and ledger(cache) == usage(cache.options.dir)


@BOTH
def test_fetched_once_and_found_again(cache, origin, use_mmap):
    first = origin.get(cache, "key", use_mmap=use_mmap)
    second = origin.get(cache, "key", use_mmap=use_mmap)
    assert origin.fetched == ["key"]
    assert origin.checked == ["key", "key"]
    assert first.identity == second.identity
    for file in (first, second):
        assert isinstance(file, OpenFile)
        assert file.path == PATH
        assert (file.mapped is not None) == use_mmap
        assert file.is_current()
        assert bytes(file.read(0, NBYTES)) == content("key")
        into = bytearray(7)
        file.read_into(memoryview(into), 100)
        assert bytes(into) == content("key")[100:107]
        with pytest.raises(KVFormatError, match="E005"):
            file.read(NBYTES, 1)
    assert is_clean(cache)


def test_the_mapping_is_writable_and_private(cache, origin):
    file = origin.get(cache, "key")
    file.mapped[0] ^= 0xFF
    assert the_entry(cache).read_bytes() == content("key")
    assert file.is_current()


@BOTH
def test_a_known_file_is_not_checked_again(cache, origin, use_mmap):
    known = origin.get(cache, "key", use_mmap=use_mmap).identity
    for _ in range(3):
        assert origin.get(cache, "key", known=known, use_mmap=use_mmap).identity == known
    assert origin.checked == ["key"]


@BOTH
def test_a_file_that_was_written_to_is_not_the_known_one(cache, origin, use_mmap):
    file = origin.get(cache, "key", use_mmap=use_mmap)
    known = file.identity
    with the_entry(cache).open("r+b") as entry:
        entry.seek(17)
        entry.write(b"\xff")
    os.utime(the_entry(cache), ns=(known.mtime_ns, known.mtime_ns + 1))
    assert not file.is_current()
    again = origin.get(cache, "key", known=known, use_mmap=use_mmap)
    assert bytes(again.read(0, NBYTES)) == content("key")
    assert again.identity != known
    assert origin.fetched == ["key", "key"]


def test_a_known_identity_of_another_size_is_no_proof(cache, origin):
    origin.get(cache, "key")
    os.truncate(the_entry(cache), 5)
    found = the_entry(cache).stat()
    known = FileIdentity(found.st_dev, found.st_ino, 5, found.st_mtime_ns, 0)
    assert bytes(origin.get(cache, "key", known=known).read(0, NBYTES)) == content("key")


def test_use_does_not_change_the_identity(cache, origin):
    first = origin.get(cache, "key")
    before = the_entry(cache).stat()
    origin.get(cache, "key")
    after = the_entry(cache).stat()
    assert after.st_atime_ns > before.st_atime_ns
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_ctime_ns >= before.st_ctime_ns
    assert first.is_current()


@pytest.mark.parametrize("how", ["flipped", "shorter", "empty", "longer"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_entry_is_fetched_once_more(cache, origin, how, restart):
    origin.get(cache, "key")
    path = the_entry(cache)
    data = bytearray(content("key"))
    data[NBYTES // 3] ^= 4
    path.write_bytes({"flipped": bytes(data), "shorter": data[:-1], "empty": b"", "longer": data + b"x"}[how])
    if restart:
        cache = Cache(cache.options)
    file = origin.get(cache, "key")
    assert bytes(file.read(0, NBYTES)) == content("key")
    assert origin.fetched == ["key", "key"]
    assert path.read_bytes() == content("key")
    assert ledger(cache) >= usage(cache.options.dir)


@BOTH
def test_damaged_twice_is_an_error_and_leaves_nothing(cache, origin, use_mmap):
    origin.damage = 2
    with pytest.raises(DamageError, match="E070"):
        origin.get(cache, "key", use_mmap=use_mmap)
    assert origin.fetched == ["key", "key"]
    assert usage(cache.options.dir) == 0
    assert is_clean(cache)
    assert bytes(origin.get(cache, "key").read(0, NBYTES)) == content("key")


def test_damaged_in_the_cache_and_at_the_origin_is_an_error(cache, origin):
    origin.get(cache, "key")
    the_entry(cache).write_bytes(bytes(NBYTES))
    origin.damage = 5
    with pytest.raises(DamageError, match="E070"):
        origin.get(cache, "key")
    assert origin.fetched == ["key", "key"]
    assert is_clean(cache)
    assert usage(cache.options.dir) == 0


def test_damaged_once_on_the_way_is_fetched_again(cache, origin):
    origin.damage = 1
    assert bytes(origin.get(cache, "key").read(0, NBYTES)) == content("key")
    assert origin.fetched == ["key", "key"]
    assert is_clean(cache)


@pytest.mark.parametrize("error", [OSError("reset"), KeyboardInterrupt(), ValueError("own"), SystemExit(3)])
def test_what_a_fetch_raises_is_raised(cache, origin, error):
    def fill(write):
        write(0, b"some")
        raise error

    with pytest.raises(type(error)) as raised:
        origin.get(cache, "key", fill=fill)
    assert raised.value is error
    assert usage(cache.options.dir) == 0
    assert is_clean(cache)


def test_what_a_check_raises_on_other_grounds_is_raised_at_once(cache, origin):
    def check(file):
        raise MemoryError

    with pytest.raises(MemoryError):
        origin.get(cache, "key", check=check)
    assert origin.fetched == ["key"]
    assert usage(cache.options.dir) == 0
    assert is_clean(cache)
    origin.get(cache, "key")
    with pytest.raises(MemoryError):
        origin.get(cache, "key", check=check)
    assert keys_of(cache.options.dir) == {"key"}  # nobody said that it is damaged


@pytest.mark.parametrize("brought", [0, 1, NBYTES - 1, NBYTES + 1])
def test_a_fetch_that_brings_another_number_of_bytes(cache, origin, brought):
    with pytest.raises(DamageError, match="E005"):
        origin.get(cache, "key", fill=lambda write: write(0, bytes(brought)), check=None)
    assert usage(cache.options.dir) == 0
    assert is_clean(cache)


def test_a_fetch_before_the_beginning(cache, origin):
    with pytest.raises(DamageError, match="E005"):
        origin.get(cache, "key", fill=lambda write: write(-1, bytes(2)))
    assert is_clean(cache)


def test_a_fetch_may_write_from_threads(cache):
    origin = Origin(1 << 20)
    step = 1 << 14

    def fill(write):
        data = content("key", origin.nbytes)
        threads = [
            threading.Thread(target=write, args=(at, data[at : at + step])) for at in range(0, origin.nbytes, step)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert bytes(origin.get(cache, "key", fill=fill).read(0, origin.nbytes)) == content("key", origin.nbytes)


def test_a_write_after_the_end_changes_no_file(cache, origin):
    kept = []

    def fill(write):
        write(0, content("key"))
        kept.append(write)

    origin.get(cache, "key", fill=fill)
    with pytest.raises(KVFormatError):
        kept[0](0, b"late")
    assert the_entry(cache).read_bytes() == content("key")


@BOTH
def test_an_empty_entry(cache, use_mmap):
    origin = Origin(0)
    for _ in range(2):
        file = origin.get(cache, "key", use_mmap=use_mmap)
        assert bytes(file.read(0, 0)) == b""
        assert file.mapped is None
    assert origin.fetched == ["key"]


def test_without_a_check_size_is_all_that_counts(cache, origin):
    origin.get(cache, "key", check=None)
    the_entry(cache).write_bytes(bytes(NBYTES))
    assert bytes(origin.get(cache, "key", check=None).read(0, NBYTES)) == bytes(NBYTES)
    os.truncate(the_entry(cache), 5)
    assert bytes(origin.get(cache, "key", check=None).read(0, NBYTES)) == content("key")


@pytest.mark.parametrize("key", ["", "a/b", "../../x", "a b", "ä", "k\n", "x" * 201, "nul\0"])
def test_keys_that_could_lead_elsewhere_are_refused(cache, origin, key):
    with pytest.raises(KVFormatError, match="E081"):
        origin.get(cache, key)
    assert origin.fetched == []


@pytest.mark.parametrize("key", [".", "..", "-", "a.entry", ".part", "A" * 200])
def test_keys_that_only_look_odd_work(cache, origin, key):
    for _ in range(2):
        assert bytes(origin.get(cache, key).read(0, NBYTES)) == content(key)
    assert origin.fetched == [key]


def test_equal_file_names_of_two_datasets_do_not_meet(cache, origin):
    first = origin.get(cache, "1111-shard-0", path="s3://a/shard-0")
    second = origin.get(cache, "2222-shard-0", path="s3://b/shard-0")
    assert bytes(first.read(0, NBYTES)) == content("1111-shard-0")
    assert bytes(second.read(0, NBYTES)) == content("2222-shard-0")
    assert (first.path, second.path) == ("s3://a/shard-0", "s3://b/shard-0")


def test_what_is_there_is_found_again_by_another_cache(cache, origin):
    origin.get(cache, "key")
    origin.get(Cache(cache.options), "key")
    origin.get(pickle.loads(pickle.dumps(cache)), "key")
    assert origin.fetched == ["key"]


def test_it_pickles_to_its_options(cache):
    again = pickle.loads(pickle.dumps(cache))
    assert again.options == cache.options
    assert len(pickle.dumps(cache)) < 1000


@BOTH
def test_files_are_closed_when_nothing_refers_to_them(cache, origin, use_mmap, tmp_path):
    origin.get(cache, "key", use_mmap=use_mmap)
    gc.collect()
    before = descriptors(tmp_path)
    file = origin.get(cache, "key", use_mmap=use_mmap)
    held = [origin.get(cache, f"other{n}", use_mmap=use_mmap) for n in range(3)]
    view = memoryview(file.read(0, 5))
    assert len(descriptors(tmp_path)) == len(before) + 4
    del file, held, view
    assert descriptors(tmp_path) == before


def test_no_descriptor_is_lost_where_something_fails(cache, origin, tmp_path):
    before = descriptors(tmp_path)
    origin.damage = 2
    for kind in (KVFormatError, ZeroDivisionError):
        with pytest.raises(kind):
            origin.get(cache, "key", **({} if kind is KVFormatError else {"fill": lambda write: 1 / 0}))
    entry = Path(cache._folder.entry("key"))
    entry.parent.mkdir()
    os.mkfifo(entry)
    with pytest.raises(KVFormatError, match="E211"):
        origin.get(cache, "key")
    gc.collect()
    assert descriptors(tmp_path) == before


@pytest.mark.parametrize("use_mmap", [True, False])
def test_a_file_system_that_maps_nothing_is_read(cache, origin, monkeypatch, use_mmap):
    def refuse(fd, nbytes):
        raise OSError(errno.ENODEV, "no such device")

    monkeypatch.setattr(cache_entry, "map_file", refuse)
    for _ in range(2):
        file = origin.get(cache, "key", use_mmap=use_mmap)
        assert file.mapped is None
        assert bytes(file.read(0, NBYTES)) == content("key")


def test_too_many_mappings_are_said(cache, origin, monkeypatch):
    def refuse(fd, nbytes):
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    monkeypatch.setattr(cache_entry, "map_file", refuse)
    with pytest.raises(KVFormatError, match="E204"):
        origin.get(cache, "key")
    assert is_clean(cache)
    assert usage(cache.options.dir) == 0


@pytest.fixture
def unlockable(monkeypatch):
    def refuse(fd, kind):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(cache_locks.fcntl, "flock", refuse)


@BOTH
def test_without_locks_all_is_right_all_the_same(unlockable, tmp_path, origin, use_mmap):
    cache = Cache(options(tmp_path / "cache", entries=3))
    for key in "abcdabcdeab":
        assert bytes(origin.get(cache, key, use_mmap=use_mmap).read(0, NBYTES)) == content(key)
        assert usage(cache.options.dir) <= cache.options.max_nbytes
    assert is_clean(cache)


def test_without_locks_two_that_fetch_the_same_both_succeed(unlockable, cache, origin):
    other = Origin()

    def fill(write):
        write(0, content("key"))
        assert bytes(other.get(cache, "key").read(0, NBYTES)) == content("key")

    file = origin.get(cache, "key", fill=fill)
    assert bytes(file.read(0, NBYTES)) == content("key")
    assert is_clean(cache)
    assert usage(cache.options.dir) == NBYTES


def test_without_locks_what_was_left_long_ago_is_removed(unlockable, cache):
    own = cache._folder.own_part("key")
    for path, age_s in ((own, 25 * 3600), (cache._folder.own_part("key"), 60)):
        Path(path).write_bytes(bytes(10))
        status = Path(path).stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - age_s * 10**9))
    Cache(cache.options)
    assert not Path(own).exists()
    assert len(files(cache.options.dir, "parts")) == 1


def test_a_file_system_without_links(cache, origin, monkeypatch):
    def refuse(*args, **named):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        assert bytes(origin.get(cache, "key").read(0, NBYTES)) == content("key")
    assert origin.fetched == ["key"]
    assert is_clean(cache)


def test_the_directory_may_vanish_while_it_is_used(cache, origin):
    held = origin.get(cache, "key")
    shutil.rmtree(cache.options.dir)
    assert bytes(held.read(0, NBYTES)) == content("key")
    assert not held.is_current()

    def fill(write):
        write(0, content("other"))
        shutil.rmtree(cache.options.dir)

    assert bytes(origin.get(cache, "other", fill=fill).read(0, NBYTES)) == content("other")
    again = origin.get(cache, "key")
    assert bytes(again.read(0, NBYTES)) == content("key")
    assert origin.get(impatient(cache, stall_s=1), "key").identity == again.identity
    assert is_clean(cache)
