"""Fetching into memory, where there is no cache."""

from __future__ import annotations

import errno
import mmap
import threading

import pytest

from kvformat.errors import DamageError, KVFormatError
from kvformat.storage import obtaining
from kvformat.storage.obtaining import Memory
from tests.storage.caching import NBYTES, PATH, Origin, content


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.mark.parametrize("nbytes", [0, 1, NBYTES, (2 << 20) + 1])
def test_fetched_and_checked(nbytes):
    origin = Origin(nbytes)
    file = origin.get(Memory(), "key")
    assert bytes(file.read(0, nbytes)) == content("key", nbytes)
    assert (origin.fetched, origin.checked) == (["key"], ["key"])
    assert file.path == PATH
    assert file.is_current()
    assert file.identity.nbytes == nbytes
    assert (file.mapped is None) == (nbytes == 0)
    with pytest.raises(KVFormatError, match="E005"):
        file.read(nbytes, 1)


def test_identities_are_unique(origin):
    memory = Memory()
    files = [origin.get(memory, "key") for _ in range(100)]
    assert len({file.identity for file in files}) == 100
    assert origin.fetched == ["key"] * 100


def test_it_is_writable_and_its_own(origin):
    first, second = (origin.get(Memory(), "key") for _ in range(2))
    first.mapped[0] ^= 0xFF
    assert bytes(second.read(0, NBYTES)) == content("key")


def test_damaged_once_is_fetched_again(origin):
    origin.damage = 1
    assert bytes(origin.get(Memory(), "key").read(0, NBYTES)) == content("key")
    assert origin.fetched == ["key", "key"]


def test_damaged_twice_is_an_error(origin):
    origin.damage = 2
    with pytest.raises(DamageError, match="E070"):
        origin.get(Memory(), "key")
    assert origin.fetched == ["key", "key"]


@pytest.mark.parametrize("error", [OSError("reset"), KeyboardInterrupt(), KVFormatError("own", code="E208")])
def test_what_a_fetch_raises_is_raised(origin, error):
    def fill(write):
        write(0, b"some")
        raise error

    with pytest.raises(type(error)) as raised:
        origin.get(Memory(), "key", fill=fill)
    assert raised.value is error


@pytest.mark.parametrize("brought", [0, 1, NBYTES - 1, NBYTES + 1])
def test_another_number_of_bytes(origin, brought):
    with pytest.raises(DamageError, match="E005"):
        origin.get(Memory(), "key", fill=lambda write: write(0, bytes(brought)), check=None)


@pytest.mark.parametrize("offset", [-1, 1, NBYTES])
def test_bytes_beyond(origin, offset):
    with pytest.raises(DamageError, match="E005"):
        origin.get(Memory(), "key", fill=lambda write: write(offset, content("key")), check=None)


def test_a_fetch_may_write_from_threads():
    origin = Origin(1 << 20)
    step = 1 << 14

    def fill(write):
        data = content("key", origin.nbytes)
        threads = [
            threading.Thread(target=write, args=(at, bytearray(data[at : at + step])))
            for at in range(0, origin.nbytes, step)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert bytes(origin.get(Memory(), "key", fill=fill).read(0, origin.nbytes)) == content("key", origin.nbytes)


def test_no_memory_is_said(origin, monkeypatch):
    def refuse(*args, **named):
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    monkeypatch.setattr(obtaining.mmap, "mmap", refuse)
    with pytest.raises(KVFormatError, match="E204"):
        origin.get(Memory(), "key")


def test_kernels_without_huge_pages(monkeypatch):
    class Memory4K(mmap.mmap):
        def madvise(self, *args):
            raise OSError(errno.EINVAL, "invalid argument")

    monkeypatch.setattr(obtaining.mmap, "mmap", Memory4K)
    origin = Origin(4 << 20)
    assert bytes(origin.get(Memory(), "key").read(0, origin.nbytes)) == content("key", origin.nbytes)
