"""Base datasets, each built once a session."""

from __future__ import annotations

from collections.abc import Callable

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
