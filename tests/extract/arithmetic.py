"""Extractors without a model: K and V are the token ids."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from kvformat.interfaces import Extracted
from kvformat.spec.context import Context, Text
from kvformat.spec.schema import Schema

__all__ = ["Arithmetic", "ShallowArithmetic"]


class Arithmetic:
    """Two layers, and every call is kept.

    Parameters
    ----------
    seen
        Told the first token id of each document, before it is computed.
    wrong
        First token ids of documents that give NaN.
    batched
        Added to K of documents that are computed together.
    """

    schema = Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=256, dtype="F32")
    context = Context.unknown()
    text = Text()
    files: dict[str, bytes] = {}  # noqa: RUF012 - read only
    max_tokens = None

    def __init__(
        self,
        seen: Callable[[int], object] = lambda _: None,
        *,
        wrong: Collection[int] = (),
        batched: float = 0.0,
        **provenance: str,
    ) -> None:
        self.provenance = provenance
        self.calls: list[list[list[int]]] = []
        self._seen = seen
        self._wrong = wrong
        self._batched = batched

    @property
    def first(self) -> list[int]:
        """First token id of each document that was computed."""
        return [ids[0] for call in self.calls for ids in call]

    def extract(self, given: Any) -> list[Extracted]:
        self.calls.append([document.token_ids.tolist() for document in given])
        found = []
        for document in given:
            first = int(document.token_ids[0])
            self._seen(first)
            ids = torch.from_numpy(document.token_ids.astype(np.float32))
            key = ids[None, :, None, None].expand(*self._dims).clone()
            if len(given) > 1:
                key += self._batched
            if first in self._wrong:
                key[-1, 0, 0, 7] = torch.nan
            found.append(Extracted(components={"k": key, "v": -key}, extras={}))
        return found

    @property
    def _dims(self) -> tuple[int, ...]:
        return len(self.schema.components[0].layers), -1, 1, 256


class ShallowArithmetic(Arithmetic):
    """One layer."""

    schema = Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=256, dtype="F32")
