"""The file systems of the kit that fail on purpose do what they say, and no more."""

from __future__ import annotations

import errno
import threading

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.local_write import LocalFiles
from kvformat.testing.faults import FaultyFiles, InterruptedFiles
from tests.reliability import small

CALLS = {
    "make_dir": lambda files, base: files.make_dir(base / "d"),
    "create": lambda files, base: files.create_file(base / "c", b""),
    "write": lambda files, base: files.create_file(base / "w", b"12345678"),
    "sync": lambda files, base: files.create_file(base / "s", b""),
    "sync_dir": lambda files, base: files.sync_dir(base),
    "link": lambda files, base: files.link(base / "there", base / "l"),
    "unlink": lambda files, base: files.unlink(base / "there"),
}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "there").write_bytes(b"there")
    return tmp_path


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("error", "code"), [(errno.ENOSPC, "E200"), (errno.EACCES, "E207"), (errno.EIO, "E203"), (errno.EMFILE, "E204")]
)
def test_the_chosen_operation_fails(base, kind, error, code):
    files = FaultyFiles(kind, nth=0, error=error)
    with pytest.raises(KVFormatError) as caught:
        CALLS[kind](files, base)
    assert caught.value.code == ("E202" if kind.startswith("sync") else code)
    assert [str(path) for path in files.failed] == [caught.value.path]
    assert files.calls[kind] == 1


@pytest.mark.parametrize("error", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_links(base, error):
    with pytest.raises(KVFormatError) as caught:
        FaultyFiles("link", nth=0, error=error).link(base / "there", base / "l")
    assert caught.value.code == "E201"
    assert not (base / "l").exists()


def test_a_write_that_fails_is_half_done(base):
    files = FaultyFiles("write", nth=0, error=errno.ENOSPC)
    with pytest.raises(KVFormatError, match="8 bytes are needed"):
        files.create_file(base / "w", b"12345678")
    assert (base / "w").read_bytes() == b"1234"


@pytest.mark.parametrize("lasting", [False, True])
def test_one_operation_fails_or_all_from_it_on(base, lasting):
    files = FaultyFiles("make_dir", nth=2, error=errno.EIO, lasting=lasting)
    made = []
    for name in "abcdef":
        try:
            made.append(files.make_dir(base / name))
        except KVFormatError:
            made.append(None)
    assert made == [True, True, None, *[None if lasting else True] * 3]
    assert [path.name for path in files.failed] == (["c", "d", "e", "f"] if lasting else ["c"])


def test_a_directory_that_stays(base):
    (base / "d").mkdir()
    assert not FaultyFiles("remove_dir", nth=0, error=errno.EACCES).remove_dir(base / "d")
    assert (base / "d").is_dir()


def test_where_nothing_fails_all_is_as_ever(tmp_path):
    found = []
    for name, files in (("plain", LocalFiles()), ("faulty", FaultyFiles("write", nth=-1, error=0))):
        with small.create(tmp_path / name, files=files) as writer:
            small.fill(writer)
        found.append((writer.id, small.tree(tmp_path / name)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [*CALLS, "remove_dir"])
def test_an_interrupt_comes_after_the_deed(base, kind):
    calls = CALLS | {"remove_dir": lambda files, base: files.remove_dir(base / "d")}
    if kind == "remove_dir":
        (base / "d").mkdir()
    plan = InterruptedFiles(nth=-1)
    calls[kind](plan, base)
    kinds = [done for done, _ in plan.done]
    for path in (base / "d", base / "c", base / "w", base / "s", base / "l"):
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
    (base / "there").write_bytes(b"there")
    if kind == "remove_dir":
        (base / "d").mkdir()
    files = InterruptedFiles(nth=kinds.index(kind))
    with pytest.raises(KeyboardInterrupt):
        calls[kind](files, base)
    done, path = files.done[-1]
    assert done == kind
    assert path.exists() == (kind not in {"unlink", "remove_dir"})


def test_only_the_main_thread_is_interrupted(base):
    files = InterruptedFiles(nth=0)
    thread = threading.Thread(target=files.make_dir, args=(base / "d",))
    thread.start()
    thread.join()
    assert files.done == []
    with pytest.raises(KeyboardInterrupt):
        files.make_dir(base / "e")
