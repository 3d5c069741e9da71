"""What the tests of the cache share: an origin with known content, and looks at the directory from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from kvformat.errors import make_error
from kvformat.storage.cache import Cache, CacheOptions

NBYTES = 3 * 4096 + 5
PATH = "s3://bucket/dataset/shard"


def content(key: str, nbytes: int = NBYTES) -> bytes:
    """The right bytes of an entry."""
    block = hashlib.sha256(key.encode()).digest()
    return (block * (nbytes // len(block) + 1))[:nbytes]


class Origin:
    """Where entries come from.

    Attributes
    ----------
    fetched, checked
        Keys, one for each time.
    damage
        The next so many fetches bring a wrong byte.
    """

    def __init__(self, nbytes: int = NBYTES) -> None:
        self.nbytes = nbytes
        self.fetched: list[str] = []
        self.checked: list[str] = []
        self.damage = 0

    def fill(self, key):
        def fill(write) -> None:
            self.fetched.append(key)
            data = bytearray(content(key, self.nbytes))
            if self.damage:
                self.damage -= 1
                data[self.nbytes // 2] ^= 1
            half = self.nbytes // 2
            write(half, memoryview(data)[half:])
            write(0, bytes(data[:half]))

        return fill

    def check(self, key):
        def check(file) -> None:
            self.checked.append(key)
            if bytes(file.read(0, self.nbytes)) != content(key, self.nbytes):
                raise make_error("E070", "not what it must be", path=file.path)

        return check

    def get(self, cache, key, **options):
        """Obtain an entry."""
        options = {"path": PATH, "fill": self.fill(key), "check": self.check(key)} | options
        return cache.obtain(key, self.nbytes, **options)


def options(directory, entries: float = 100, nbytes: int = NBYTES, **others) -> CacheOptions:
    """A cache with room for so many entries."""
    return CacheOptions(**{"dir": str(directory), "max_nbytes": int(entries * nbytes), "min_free_nbytes": 0} | others)


def impatient(cache: Cache, **values) -> Cache:
    """The same cache, with other times to wait."""
    cache._patience = cache._patience._replace(**values)
    cache._room._ledger._timeout_s = cache._patience.ledger_s
    return cache


def ledger(cache: Cache) -> int | None:
    """Bytes the ledger says are taken."""
    with cache._room._ledger.locked() as page:
        return page.used


def files(directory, kind: str) -> list[Path]:
    """All entries, or all parts, of a cache."""
    found = []
    for path in (Path(directory) / kind).rglob("*"):
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
        except FileNotFoundError:
            continue
    return sorted(found)


def usage(directory) -> int:
    """Bytes in entries and parts, each file once, as of some moment between two looks."""
    sizes = {}
    for kind in ("parts", "entries"):
        for folder, _, names in os.walk(Path(directory) / kind):
            for name in names:
                try:
                    status = (Path(folder) / name).lstat()
                except FileNotFoundError:
                    continue
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def keys_of(directory) -> set[str]:
    """Keys of all entries."""
    return {path.name.removesuffix(".entry") for path in files(directory, "entries")}


def descriptors(below: Path) -> list[str]:
    """Files and directories below a path that this process has open: other tests' threads have others."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(path.readlink())
            if target.startswith(f"{below}/"):
                found.append(target)
    return sorted(found)
