"""The way to a dataset is made where it is missing, and only that is removed again."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvformat
from kvformat.errors import StorageError
from kvformat.storage.local_write import LocalFiles
from kvformat.write.directory import Directory
from kvformat.write.staging import Plan
from tests.write.make import tree

PLAN = Plan(
    context="00" * 32, header_size=4096, schema="11" * 32, shard_nbytes=1, shard_slots=1, tag="", version="1.0"
)


def test_what_was_made_is_removed(tmp_path):
    (tmp_path / "there").mkdir()
    directory = Directory(LocalFiles(), tmp_path / "there" / "sets" / "ds")
    staging, resumed = directory.stage(PLAN, resume=True)
    assert not resumed
    assert staging.path.parent == tmp_path / "there" / "sets" / "ds" / ".staging"
    directory.remove()
    assert staging.path.exists()
    staging.remove()
    directory.remove()
    assert tree(tmp_path) == ["there"]


def test_what_an_interrupted_run_left_is_taken_only_to_resume(tmp_path):
    first, _ = Directory(LocalFiles(), tmp_path / "ds").stage(PLAN, resume=False)
    first.release()
    other, resumed = Directory(LocalFiles(), tmp_path / "ds").stage(PLAN, resume=False)
    assert (other.path == first.path, resumed) == (False, False)
    other.remove()
    again, resumed = Directory(LocalFiles(), tmp_path / "ds").stage(PLAN, resume=True)
    assert (again.path, resumed) == (first.path, True)
    again.remove()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    directory = Directory(LocalFiles(), tmp_path / "file" / "ds")
    with pytest.raises(kvformat.KVFormatError) as caught:
        directory.stage(PLAN, resume=False)
    assert caught.value.code == "E207"
    directory.remove()
    assert tree(tmp_path) == ["file"]


def test_a_link_that_leads_nowhere_is_in_the_way(tmp_path):
    (tmp_path / "ds").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match="leads nowhere") as caught:
        Directory(LocalFiles(), tmp_path / "ds").stage(PLAN, resume=False)
    assert caught.value.code == "E207"


def test_a_file_system_that_takes_no_directories_is_named_as_such():
    with pytest.raises(StorageError, match="no directory can be made here") as caught:
        Directory(LocalFiles(), Path("/proc/kvformat-test")).stage(PLAN, resume=False)
    assert caught.value.code == "E207"
