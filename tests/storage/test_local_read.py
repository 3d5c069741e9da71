"""Reading local files: only regular ones, of the stated size, by mapping or by range."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvformat.errors import KVFormatError
from kvformat.extract.documents import DocumentsWriter
from kvformat.spec.document import Document
from kvformat.storage.local_read import LocalReader

DATA = bytes(range(256)) * 40


@pytest.fixture
def reader(tmp_path: Path, request) -> LocalReader:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(DATA)
    (tmp_path / "empty").write_bytes(b"")
    return LocalReader(tmp_path, use_mmap=getattr(request, "param", True))


BOTH = pytest.mark.parametrize("reader", [True, False], indirect=True, ids=["mmap", "pread"])


@BOTH
def test_ranges(reader: LocalReader) -> None:
    file = reader.open("sub/file", nbytes=len(DATA))
    assert file.identity.nbytes == len(DATA)
    for offset, nbytes in ((0, len(DATA)), (1, 5), (4095, 2), (len(DATA) - 1, 1), (len(DATA), 0), (7, 0)):
        assert bytes(file.read(offset, nbytes)) == DATA[offset : offset + nbytes]
        into = bytearray(nbytes)
        file.read_into(memoryview(into), offset)
        assert bytes(into) == DATA[offset : offset + nbytes]


@BOTH
def test_beyond_the_end(reader: LocalReader) -> None:
    file = reader.open("sub/file")
    for offset, nbytes in ((0, len(DATA) + 1), (len(DATA), 1), (len(DATA) + 5, 1), (2**40, 8)):
        with pytest.raises(KVFormatError, match="E005"):
            file.read(offset, nbytes)


@BOTH
def test_an_empty_file(reader: LocalReader) -> None:
    assert reader.read("empty") == b""
    assert reader.read("empty", nbytes=0) == b""
    assert bytes(reader.open("empty").read(0, 0)) == b""
    with pytest.raises(KVFormatError, match="E005"):
        reader.open("empty", nbytes=1)
    with pytest.raises(KVFormatError, match="E005"):
        reader.open("empty").read(0, 1)


@BOTH
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing", "E002"),
        ("sub/missing", "E002"),
        ("empty/inside", "E002"),
        ("sub", "E003"),
        ("link", "E003"),
        ("dangling", "E003"),
        ("link-to-folder", "E003"),
        ("pipe", "E003"),
    ],
)
def test_what_is_no_regular_file_is_refused(reader: LocalReader, name: str, code: str) -> None:
    (reader.root / "link").symlink_to("sub/file")
    (reader.root / "dangling").symlink_to("nowhere")
    (reader.root / "link-to-folder").symlink_to("sub")
    os.mkfifo(reader.root / "pipe")
    with pytest.raises(KVFormatError, match=code):
        reader.open(name)


def test_a_socket_is_refused(reader: LocalReader, monkeypatch) -> None:
    monkeypatch.chdir(reader.root)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(KVFormatError, match="E003"):
            reader.open("socket")


def test_a_device_is_refused() -> None:
    with pytest.raises(KVFormatError, match="E003"):
        LocalReader("/dev", use_mmap=True).open("null")


@BOTH
def test_sizes_are_compared_before_anything_is_read(reader: LocalReader) -> None:
    with pytest.raises(KVFormatError, match="E005") as caught:
        reader.open("sub/file", nbytes=7)
    assert f"{len(DATA)} bytes, expected 7" in str(caught.value)
    assert caught.value.path == str(reader.root / "sub" / "file")
    with pytest.raises(KVFormatError, match="E004"):
        reader.read("sub/file", max_nbytes=len(DATA) - 1)
    assert reader.read("sub/file", max_nbytes=len(DATA)) == DATA


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@BOTH
def test_no_descriptor_is_lost(reader: LocalReader) -> None:
    before = descriptors()
    for _ in range(20):
        with pytest.raises(KVFormatError):
            reader.open("sub/file", nbytes=1)
        with pytest.raises(KVFormatError):
            reader.open("sub")
        reader.open("sub/file").read(0, 1)
        reader.read("sub/file")
    assert descriptors() == before


# A standard module holds what was left open, so that it outlives the globals of the library's modules.
LEFT_OPEN = """
import os
import kvformat
from kvformat.extract import make_plan
from kvformat.storage import local_read
os.left_open = local_read, {what}
"""
VECTOR = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "v1" / "valid" / "model-context" / "dataset"


@pytest.mark.parametrize(
    "what",
    [
        "local_read.LocalReader('.', use_mmap=False).open('file')",
        f"kvformat.open({str(VECTOR)!r}, io='pread')[0]",
        "make_plan('plan.kvdocs', schema=kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=8))",
    ],
    ids=["file", "dataset", "plan"],
)
def test_what_a_script_leaves_open_is_closed_in_silence(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with DocumentsWriter(tmp_path / "plan.kvdocs") as writer:
        writer.add("a", Document.of([1, 2]))
        writer.finish()
    script = [sys.executable, "-W", "error", "-c", LEFT_OPEN.format(what=what)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mapping_is_private(reader: LocalReader) -> None:
    file = reader.open("sub/file")
    view = file.read(0, 8)
    assert not view.readonly
    view[:] = bytes(8)
    assert (reader.root / "sub" / "file").read_bytes() == DATA


def test_an_identity_tells_a_file_from_its_successor(reader: LocalReader) -> None:
    path = reader.root / "sub" / "file"
    first = reader.open("sub/file").identity
    assert reader.open("sub/file").identity == first
    os.utime(path, ns=(0, first.mtime_ns + 1))
    assert reader.open("sub/file").identity != first
    (reader.root / "other").write_bytes(DATA)
    (reader.root / "other").replace(path)
    assert reader.open("sub/file").identity.inode != first.inode


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EMFILE, "E204"),
        (errno.ENFILE, "E204"),
        (errno.ENOMEM, "E204"),
        (errno.EIO, "E203"),
        (errno.ESTALE, "E203"),
        (errno.EACCES, "E207"),
        (errno.EPERM, "E207"),
        (errno.ENOENT, "E002"),
        (errno.ENOTDIR, "E002"),
        (errno.ELOOP, "E003"),
    ],
)
def test_errors_of_the_system_are_translated(reader: LocalReader, monkeypatch, number: int, code: str) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(KVFormatError, match=code) as caught:
        reader.open("sub/file")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_walk_finds_files_and_links_and_does_not_follow_them(reader: LocalReader, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "sub" / "link").symlink_to("file")
    os.mkfifo(tmp_path / "sub" / "pipe")
    (tmp_path / "hollow").mkdir()
    assert reader.walk() == ["empty", "loop", "sub/file", "sub/link", "sub/pipe"]
