"""Commands where transformers is not installed: they name the extra that brings it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import REPOSITORY, Run
from tests.cli.datasets import write
from tests.cli.sharing import saved_plan


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """An environment in which it cannot be imported."""
    package = tmp_path / "none" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('none', name='transformers')")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), str(REPOSITORY)])}


def test_extraction_by_a_plan(process: Run, without: dict[str, str], tmp_path: Path) -> None:
    saved_plan(tmp_path / "plan")
    done = process("extract", "--plan", tmp_path / "plan", "--model", tmp_path, "--out", tmp_path / "ds", env=without)
    assert (done.code, "Traceback" in done.stderr) == (3, False)
    assert "error [E205]: extraction needs transformers: pip install 'kvformat[hf]'" in done.stderr


def test_comparing_texts(process: Run, without: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "ds")
    documents = tmp_path / "d.jsonl"
    documents.write_text('{"id": "a", "text": "b"}\n')
    done = process("check-documents", tmp_path / "ds", documents, "--model", tmp_path, env=without)
    assert (done.code, "Traceback" in done.stderr) == (3, False)
    assert "error [E205]: tokenising needs transformers: pip install 'kvformat[hf]'" in done.stderr
