"""What tests of extraction leave as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Bits depend on how many threads torch computes with, which an extraction may set for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
