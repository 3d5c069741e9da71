"""A disk that refuses: the right code, nothing left behind, or everything kept for the next run."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import kvformat
from kvformat.errors import KVFormatError
from kvformat.storage import local_write
from kvformat.storage.local_write import LocalFiles
from kvformat.testing.faults import FaultyFiles, InterruptedFiles
from kvformat.testing.recording import RecordingFiles, replay
from kvformat.write import appender
from tests.reliability import small

REPOSITORY = Path(__file__).resolve().parents[2]

# --------------------------------------------------------------------------------- what the system says, and our codes


class Refusing:
    """Stands for the module ``os`` where one function raises."""

    def __init__(self, name, error):
        self._name = name
        self._error = error
        self.calls = 0

    def __getattr__(self, name):
        if name != self._name:
            return getattr(os, name)

        def refuse(*args, **kwargs):
            self.calls += 1
            raise OSError(self._error, os.strerror(self._error))

        return refuse


def refused(monkeypatch, name, error, call):
    """The error that ``call`` raises where a system call fails, and how often that was tried."""
    system = Refusing(name, error)
    monkeypatch.setattr(local_write, "os", system)
    with pytest.raises(KVFormatError) as caught:
        call(LocalFiles())
    return caught.value, system.calls


def test_a_file_that_may_not_grow_is_no_full_disk(tmp_path, monkeypatch):
    with (tmp_path / "a").open("wb") as file:
        found, _ = refused(
            monkeypatch,
            "pwritev",
            errno.EFBIG,
            lambda files: files.write(file.fileno(), [b"12345"], 0, tmp_path / "a"),
        )
    assert (found.code, found.path) == ("E200", str(tmp_path / "a"))
    assert "a limit on the size of one file, not the free space" in found.message
    assert "`ulimit -f`" in found.message
    assert "are free" not in found.message


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_is_needed_and_what_is_free(tmp_path, monkeypatch, error):
    with (tmp_path / "a").open("wb") as file:
        found, _ = refused(
            monkeypatch,
            "pwritev",
            error,
            lambda files: files.write(file.fileno(), [b"12345", bytes(1_230_000)], 0, tmp_path / "a"),
        )
    assert (found.code, found.path) == ("E200", str(tmp_path / "a"))
    assert "1,230,005 bytes are needed" in found.message
    assert re.search(r"[\d,]+ are free", found.message)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("folder", [False, True])
def test_a_failed_sync_is_tried_once(tmp_path, monkeypatch, error, folder):
    if folder:
        found, calls = refused(monkeypatch, "fsync", error, lambda files: files.sync_dir(tmp_path))
    else:
        with (tmp_path / "a").open("wb") as file:
            found, calls = refused(
                monkeypatch, "fsync", error, lambda files: files.sync(file.fileno(), tmp_path / "a")
            )
    assert (found.code, found.path, calls) == ("E202", str(tmp_path if folder else tmp_path / "a"), 1)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK])
def test_no_hard_links(tmp_path, monkeypatch, error):
    (tmp_path / "a").touch()
    found, _ = refused(monkeypatch, "link", error, lambda files: files.link(tmp_path / "a", tmp_path / "b"))
    assert (found.code, found.path) == ("E201", str(tmp_path / "b"))
    assert "write to a local disk and copy" in found.message


CALLS = [
    ("open", lambda files, base: files.create(base / "a")),
    ("open", lambda files, base: files.sync_dir(base)),
    ("link", lambda files, base: files.link(base / "file", base / "b")),
]


@pytest.mark.parametrize(("name", "call"), CALLS)
@pytest.mark.parametrize(
    ("error", "code"), [(errno.EACCES, "E207"), (errno.EROFS, "E207"), (errno.EIO, "E203"), (errno.ENOSPC, "E200")]
)
def test_other_refusals(tmp_path, monkeypatch, name, call, error, code):
    (tmp_path / "file").touch()
    found, _ = refused(monkeypatch, name, error, lambda files: call(files, tmp_path))
    assert found.code == code


@pytest.mark.parametrize("name", ["mkdir", "unlink"])
@pytest.mark.parametrize(("error", "code"), [(errno.EACCES, "E207"), (errno.ENOSPC, "E200"), (errno.EIO, "E203")])
def test_refusals_of_what_goes_through_pathlib(tmp_path, monkeypatch, name, error, code):
    def refuse(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, name, refuse)
    files = LocalFiles()
    with pytest.raises(KVFormatError) as caught:
        (files.make_dir if name == "mkdir" else files.unlink)(tmp_path / "a")
    assert caught.value.code == code


def test_short_writes_are_continued(tmp_path, monkeypatch):
    class Slow:
        def __getattr__(self, name):
            return getattr(os, name)

        def pwritev(self, fd, buffers, offset):
            return os.pwrite(fd, bytes(buffers[0])[:3], offset)

    monkeypatch.setattr(local_write, "os", Slow())
    with (tmp_path / "a").open("wb") as file:
        count = LocalFiles().write(file.fileno(), [b"12345", b"", b"67", bytearray(b"890")], 2, tmp_path / "a")
    assert (count, (tmp_path / "a").read_bytes()) == (10, b"\0\x001234567890")


def test_more_buffers_than_a_call_takes(tmp_path):
    buffers = [bytes([i % 251]) * (i % 3) for i in range(3000)]
    with (tmp_path / "a").open("wb") as file:
        LocalFiles().write(file.fileno(), buffers, 0, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"".join(buffers)


# ------------------------------------------------------------------------------------------ a writer on such a disk


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Id of the dataset, and how often each operation is called in a run."""
    base = tmp_path_factory.mktemp("undisturbed")
    files = FaultyFiles("unlink", nth=-1, error=0)
    with small.create(base / "sets" / "ds", files=files) as writer:
        small.fill(writer)
    return writer.id, files.calls


FAULTS = [
    ("write", errno.ENOSPC, "E200"),
    ("create", errno.ENOSPC, "E200"),
    ("make_dir", errno.ENOSPC, "E200"),
    ("sync", errno.EIO, "E202"),
    ("sync_dir", errno.EIO, "E202"),
    ("link", errno.EPERM, "E201"),
    ("link", errno.EACCES, "E207"),
    ("create", errno.EACCES, "E207"),
    ("make_dir", errno.EACCES, "E207"),
    ("write", errno.EIO, "E203"),
    ("create", errno.EMFILE, "E204"),
]


def attempt(location, files, *, resume):
    """A run that meets a fault: its error, or None where the fault came too late to matter."""
    try:
        with small.create(location, files=files, resume=resume) as writer:
            small.fill(writer)
    except KVFormatError as error:
        return error
    return None


def check_error(error, files, code):
    assert error.code == code
    assert error.path is not None
    assert Path(error.path) in files.failed
    if code == "E200" and files.failed and "write" in files.calls:
        assert "free" in error.message


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(("kind", "number", "code"), FAULTS)
def test_a_writer_leaves_nothing_behind(tmp_path, undisturbed, kind, number, code, lasting):
    identity, calls = undisturbed
    for nth in range(calls[kind]):
        base = tmp_path / f"{nth}"
        base.mkdir()
        location = base / "sets" / "ds"
        files = FaultyFiles(kind, nth=nth, error=number, lasting=lasting)
        error = attempt(location, files, resume=False)
        try:
            assert error is not None
            check_error(error, files, code)
            if (location / "kvformat.json").exists():
                # Only the last sync comes after the commit: the dataset is there, and not known to be durable.
                assert (code, Path(error.path)) == ("E202", location)
                small.check_complete(location, identity)
                assert not (location / ".staging").exists()
            else:
                assert small.tree(base) == {}
        except Exception as failure:
            failure.add_note(f"{kind} {nth} of {calls[kind]} failed: {files.failed}")
            raise


@pytest.mark.parametrize(("kind", "number", "code"), FAULTS)
def test_a_resuming_writer_keeps_its_shards(tmp_path, undisturbed, kind, number, code):
    identity, calls = undisturbed
    kept = Counter()
    for nth in range(calls[kind]):
        location = tmp_path / f"{nth}" / "ds"
        location.parent.mkdir()
        files = FaultyFiles(kind, nth=nth, error=number)
        error = attempt(location, files, resume=True)
        try:
            if error is None:
                assert not files.failed
                continue
            check_error(error, files, code)
            if (location / "kvformat.json").exists():
                small.check_complete(location, identity)
                continue
            receipts = list(location.glob(".staging/*/0*.json"))
            kept[len(receipts)] += 1
            with small.create(location, resume=True) as writer:
                small.fill(writer)
            assert writer.id == identity
            small.check_complete(location, identity)
        except Exception as failure:
            failure.add_note(f"{kind} {nth} of {calls[kind]} failed: {files.failed}")
            raise
    assert len(kept) > 1 or kind == "make_dir", "no run kept shards"


def test_the_bytes_that_had_no_space_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(appender, "_PIECE_NBYTES", 4096)
    files = FaultyFiles("write", nth=1, error=errno.ENOSPC)  # the plan comes first
    error = attempt(tmp_path / "ds", files, resume=False)
    assert error.code == "E200"
    assert "4,096 bytes are needed" in error.message


def test_a_failed_sync_of_a_shard_is_never_repeated(tmp_path):
    """The kernel may have dropped the pages and call a second sync a success: the shard is written again instead."""

    class Files(FaultyFiles):
        def __init__(self):
            super().__init__("sync", nth=2, error=errno.EIO)
            self.synced = Counter()

        def sync(self, fd, path):
            self.synced[os.fstat(fd).st_ino, path] += 1
            super().sync(fd, path)

    files = Files()
    location = tmp_path / "ds"
    error = attempt(location, files, resume=True)
    assert (error.code, len(files.failed)) == ("E202", 1)
    assert files.failed[0].suffix == ".shard" or ".json" in files.failed[0].name
    [failed] = [count for (_, path), count in files.synced.items() if path == files.failed[0]]
    assert failed == 1
    recorder = RecordingFiles(tmp_path)
    with small.create(location, files=recorder, resume=True) as writer:
        small.fill(writer)
    kinds = [o.kind for o in recorder.operations if o.path == files.failed[0].relative_to(tmp_path).as_posix()]
    if files.failed[0].suffix == ".shard":
        assert kinds[:3] == ["unlink", "create", "write"]


@pytest.mark.parametrize("kind", ["unlink", "remove_dir"])
def test_a_staging_directory_that_cannot_be_removed(tmp_path, undisturbed, kind):
    """After the commit nothing can undo it: the dataset stands, whatever becomes of the leftovers."""
    identity, calls = undisturbed
    files = FaultyFiles(kind, nth=calls[kind] - 1, error=errno.EACCES)
    location = tmp_path / "ds"
    attempt(location, files, resume=False)
    assert files.failed
    small.check_complete(location, identity)


def test_what_stood_there_before_stays(tmp_path):
    location = tmp_path / "ds"
    location.mkdir()
    (location / "mine.txt").write_text("mine", encoding="utf-8")
    error = attempt(location, FaultyFiles("link", nth=5, error=errno.EPERM), resume=False)
    assert error.code == "E201"
    assert list(small.tree(tmp_path)) == ["ds", "ds/mine.txt"]


def test_a_crash_while_a_writer_cleans_up(tmp_path, undisturbed):
    """Removing what a failed run made can be cut short anywhere too."""
    identity, _ = undisturbed

    class Files(RecordingFiles):
        """The last link, that of the root, is refused."""

        def link(self, source, target):
            if target.name == "kvformat.json":
                raise KVFormatError("refused", code="E203", path=str(target))
            return super().link(source, target)

    base = tmp_path / "base"
    base.mkdir()
    files = Files(base)
    assert attempt(base / "ds", files, resume=False).code == "E203"
    assert small.tree(base) == {}
    operations = files.operations
    first = next(n for n, one in enumerate(operations) if one.kind == "unlink" and "shards/" in one.path)
    for mode in ("killed", "synced", "scattered"):
        for count in range(first, len(operations) + 1):
            location = tmp_path / f"{mode}-{count}" / "ds"
            replay(operations[:count], location.parent, mode, seed=count)
            with pytest.raises(kvformat.DatasetNotFoundError):
                kvformat.open(location)
            with small.create(location, files=small.Unsynced(), resume=True) as writer:
                small.fill(writer)
            assert writer.id == identity
            small.check_complete(location, identity)


# ------------------------------------------------------------------------------------------------------ interrupts


def interrupted(location, nth, *, resume):
    """A run interrupted after its main thread's ``nth`` operation: the operations, or None where it came through."""
    files = InterruptedFiles(nth=nth)
    try:
        with small.create(location, files=files, resume=resume) as writer:
            small.fill(writer)
    except KeyboardInterrupt:
        return files.done
    assert len(files.done) <= nth
    return None


def test_an_interrupt_after_any_operation_leaves_nothing(tmp_path, undisturbed):
    identity, _ = undisturbed
    nth = 0
    published = 0
    while True:
        base = tmp_path / f"{nth}"
        base.mkdir()
        location = base / "sets" / "ds"
        done = interrupted(location, nth, resume=False)
        if done is None:
            break
        try:
            if (location / "kvformat.json").exists():
                published += 1
                small.check_complete(location, identity)
                assert not (location / ".staging").exists()
            else:
                assert published == 0
                assert small.tree(base) == {}
        except BaseException as error:
            error.add_note(f"interrupted after {nth}: {done[nth]}")
            raise
        nth += 1
    assert nth > 60
    assert published > 3


def test_an_interrupt_after_any_operation_is_resumed(tmp_path, undisturbed):
    identity, _ = undisturbed
    for nth in range(1000):
        location = tmp_path / f"{nth}" / "ds"
        location.parent.mkdir()
        done = interrupted(location, nth, resume=True)
        if done is None:
            break
        try:
            if not (location / "kvformat.json").exists():
                with small.create(location, files=small.Unsynced(), resume=True) as writer:
                    small.fill(writer)
                assert writer.id == identity
            small.check_complete(location, identity)
        except BaseException as error:
            error.add_note(f"interrupted after {nth}: {done[nth]}")
            raise
    else:
        pytest.fail("no run came through")


# ------------------------------------------------------------------------------------------------------ for real

CHILD = """
import json, resource, signal, sys
from pathlib import Path
from kvformat.errors import KVFormatError
from tests.reliability import small
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
location, limit = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    with small.create(location) as writer:
        small.fill(writer)
except KVFormatError as error:
    print(json.dumps([error.code, error.message, error.path]))
"""


def test_a_real_limit_on_file_sizes(tmp_path):
    """The kernel itself cuts a write short, and refuses the rest."""
    limit = 8192 + 1000  # the header of a shard fits, its first record does not
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "ds", str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=REPOSITORY,
    )
    code, message, path = json.loads(done.stdout)
    assert (code, Path(path).suffix) == ("E200", ".shard")
    assert "bytes are needed" in message
    assert small.tree(tmp_path) == {}


def test_a_real_full_device(tmp_path):
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(kvformat.StorageError) as caught:  # noqa: PTH123
        LocalFiles().write(full.fileno(), [b"12345"], 0, tmp_path)
    assert caught.value.code == "E200"
    assert "5 bytes are needed" in caught.value.message


def test_a_real_refusal_to_sync(tmp_path):
    reader, writer = os.pipe()
    try:
        with pytest.raises(kvformat.StorageError) as caught:
            LocalFiles().sync(writer, tmp_path)
    finally:
        os.close(reader)
        os.close(writer)
    assert caught.value.code == "E202"


def test_real_devices_without_links_between_them(tmp_path):
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    with pytest.raises(kvformat.StorageError) as caught:
        LocalFiles().link(Path("/proc/self/status"), tmp_path / "b")
    assert caught.value.code == "E201"


NOBODY = """
import json, os, sys
from pathlib import Path
import numpy, kvformat
from tests.reliability import small
location, before = Path(sys.argv[1]), Path(sys.argv[2])
with small.create(before) as writer:  # loads every module while the interpreter may still be read
    small.fill(writer)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    with small.create(location) as writer:
        small.fill(writer)
except kvformat.KVFormatError as error:
    print(json.dumps([error.code, error.path]))
"""


@pytest.mark.parametrize("mode", [0o555, 0o000])
@pytest.mark.parametrize("below", ["ds", "sets/ds"])
def test_a_directory_without_permission(tmp_path, mode, below):
    folder = tmp_path / "closed"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o011)
    folder.chmod(mode)
    try:
        done = subprocess.run(
            [sys.executable, "-c", NOBODY, folder / below, tmp_path / "before"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=REPOSITORY,
        )
    finally:
        folder.chmod(0o755)
    assert done.stderr == ""
    code, path = json.loads(done.stdout)
    assert code == "E207"
    assert path.startswith(str(folder))
    assert small.tree(folder) == {}
