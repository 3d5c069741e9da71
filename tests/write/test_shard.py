"""A shard is synced and hashed side by side; its receipt waits for both."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.errors import make_error
from kvformat.spec.document import Document
from kvformat.spec.layout import Layout
from kvformat.storage.local_write import LocalFiles
from kvformat.write import shard as module
from kvformat.write.record import RecordEncoder
from kvformat.write.shard import ShardWriter, hash_file
from tests.write.make import UNIFORM, ids, kv

LAYOUT = Layout(UNIFORM)
HEADER = LAYOUT.header_size("1.0", 4)


class Receipts:
    """Stands in for a staging directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.added = []

    def shard(self, ordinal):
        return self.path / f"{ordinal}.shard"

    def add_receipt(self, receipt):
        self.added.append(receipt)


def write(files, path, *tokens):
    staging, encoder = Receipts(path), RecordEncoder(LAYOUT)
    out = ShardWriter(files, staging, LAYOUT, ordinal=0, version="1.0", header_size=HEADER)
    for count in tokens:
        document = Document.of(ids(count))
        encoded = encoder.encode("a", document, kv(count), {})
        out.add(encoded.placement, encoded.buffers, document=document.digest, record_sum=encoded.record_sum)
    return out, staging


def test_the_receipt_says_what_is_on_disk(tmp_path):
    out, staging = write(LocalFiles(), tmp_path, 3, 700)
    assert (out.num_records, out.nbytes % 4096) == (2, 0)
    receipt = out.finish()
    data = out.path.read_bytes()
    assert staging.added == [receipt]
    assert (receipt.size, receipt.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert [record.dims for record in receipt.records] == [(3,), (700,)]
    assert [record.document for record in receipt.records] == [Document.of(ids(n)).digest.hex() for n in (3, 700)]


def test_the_digest_is_over_the_file_and_not_over_memory(tmp_path):
    out, _ = write(LocalFiles(), tmp_path, 3)
    with out.path.open("r+b") as file:
        file.seek(HEADER)
        file.write(b"other")
    assert out.finish().sha256 == hashlib.sha256(out.path.read_bytes()).hexdigest()


def test_sync_and_hash_run_side_by_side(tmp_path, monkeypatch):
    hashing, synced = threading.Event(), []

    class Files(LocalFiles):
        def sync(self, fd, path):
            assert hashing.wait(60)
            super().sync(fd, path)
            synced.append(path)

    def hash_while_syncing(source, path):
        assert synced == []
        hashing.set()
        return hash_file(source, path)

    monkeypatch.setattr(module, "hash_file", hash_while_syncing)
    out, staging = write(Files(), tmp_path, 3)
    before = set(threading.enumerate())
    staging.add_receipt = synced.append
    receipt = out.finish()
    assert synced == [out.path, receipt]
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("failing", ["sync", "hash"])
def test_no_receipt_where_either_fails(tmp_path, monkeypatch, failing):
    finished = []

    class Files(LocalFiles):
        def sync(self, fd, path):
            if failing == "sync":
                raise make_error("E202", "fsync failed", path=path)
            super().sync(fd, path)
            finished.append("sync")

    def fail(source, path):
        raise make_error("E203", "cannot read", path=path)

    if failing == "hash":
        monkeypatch.setattr(module, "hash_file", fail)
    out, staging = write(Files(), tmp_path, 3)
    with pytest.raises(kvformat.StorageError) as caught:
        out.finish()
    assert caught.value.code == {"sync": "E202", "hash": "E203"}[failing]
    assert staging.added == []
    assert finished == ([] if failing == "sync" else ["sync"])  # the file is closed only after the sync


def test_a_record_of_another_size_is_refused(tmp_path):
    out, _ = write(LocalFiles(), tmp_path)
    with pytest.raises(kvformat.InputError) as caught:
        out.add(LAYOUT.place((3,)), [np.zeros(5, np.uint8).data], document=bytes(32), record_sum=bytes(16))
    assert caught.value.code == "E101"
    assert (out.num_records, out.nbytes) == (0, 0)
    out.close()


DROPPED_LAST = """
import os, sys
from pathlib import Path
from kvformat.spec.layout import Layout
from kvformat.storage.local_write import LocalFiles
from kvformat.write.shard import ShardWriter
from tests.write.make import UNIFORM

class Place:
    def shard(self, ordinal):
        return Path(sys.argv[1]) / f"{ordinal}.shard"

# At exit the names of modules that are still referred to become None, those of modules imported first at last. So `os`
# drops the shard when `kvformat.write.shard` has none any more.
shard = ShardWriter(LocalFiles(), Place(), Layout(UNIFORM), ordinal=0, version="1.0", header_size=4096)
os.kept = (shard, sys.modules[ShardWriter.__module__])
if sys.argv[2] == "closed":
    os.close(shard._fd)
del shard
print("made")
"""


@pytest.mark.parametrize("descriptor", ["open", "closed"])
def test_a_shard_that_is_dropped_when_the_interpreter_exits_is_silent(tmp_path, descriptor):
    done = subprocess.run(
        [sys.executable, "-c", DROPPED_LAST, str(tmp_path), descriptor],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")


def test_a_shard_that_is_dropped_closes_its_file(tmp_path):
    out, _ = write(LocalFiles(), tmp_path, 3)
    fd = out._fd
    assert Path(f"/proc/self/fd/{fd}").resolve() == out.path
    path = out.path
    del out
    assert path not in {link.resolve() for link in Path("/proc/self/fd").iterdir()}
