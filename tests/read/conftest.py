"""Datasets on disk for the readers' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.vectors import VALID


@pytest.fixture(scope="session")
def base() -> Callable[[str], DatasetFiles]:
    """An own copy of a valid dataset by name."""
    built: dict[str, DatasetFiles] = {}

    def copy(name: str) -> DatasetFiles:
        if name not in built:
            built[name] = VALID[name].build()
        return built[name].copy()

    return copy


@pytest.fixture
def saved(base: Callable[[str], DatasetFiles], tmp_path: Path) -> Callable[[str], Path]:
    """A valid dataset by name, saved to a directory of its own."""

    def save(name: str) -> Path:
        path = tmp_path / name
        base(name).save(path)
        return path

    return save


@pytest.fixture
def flip(base: Callable[[str], DatasetFiles]) -> Callable[..., None]:
    """Flip a bit of a stored tensor on disk, in place."""

    def change(path: Path, name: str, *, record: int = 0, tensor: str = "k", at: int = 0) -> None:
        files = base(name)
        shard, start = files.locate(record)
        offset = start + files.placement(record).tensors[tensor].offset + at
        with (path / files.shard_paths()[shard]).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))

    return change
