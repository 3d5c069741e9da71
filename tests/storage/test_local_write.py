"""The operations of a writer: exclusive, complete, and named errors where the disk refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvformat.errors import KVFormatError, StorageError
from kvformat.storage.local_write import LocalFiles

FILES = LocalFiles()


def failing(number: int):
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_is_created_once(tmp_path: Path) -> None:
    fd = FILES.create(tmp_path / "a")
    os.close(fd)
    with pytest.raises(FileExistsError):
        FILES.create(tmp_path / "a")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        FILES.create(tmp_path / "dangling")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(KVFormatError, match="E002"):
        FILES.create(tmp_path / "missing" / "a")


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 2000])
def test_many_buffers_are_written_one_behind_the_other(tmp_path: Path, count: int) -> None:
    buffers = [bytes([number % 251]) * (number % 5) for number in range(count)]
    fd = FILES.create(tmp_path / "a")
    assert FILES.write(fd, buffers, 7, tmp_path / "a") == sum(map(len, buffers))
    os.close(fd)
    written = b"".join(buffers)
    assert (tmp_path / "a").read_bytes() == (bytes(7) + written if written else b"")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)
        return real(fd, [data[: max(1, len(data) // 3)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    buffers = [os.urandom(100), b"", memoryview(bytes(33)), bytearray(range(200))]
    fd = FILES.create(tmp_path / "a")
    assert FILES.write(fd, buffers, 0, tmp_path / "a") == 333
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"".join(buffers)


def test_buffers_of_any_item_are_bytes(tmp_path: Path) -> None:
    fd = FILES.create(tmp_path / "a")
    items = memoryview(bytearray(range(16))).cast("I")
    assert FILES.write(fd, [items], 0, tmp_path / "a") == 16
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == bytes(range(16))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "E200"),
        (errno.EDQUOT, "E200"),
        (errno.EFBIG, "E200"),
        (errno.EIO, "E203"),
        (errno.EROFS, "E207"),
    ],
)
def test_a_refused_write_is_named(tmp_path: Path, monkeypatch, number: int, code: str) -> None:
    fd = FILES.create(tmp_path / "a")
    monkeypatch.setattr(os, "pwritev", failing(number))
    with pytest.raises(StorageError, match=code) as caught:
        FILES.write(fd, [bytes(1_234)], 0, tmp_path / "a")
    os.close(fd)
    if code == "E200":
        assert "1,234 bytes are needed" in caught.value.message
        assert ("ulimit -f" if number == errno.EFBIG else "are free") in caught.value.message


def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch) -> None:
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="E202"):
        FILES.create_file(tmp_path / "a", b"x")
    assert len(calls) == 1, "never retried"
    with pytest.raises(StorageError, match="E202"):
        FILES.sync_dir(tmp_path)
    assert len(calls) == 2


def test_a_link_is_made_once_and_never_follows(tmp_path: Path) -> None:
    FILES.create_file(tmp_path / "a", b"a")
    FILES.create_file(tmp_path / "b", b"b")
    assert FILES.link(tmp_path / "a", tmp_path / "final")
    assert not FILES.link(tmp_path / "b", tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == b"a"
    assert (tmp_path / "final").samefile(tmp_path / "a")
    with pytest.raises(KVFormatError, match="E002"):
        FILES.link(tmp_path / "missing", tmp_path / "c")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK])
def test_without_hard_links_the_remedy_is_named(tmp_path: Path, monkeypatch, number: int) -> None:
    FILES.create_file(tmp_path / "a", b"a")
    monkeypatch.setattr(os, "link", failing(number))
    with pytest.raises(StorageError, match="E201") as caught:
        FILES.link(tmp_path / "a", tmp_path / "b")
    assert "local disk" in caught.value.message


def test_directories(tmp_path: Path) -> None:
    assert FILES.make_dir(tmp_path / "d")
    assert not FILES.make_dir(tmp_path / "d")
    FILES.create_file(tmp_path / "d" / "file", b"")
    with pytest.raises(KVFormatError, match="E207"):
        FILES.make_dir(tmp_path / "d" / "file")
    assert not FILES.remove_dir(tmp_path / "d")
    FILES.unlink(tmp_path / "d" / "file")
    FILES.unlink(tmp_path / "d" / "file")
    assert FILES.remove_dir(tmp_path / "d")
    assert not FILES.remove_dir(tmp_path / "d")
    with pytest.raises(KVFormatError, match="E002"):
        FILES.make_dir(tmp_path / "missing" / "d")
