"""The directory of a cache: whose it is, what is made in it, and what is never touched."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvformat.errors import KVFormatError, StorageError
from kvformat.storage.cache import Cache
from kvformat.storage.cache_folder import Folder
from kvformat.storage.cache_options import CacheOptions
from tests.storage.caching import NBYTES, Origin, content, files, keys_of, options


def tree(directory: Path) -> dict[str, str]:
    """Every path below a directory, and what it is."""
    return {
        str(path.relative_to(directory)): str(path.readlink())
        if path.is_symlink()
        else "directory"
        if path.is_dir()
        else "pipe"
        if path.is_fifo()
        else path.read_bytes().decode("latin1")
        for path in directory.rglob("*")
    }


def test_an_absent_directory_is_made(tmp_path):
    cache = Cache(options(tmp_path / "some" / "where"))
    assert (tmp_path / "some" / "where" / "kvformat-cache-1").is_file()
    Origin().get(cache, "key")


def test_an_empty_directory_is_taken_and_found_again(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    origin = Origin()
    for path in ("cache", "cache", "link", "link"):
        origin.get(Cache(options(tmp_path / path)), "key")
    assert origin.fetched == ["key"]


@pytest.mark.parametrize("name", ["notes.txt", "entries", ".hidden", "kvformat.json", "lost+found"])
def test_a_directory_that_holds_anything_else_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(StorageError, match="E211") as raised:
        Cache(options(tmp_path))
    assert name in str(raised.value)
    assert tree(tmp_path) == {name: "directory"}


def test_a_cache_of_another_layout_is_refused(tmp_path):
    (tmp_path / "kvformat-cache-7").write_text("")
    with pytest.raises(StorageError, match=r"E211.*another version.*kvformat-cache-7"):
        Cache(options(tmp_path))


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="E211"):
            Cache(options(path))
    assert tree(tmp_path) == {"file": "mine"}


@pytest.mark.parametrize("name", ["kvformat-cache-1", "entries", "parts"])
def test_links_in_the_place_of_our_own_are_refused(tmp_path, name):
    cache = tmp_path / "cache"
    Cache(options(cache))
    (tmp_path / "elsewhere").mkdir()
    path = cache / name
    path.unlink() if path.is_file() else path.rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="E211"):
        Cache(options(cache))
    assert tree(tmp_path / "elsewhere") == {}


def test_a_directory_that_may_not_be_written(tmp_path, monkeypatch):
    real = os.mkdir

    def refuse(path, *args, **named):
        if str(path).endswith("/cache"):
            raise PermissionError(errno.EACCES, "permission denied", path)
        return real(path, *args, **named)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StorageError, match="E207"):
        Cache(options(tmp_path / "cache"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_modes_are_respected(tmp_path):
    Cache(options(tmp_path / "cache"))
    (tmp_path / "cache" / "entries").chmod(0o500)
    with pytest.raises(StorageError, match="E207"):
        Cache(options(tmp_path / "cache"))


def test_a_read_only_file_system(tmp_path, monkeypatch):
    Cache(options(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *args, **named: False)
    with pytest.raises(StorageError, match="E207"):
        Cache(options(tmp_path / "cache"))


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        Origin().get(Cache(options(tmp_path / "cache")), "key")
    finally:
        os.umask(before)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0


def test_what_the_cache_did_not_make_is_never_removed(tmp_path):
    directory = tmp_path / "cache"
    cache = Cache(options(directory, entries=2))
    origin = Origin()
    origin.get(cache, "key")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key.entry").write_text("outside")
    bucket = files(directory, "entries")[0].parent
    other = next(name for name in ("000", "001") if name != bucket.name)
    strange = {
        directory / "notes.txt": "mine",
        directory / "entries" / "notes.txt": "mine",
        directory / "entries" / "stray.entry": "mine",  # in no bucket
        bucket / "notes.txt": "mine",
        bucket / "wrong-bucket.entry": "mine",
        bucket / "key.entry.bak": "mine",
        directory / "parts" / "notes.txt": "mine",
        directory / "parts" / "fff-notes.part": "mine",  # not the hash of its key
        directory / "parts" / "notes.part": "mine",
    }
    for path, text in strange.items():
        path.write_text(text)
    (directory / "entries" / other).symlink_to(outside)
    right = Path(cache._folder.entry("linked"))
    right.parent.mkdir(exist_ok=True)
    right.symlink_to(outside / "key.entry")
    part = Path(cache._folder.part("linked-part"))
    part.symlink_to(outside / "key.entry")
    os.mkfifo(cache._folder.part("pipe"))
    before = tree(tmp_path)
    for number in range(10):  # each makes room
        origin.get(Cache(cache.options), f"new{number}")
    after = tree(tmp_path)
    lost = {path for path in before if path not in after}
    assert {path.rpartition("/")[2] for path in lost} == {"key.entry"}
    assert all(after[path] == text for path, text in before.items() if path not in lost and path != "cache/ledger")


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "dangling"])
@pytest.mark.parametrize("where", ["entry", "part"])
def test_something_else_in_the_place_of_a_file(tmp_path, kind, where):
    cache = Cache(options(tmp_path / "cache"))
    (tmp_path / "target").write_bytes(content("key"))
    path = Path(getattr(cache._folder, where)("key"))
    path.parent.mkdir(exist_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / ("target" if kind == "link" else "nowhere"))
    with pytest.raises(StorageError, match="E211"):
        Origin().get(cache, "key")
    assert path.is_symlink() or path.exists()
    assert (tmp_path / "target").read_bytes() == content("key")
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_the_place_of_a_bucket(tmp_path):
    cache = Cache(options(tmp_path / "cache"))
    Path(cache._folder.entry("key")).parent.write_text("mine")
    with pytest.raises(StorageError, match="E211"):
        Origin().get(cache, "key")
    assert [path.read_text() for path in files(tmp_path / "cache", "entries")] == ["mine"]
    assert files(tmp_path / "cache", "parts") == []


def test_a_directory_taken_by_many_at_once(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        caches = list(pool.map(lambda _: Cache(options(tmp_path / "cache")), range(64)))
    assert len(caches) == 64
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"entries", "kvformat-cache-1", "ledger", "parts"}


def test_entries_spread_over_directories(tmp_path):
    cache = Cache(options(tmp_path / "cache", entries=100))
    origin = Origin(10)
    keys = {f"{'ab' * 32}-{number:x}" for number in range(100)}
    for key in keys:
        origin.get(cache, key)
    assert keys_of(tmp_path / "cache") == keys
    assert len(list((tmp_path / "cache" / "entries").iterdir())) > 90


@pytest.mark.parametrize("key", ["key", "-", "a", "f" * 200, "x.entry", "y.part"])
def test_names_are_recognised_and_no_others(key):
    folder = Folder("/cache")
    bucket, name = folder.entry(key).rsplit("/", 2)[1:]
    assert folder.is_entry(bucket, name)
    assert not folder.is_entry(f"{int(bucket, 16) ^ 1:03x}", name)
    assert not folder.is_entry(bucket, name + "x")
    for part in (folder.part(key), folder.own_part(key)):
        name = part.rpartition("/")[2]
        assert folder.is_part(name)
        assert not folder.is_part(name.upper())
        assert not folder.is_part("0" + name)
        assert len(os.fsencode(name)) <= 255


def test_options_are_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CacheOptions(dir="x/../y", max_nbytes=1).dir == str(tmp_path / "y")
    assert CacheOptions(dir="~/cache", max_nbytes=1).dir == str(tmp_path / "home" / "cache")
    assert CacheOptions(dir=Path("z"), max_nbytes=1).dir == str(tmp_path / "z")


@pytest.mark.parametrize(
    "values",
    [
        {"dir": ""},
        {"dir": None},
        {"dir": b"bytes"},
        {"dir": "nul\0"},
        {"max_nbytes": -1},
        {"max_nbytes": 1.5},
        {"max_nbytes": True},
        {"max_nbytes": "1 GB"},
        {"min_free_nbytes": -1},
        {"unit": "file"},
    ],
)
def test_options_that_make_no_sense(values):
    with pytest.raises(KVFormatError, match="E081"):
        CacheOptions(**{"dir": "/cache", "max_nbytes": NBYTES} | values)
