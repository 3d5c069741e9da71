"""Locations, mounts and leases."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvformat.errors import KVFormatError, UsageError
from kvformat.storage import lease, mounts
from kvformat.storage.lease import DirectoryLease, exclusive
from kvformat.storage.location import local_path, resolve

HOLDER = """
import sys
from pathlib import Path
from kvformat.storage.lease import DirectoryLease
lease = DirectoryLease.take(Path(sys.argv[1]))
print("held" if lease else "refused", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/data/ds", "/data/ds"),
        ("/data/../ds/", "/ds"),
        (Path("/data/ds"), "/data/ds"),
        ("file:///data/ds", "/data/ds"),
        ("file://localhost/data/a%20b", "/data/a b"),
        ("/data/C:/x", "/data/C:/x"),
        ("/data/s3:", "/data/s3:"),
    ],
)
def test_local_locations(location: str | Path, path: str) -> None:
    assert local_path(location) == Path(path)


def test_relative_locations_are_made_absolute(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("ds") == tmp_path / "ds"
    assert local_path(".") == tmp_path


@pytest.mark.parametrize("location", ["s3://bucket/ds", "http://host/ds", "file://host/ds", "gs+x://a", "memory://x"])
def test_other_locations_are_named(location: str) -> None:
    with pytest.raises(UsageError, match="E206"):
        local_path(location)


@pytest.mark.parametrize("location", ["", "a\0b", b"/data", "file://", "file:///a%00b"])
def test_what_is_no_location(location: str | bytes) -> None:
    with pytest.raises(UsageError, match="E081"):
        local_path(location)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("S3://Bucket/Some/Prefix///", "s3://Bucket/Some/Prefix"),
        ("s3a://bucket/a b/%20/ü#1", "s3a://bucket/a b/%20/ü#1"),
        ("gs://bucket/ds/", "gs://bucket/ds"),
        ("abfs://container@account.dfs.core.windows.net/ds", "abfs://container@account.dfs.core.windows.net/ds"),
        ("HTTPS://Host:8080/ds/?sig=1", "https://Host:8080/ds/?sig=1"),
        ("hf://datasets/user/repo@v1/ds", "hf://datasets/user/repo@v1/ds"),
        ("memory://ds/", "memory://ds"),
        ("http://[::1]:9000/ds/", "http://[::1]:9000/ds"),
        ("sftp://user@host/ds", "sftp://user@host/ds"),
    ],
)
def test_remote_locations(location: str, url: str) -> None:
    assert resolve(location) == url


@pytest.mark.parametrize("location", ["/data/ds", "file:///data/ds", "FILE://localhost/data/ds", "local:///data/ds/"])
def test_local_locations_resolve_to_paths(location: str) -> None:
    assert resolve(location) == Path("/data/ds")


@pytest.mark.parametrize(
    ("location", "code", "text"),
    [
        ("nosuch://a/b", "E206", "no file system for nosuch://"),
        ("zip://a/b", "E206", "no file system for zip://"),
        ("simplecache::s3://bucket/ds", "E206", "cache="),
        ("s3://bucket/ds::s3://other", "E206", "cache="),
        ("file://host/ds", "E206", "mounted"),
        ("s3://key:hunter2@bucket/ds", "E081", "storage_options"),
        ("https://hunter2@host/ds", "E081", "storage_options"),
        ("https://host/ds#part", "E081", "fragment"),
        ("s3://bucket/ds?versionId=1", "E081", "query"),
        ("s3:///ds", "E081", "names a bucket"),
        ("s3:/bucket/ds", "E081", "one slash is missing"),
        ("s3://", "E081", "names a bucket"),
        ("s3://bucket/a/../b", "E081", "relative"),
        ("http://[::1/ds", "E081", "no URL"),
        ("s3://bucket/a\0b", "E081", "non-empty"),
        (Path("s3://bucket/ds"), "E081", "pass a string"),
    ],
)
def test_urls_that_are_refused(location: str | Path, code: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(location)
    assert caught.value.code == code
    assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_remote_locations_say_how_to_get_a_local_copy() -> None:
    with pytest.raises(UsageError, match=r"E206.*kvformat copy"):
        local_path("s3://bucket/ds")


def test_a_path_of_many_colons_is_a_path(tmp_path: Path) -> None:
    assert resolve(tmp_path / "a::b") == tmp_path / "a::b"
    assert resolve("ds::1") == Path.cwd() / "ds::1"


def test_the_mount_table_is_parsed(monkeypatch) -> None:
    text = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "36 22 0:31 / /mnt/with\\040space rw shared:9 master:2 - nfs4 host:/x rw\n"
        "odd line\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self, **options: text)
    mounts._types.cache_clear()
    try:
        assert mounts._types() == {"8:1": "ext4", "0:31": "nfs4"}
    finally:
        mounts._types.cache_clear()


def test_without_a_mount_table_files_are_mapped(monkeypatch, tmp_path: Path) -> None:
    def fail(self: Path, **options: object) -> str:
        raise OSError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(Path, "read_text", fail)
    mounts._types.cache_clear()
    try:
        assert not mounts.prefers_pread(tmp_path)
    finally:
        mounts._types.cache_clear()


def test_a_lease_excludes_others_and_ends_with_its_process(tmp_path: Path) -> None:
    repository = Path(__file__).resolve().parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        assert DirectoryLease.take(tmp_path) is None
        with (
            pytest.raises(RuntimeError, match="busy"),
            exclusive(tmp_path, timeout_s=0, refusal=lambda: RuntimeError("busy")),
        ):
            pass
    finally:
        holder.kill()
        holder.wait(timeout=60)
        holder.stdin.close()
        holder.stdout.close()
    taken = DirectoryLease.take(tmp_path)
    assert taken is not None
    assert taken.supported
    assert DirectoryLease.take(tmp_path) is None
    taken.release()
    taken.release()
    with exclusive(tmp_path, timeout_s=0, refusal=lambda: RuntimeError("busy")) as held:
        assert held.supported
    again = DirectoryLease.take(tmp_path)
    assert again is not None
    again.release()
    assert list(tmp_path.iterdir()) == [], "no lock file is left"


def test_a_lease_where_there_are_no_locks(tmp_path: Path, monkeypatch) -> None:
    def fail(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert lease.fcntl.flock is fail
    taken = DirectoryLease.take(tmp_path)
    assert taken is not None
    assert not taken.supported
    taken.release()


def test_a_lease_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(KVFormatError, match="E002"):
        DirectoryLease.take(tmp_path / "missing")
