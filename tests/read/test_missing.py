"""What is said of a location where nothing is published."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvformat
from kvformat.read.missing import data_without_root, not_published

DATA = "data lie here without kvformat.json, which is written last: "


@pytest.mark.parametrize("folder", ["shards", "manifest"])
def test_data_without_a_root_are_named_with_the_remedy(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    error = not_published(tmp_path)
    assert (error.code, error.path) == ("E001", str(tmp_path / "kvformat.json"))
    assert error.message.startswith(f"no dataset is published here: {DATA}")
    for remedy in ("finish the copy", "restore the file", "write the dataset again"):
        assert remedy in error.message


@pytest.mark.parametrize("look", [kvformat.open, kvformat.verify])
def test_readers_say_so(look, saved) -> None:
    path = saved("two-shards")
    (path / "kvformat.json").unlink()
    with pytest.raises(kvformat.DatasetNotFoundError, match=DATA) as refused:
        look(path)
    assert (refused.value.code, refused.value.path) == ("E001", str(path / "kvformat.json"))


def test_staged_work_is_resumed_whatever_else_lies_there(tmp_path: Path) -> None:
    for folder in (".staging", "shards"):
        (tmp_path / folder).mkdir()
    assert "staged work is; resume it" in not_published(tmp_path).message


@pytest.mark.parametrize("folder", ["", "somewhere else", "files", "index"])
def test_a_location_without_data_is_checked(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    assert not_published(tmp_path).message == "no dataset is published here: check the location"
    assert not_published(tmp_path / "absent").message == "no dataset is published here: check the location"


def test_with_a_root_nothing_is_missing(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "kvformat.json").symlink_to("nowhere")  # refused as what it is, not as missing
    assert data_without_root(tmp_path) is None
