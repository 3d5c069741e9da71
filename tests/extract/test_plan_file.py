from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvformat.errors import DamageError
from kvformat.extract.documents.file import open_documents
from kvformat.extract.plan_file import DOCUMENTS, HEAD, RECORDS, load
from tests.extract.test_plan import plan_of


def test_where_no_plan_is_it_is_told_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "plan", tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(DamageError, match=r"no plan is there .*: make one with `kvformat plan` \(") as refused:
            load(path)
        assert (refused.value.code, refused.value.path) == ("E307", str(path))


@pytest.mark.parametrize("name", [HEAD, DOCUMENTS, RECORDS])
def test_a_plan_without_one_of_its_files_is_restored_or_made_again(name: str, tmp_path: Path) -> None:
    plan_of(1, 2).save(tmp_path / "plan")
    (tmp_path / "plan" / name).unlink()
    message = "no sound plan: the file is missing; restore the plan from a copy, or make it again"
    with pytest.raises(DamageError, match=message) as refused:
        load(tmp_path / "plan")
    assert (refused.value.code, refused.value.path) == ("E307", str(tmp_path / "plan" / name))


def test_where_no_documents_file_is_it_is_told_how_to_make_one(tmp_path: Path) -> None:
    plan_of(1, 2).save(tmp_path / "plan")
    shutil.copy(tmp_path / "plan" / DOCUMENTS, tmp_path / "d.kvdocs")
    assert len(open_documents(tmp_path / "d.kvdocs")) == 2
    with pytest.raises(DamageError, match="no documents file is there: make one with `kvformat documents`") as refused:
        open_documents(tmp_path / "e.kvdocs")
    assert (refused.value.code, refused.value.path) == ("E002", str(tmp_path / "e.kvdocs"))
