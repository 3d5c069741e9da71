"""What the loader's tests share."""

from __future__ import annotations

import pytest
import torch

from kvformat.loader import buffers


@pytest.fixture
def fake_pinned(monkeypatch) -> list[int]:
    """Page-locked memory where there is no device for it; the sizes asked for."""
    asked: list[int] = []

    def fake(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(buffers, "_pinned", fake)
    return asked
