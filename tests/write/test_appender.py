"""What is appended is in the file, whole and in order, in pieces the page cache likes."""

from __future__ import annotations

import os
import random

import pytest

from kvformat.storage.local_write import LocalFiles
from kvformat.write import appender as module
from kvformat.write.appender import Appender


class Files(LocalFiles):
    def __init__(self):
        self.written = []

    def write(self, fd, buffers, offset, path):
        count = super().write(fd, buffers, offset, path)
        self.written.append((offset, count))
        return count


@pytest.fixture
def opened(tmp_path):
    files = Files()
    fd = files.create(tmp_path / "file")
    yield files, fd, tmp_path / "file"
    os.close(fd)


@pytest.mark.parametrize("start", [0, 1, 63, 64, 1000])
def test_any_sizes_arrive_whole_and_in_order(opened, monkeypatch, start):
    monkeypatch.setattr(module, "_PIECE_NBYTES", 64)
    files, fd, path = opened
    out = Appender(files, fd, path, start)
    rng = random.Random(start)
    wanted = b""
    for _ in range(200):
        buffers = [rng.randbytes(rng.choice((0, 1, 5, 63, 64, 65, 200, 640))) for _ in range(rng.randrange(4))]
        assert out.append(buffers) == sum(map(len, buffers))
        wanted += b"".join(buffers)
        assert out.offset == start + len(wanted)
    out.flush()
    out.flush()
    assert path.read_bytes()[start:] == wanted
    assert all((offset + count) % 64 == 0 for offset, count in files.written[:-1])
    assert sum(count for _, count in files.written) == len(wanted)


def test_small_buffers_are_gathered_and_large_ones_are_not_copied(opened):
    files, fd, path = opened
    piece = module._PIECE_NBYTES
    out = Appender(files, fd, path, 0)
    out.append([b"a" * 1000] * 100)
    assert files.written == []
    out.append([bytes(3 * piece)])
    assert files.written == [(0, piece), (piece, 2 * piece)]
    out.flush()
    assert files.written[2:] == [(3 * piece, 100_000)]


def test_memory_may_change_once_it_was_appended(opened):
    files, fd, path = opened
    out = Appender(files, fd, path, 0)
    reused = bytearray(b"first")
    out.append([reused])
    reused[:] = b"other"
    out.append([reused])
    out.flush()
    assert path.read_bytes() == b"firstother"


def test_buffers_of_other_items_count_in_bytes(opened):
    files, fd, path = opened
    out = Appender(files, fd, path, 0)
    assert out.append([memoryview(bytearray(16)).cast("Q"), memoryview(b"")]) == 16
    out.flush()
    assert path.stat().st_size == 16
