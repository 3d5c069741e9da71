"""What a dataset saves: loading a few of its records, against the model computing them again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kvformat.extract import PipelineTimes
    from kvformat.read.dataset import Dataset

__all__ = ["LoadTime", "load_time"]

_RECORDS = 8


class LoadTime(Struct, frozen=True, kw_only=True):
    """How long some records take to load, verified, and what the model took for as many tokens.

    Attributes
    ----------
    records, tokens, nbytes
        What was loaded.
    load_s, model_s
        Seconds of loading it, and of the model for as many tokens, at the rate of the whole run.
    """

    records: int
    tokens: int
    nbytes: int
    load_s: float
    model_s: float

    def __str__(self) -> str:
        return (
            f"load against recompute: {self.tokens:,} tokens in {self.load_s * 1e3:,.1f} ms, verified, against "
            f"{self.model_s * 1e3:,.0f} ms of the model, {self.model_s / max(self.load_s, 1e-9):,.0f} times as long"
        )


def load_time(dataset: Dataset, spent: PipelineTimes) -> LoadTime | None:
    """Load a few records, spread over the dataset; None where the model computed nothing.

    Each is copied once into a reused buffer, as a trainer does. Files that were just written are still in memory.
    """
    if not spent.tokens or not spent.model_s:
        return None
    import numpy as np

    step = max(1, len(dataset) // _RECORDS)
    numbers = range(0, len(dataset), step)[:_RECORDS]
    buffer = np.zeros(max(dataset[number].nbytes for number in numbers), dtype=np.uint8)
    dataset.read_into(numbers[0], buffer)  # what is loaded and opened at the first use is no part of it
    tokens = nbytes = 0
    begun = time.perf_counter()
    for number in numbers:
        nbytes += dataset.read_into(number, buffer)
        tokens += dataset[number].num_tokens
    load_s = time.perf_counter() - begun
    return LoadTime(
        records=len(numbers),
        tokens=tokens,
        nbytes=nbytes,
        load_s=load_s,
        model_s=spent.model_s / spent.tokens * tokens,
    )
