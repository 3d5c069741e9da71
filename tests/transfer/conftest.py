"""A dataset to copy, and places to copy it from and to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.datasets import write
from tests.transfer.places import Place, filled, tree


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of eight shards with covered files; read only."""
    path = tmp_path_factory.mktemp("published") / "dataset"
    write(path, lengths=(3, 5, 8, 300, 7, 40, 41, 42), shard_nbytes=4096, files={"notes": b"one", "empty": b""})
    assert sum(name.startswith("shards/") for name in tree(path)) == 8
    return path


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another dataset."""
    return write(tmp_path_factory.mktemp("other") / "dataset", lengths=(3, 5), values=9)


@pytest.fixture
def source(dataset: Path, tmp_path: Path) -> Callable[[str], Place]:
    """The dataset at a place that a test may change."""
    return lambda kind: filled(kind, dataset, tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str], Place]:
    """An empty place; a directory does not exist yet."""
    return lambda kind: Place(kind, tmp_path / "sets" / "target")


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files wait between two object stores; empty after every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvformat" / "spool"
