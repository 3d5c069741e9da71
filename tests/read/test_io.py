"""How files are opened: mapped or read, never listed, and what happens where the system refuses."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.errors import DamageError, StorageError
from kvformat.storage import local_read, mounts
from kvformat.storage.local_read import LocalReader
from tests.testing.touch import touch_all


@pytest.fixture
def mount_table(monkeypatch) -> Callable[[str], None]:
    """Pretend that everything lies on a file system of this type."""

    class Everywhere(dict[str, str]):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def get(self, key: str, default: Any = None) -> str:
            return self.kind

    def use(kind: str) -> None:
        monkeypatch.setattr(mounts, "_types", lambda: Everywhere(kind))

    return use


@pytest.mark.parametrize(
    ("kind", "mapped"),
    [
        ("ext4", True), ("xfs", True), ("tmpfs", True), ("overlay", True), ("btrfs", True), ("zfs", True), ("", True),
        ("nfs", False), ("nfs4", False), ("lustre", False), ("fuse", False), ("fuse.sshfs", False), ("fuseblk", False),
        ("cifs", False), ("smb3", False), ("9p", False), ("ceph", False), ("gpfs", False), ("beegfs", False),
        ("virtiofs", False), ("nfsd", True), ("fusectl", True),
    ],
)  # fmt: skip
def test_auto_maps_on_local_file_systems_only(saved, mount_table, kind: str, mapped: bool) -> None:
    mount_table(kind)
    dataset = kvformat.open(saved("one-record"))
    assert (dataset[0]._shard.file.mapped is not None) == mapped
    assert touch_all(dataset) == 0
    assert kvformat.verify(dataset.location).ok


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
def test_what_the_caller_says_is_done(saved, mount_table, kind: str) -> None:
    mount_table(kind)
    path = saved("one-record")
    assert kvformat.open(path, io="mmap")[0]._shard.file.mapped is not None
    assert kvformat.open(path, io="pread")[0]._shard.file.mapped is None


def test_the_mount_table_of_this_machine_is_read(tmp_path: Path) -> None:
    found = mounts._types()
    assert found
    assert all(device.replace(":", "").isdigit() for device in found)
    assert isinstance(mounts.prefers_pread(tmp_path), bool)


def test_opening_and_reading_list_nothing(saved, monkeypatch) -> None:
    path = saved("tables-in-parts")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"listed {args}")

    for name in ("listdir", "scandir", "walk", "fwalk"):
        monkeypatch.setattr(os, name, refuse)
    for name in ("iterdir", "glob", "rglob"):
        monkeypatch.setattr(Path, name, refuse)
    for io in ("mmap", "pread"):
        assert touch_all(kvformat.open(path, io=io)) == 0


def test_opening_reads_root_and_manifest_alone(saved, monkeypatch) -> None:
    opened: list[str] = []
    real = LocalReader.open

    def watch(self: LocalReader, name: str, **options: Any) -> Any:
        opened.append(name.partition("/")[0])
        return real(self, name, **options)

    monkeypatch.setattr(LocalReader, "open", watch)
    dataset = kvformat.open(saved("several-shards"))
    assert opened == ["kvformat.json", "manifest"]
    dataset[0].component("k")
    assert opened[2:] == ["index", "index", "shards"]
    dataset["clip-0001"].component("k")
    assert opened[5:] == ["index", "index"]


def test_foreign_files_are_ignored_by_readers(saved) -> None:
    path = saved("one-record")
    for name in ("index/0.safetensors", ".staging/x/y", "shards/00000/00000001-0.safetensors", "notes"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    assert touch_all(kvformat.open(path)) == 0
    report = kvformat.verify(path)
    assert report.ok
    assert sorted(finding.code for finding in report.warnings) == ["W001", "W001", "W001", "W002"]


def test_no_more_descriptors(saved, monkeypatch) -> None:
    dataset = kvformat.open(saved("one-record"))

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="E204") as caught:
        dataset[0]
    assert "max_open_files" in caught.value.message
    monkeypatch.undo()
    assert touch_all(dataset) == 0


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EACCES, errno.ENODEV])
def test_without_private_mappings_a_shared_one_is_made(saved, monkeypatch, number: int) -> None:
    """Strict overcommit refuses private writable mappings; read-only ones still work, without a warning."""
    real = mmap.mmap

    def refuse_private(fd: int, nbytes: int, **options: Any) -> mmap.mmap:
        if options["flags"] & mmap.MAP_PRIVATE:
            raise OSError(number, os.strerror(number))
        return real(fd, nbytes, **options)

    monkeypatch.setattr(local_read.mmap, "mmap", refuse_private)
    dataset = kvformat.open(saved("several-shards"), io="mmap")
    assert touch_all(dataset) == 0
    own = dataset[0].component("k", copy=True)
    own.zero_()
    assert dataset[0].component("k").any()


@pytest.mark.parametrize(("number", "code"), [(errno.ENOMEM, "E204"), (errno.ENODEV, "E203")])
def test_no_mapping_at_all(saved, monkeypatch, number: int, code: str) -> None:
    """Some file systems cannot map, and a process has only so many mappings: then ``auto`` reads."""
    path = saved("several-shards")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local_read.mmap, "mmap", refuse)
    with pytest.raises(StorageError, match=code):
        kvformat.open(path, io="mmap")[0]
    for io in ("pread", "auto"):
        dataset = kvformat.open(path, io=io)
        assert touch_all(dataset) == 0
        assert dataset.read_into(0, bytearray(1 << 16)) > 0
    assert kvformat.verify(path).ok


def test_a_shard_that_shrinks_while_it_is_read(saved) -> None:
    """By pread the end is noticed; the size was right when the file was opened."""
    path = saved("one-record")
    dataset = kvformat.open(path, io="pread")
    record = dataset[0]
    shard = next((path / "shards").rglob("*.safetensors"))
    os.truncate(shard, 4096 + 80)
    with pytest.raises(DamageError, match="E005"):
        record.component("k")


def test_short_reads_are_continued(saved, monkeypatch) -> None:
    real = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:13]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert touch_all(kvformat.open(saved("several-shards"), io="pread")) == 0


def test_a_failing_device(saved, monkeypatch) -> None:
    dataset = kvformat.open(saved("one-record"), io="pread")
    record = dataset[0]

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match="E203"):
        record.component("k")


def test_no_permission(saved, monkeypatch) -> None:
    """Not by mode bits: the tests may run as root, who may read everything."""
    path = saved("one-record")

    def deny(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(StorageError, match="E207"):
        kvformat.open(path)


@pytest.mark.slow
def test_a_thousand_shards(tmp_path: Path) -> None:
    """The second folder of shards; one record each."""
    schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype="F32")
    import numpy as np

    with kvformat.create(tmp_path / "ds", schema=schema, context=kvformat.Context.unknown(), shard_slots=1) as writer:
        for number in range(1001):
            values = np.full((1, 1, 1, 1), number, dtype="<f4")
            writer.add(f"clip-{number}", {"k": values, "v": -values}, token_ids=[number])
    assert len(list((tmp_path / "ds" / "shards" / "00001").iterdir())) == 1
    dataset = kvformat.open(tmp_path / "ds", max_open_files=3)
    for number in (0, 999, 1000, 500, 1000):
        assert float(dataset[number].component("k")) == number
    assert kvformat.verify(tmp_path / "ds").ok
