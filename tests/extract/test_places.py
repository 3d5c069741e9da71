"""Where plans and documents files lie, which nothing else may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvformat.errors import KVFormatError
from kvformat.extract import estimate, extract_plan, open_plan, plan_file, run
from kvformat.extract.documents.opening import open_source
from kvformat.extract.finished import check_target
from kvformat.extract.join import check_documents
from kvformat.spec.paths import ROOT
from kvformat.write.prepared import PLAN_FILES, check_place, is_plan
from tests.cli.sharing import saved_plan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    saved_plan(tmp_path / "plan")
    return tmp_path / "plan"


def test_a_plan_is_known_by_its_files(plan: Path, tmp_path: Path) -> None:
    assert (plan_file.HEAD, plan_file.DOCUMENTS, plan_file.RECORDS) == PLAN_FILES
    assert is_plan(plan)
    assert not is_plan(tmp_path)
    (plan / "order.safetensors").unlink()
    assert not is_plan(plan)


def test_nothing_goes_into_the_directory_of_a_plan(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(plan)
    inside = [plan, plan / "ds", plan / "a" / "b", tmp_path / "link" / "ds", tmp_path / "x" / ".." / "plan"]
    for place in inside:
        for refuse in (
            lambda place: check_place(place, what="a dataset"),
            lambda place: check_target(place, probe=True),
        ):
            with pytest.raises(KVFormatError, match="a plan is here, and a dataset needs a place of its own") as told:
                refuse(place)
            assert (told.value.code, told.value.path) == ("E081", str(plan))
    for place in (tmp_path, tmp_path / "plan2", plan / ".." / "ds"):
        check_place(place, what="a dataset")
        assert check_target(place, probe=True) is None


def test_nothing_goes_below_a_published_dataset(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / ROOT).touch()
    for place in (tmp_path / "ds" / "sub", tmp_path / "ds" / "a" / "b", tmp_path / "ds" / "p.kvdocs"):
        with pytest.raises(KVFormatError, match="a dataset is published here") as told:
            check_place(place, what="a dataset")
        assert (told.value.code, told.value.path) == ("E081", str(tmp_path / "ds"))
    check_place(tmp_path / "ds", what="a dataset")  # who publishes there looks for itself
    check_place(tmp_path / "other", what="a dataset")


@pytest.mark.parametrize("there", [False, True])
def test_nothing_takes_the_name_of_a_documents_file(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "docs.kvdocs"
    if there:
        path.touch()
    with pytest.raises(KVFormatError, match="name of a documents file: choose another location for a plan") as told:
        check_place(path, what="a plan")
    assert (told.value.code, told.value.path) == ("E081", str(path))


@pytest.mark.parametrize("function", [run, estimate])
def test_a_dataset_is_refused_there_before_anything_is_read(function: Any, plan: Path, tmp_path: Path) -> None:
    for out in (plan, tmp_path / "new.kvdocs"):
        with pytest.raises(KVFormatError, match="choose another location") as told:
            function(model="no model", documents="no file", out=out)
        assert told.value.code == "E081"


def test_an_extractor_of_ones_own_is_refused_there_too(plan: Path) -> None:
    for out in (plan, plan / "ds"):
        with pytest.raises(KVFormatError, match="choose another location") as told:
            extract_plan(None, open_plan(plan), out)  # type: ignore[arg-type]  # it is not reached
        assert told.value.code == "E081"


@pytest.mark.parametrize("there", [False, True])
def test_a_python_file_without_its_function_says_how_to_write_it(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "caps.py"
    if there:
        path.write_text("def documents():\n    yield {'id': 'a', 'text': 'x'}\n")
    with pytest.raises(KVFormatError, match=r"with the function that yields the documents: caps\.py:FUNCTION") as told:
        open_source(path)
    assert told.value.code == "E081"
    if there:
        assert list(open_source(f"{path}:documents")) == [{"id": "a", "text": "x"}]


def test_a_plan_is_no_source_of_documents(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVFormatError, match=r"that is a plan: give it to `kvformat extract` as --plan") as told:
        open_source(plan)
    assert (told.value.code, told.value.path) == ("E081", str(plan))
    monkeypatch.setattr("kvformat.extract.join._Join", lambda *_, **__: type("None", (), {"wanted": None}))
    monkeypatch.setattr("kvformat.extract.join.tokeniser_of", lambda *_: None)
    with pytest.raises(KVFormatError, match="that is a plan"):
        check_documents(type("Set", (), {"text": None}), plan)  # type: ignore[arg-type]
