"""Copies of published datasets, from anywhere to anywhere: :func:`kvformat.copy`."""

from __future__ import annotations

__all__: list[str] = []
