"""Small datasets to draw from: records of one to five tokens, some with several names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

import kvformat
from kvformat.read.dataset import Dataset

__all__ = ["make_dataset"]


def make_dataset(
    path: Path,
    records: int,
    *,
    aliases: Iterable[int] = (),
    slots: int = 4,
    layers: int = 1,
    context: kvformat.Context | None = None,
) -> Dataset:
    """``records`` records with ``slots`` a shard; those in ``aliases`` have one name more each time they occur."""
    schema = kvformat.Schema.uniform(num_layers=layers, num_kv_heads=1, head_dim=2)
    label = path.name
    with kvformat.create(path, schema=schema, context=context or kvformat.Context.unknown(), shard_slots=slots) as out:
        for number in range(records):
            tokens = num_tokens(number)
            values = torch.full((layers, tokens, 1, 2), float(number), dtype=torch.bfloat16)
            out.add(f"{label}-{number}", {"k": values, "v": -values}, token_ids=[number + 1] * tokens)
        for place, number in enumerate(aliases):
            out.alias(f"{label}-{number}-again-{place}", f"{label}-{number}")
    return kvformat.open(path)


def num_tokens(record: int) -> int:
    """Tokens of a record."""
    return record % 5 + 1
