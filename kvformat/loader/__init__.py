"""Feeding a training loop from published datasets.

Public names are what ``__all__`` lists; they load when used, and those of order and state without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvformat.loader.batch import Batch
    from kvformat.loader.collection import Collection, concat, mix
    from kvformat.loader.cursor import Cursor, Draw
    from kvformat.loader.dataset import Collate, KVDataset
    from kvformat.loader.layouts import HF, Packed, Padded
    from kvformat.loader.lookup import gather
    from kvformat.loader.prefetch import KVLoader
    from kvformat.loader.ranks import lockstep, open_across
    from kvformat.loader.sampler import BatchSampler
    from kvformat.loader.staged import StagedLayer
    from kvformat.loader.stager import LayerStager
    from kvformat.loader.stats import LoaderStats

__all__ = [
    "HF",
    "Batch",
    "BatchSampler",
    "Collate",
    "Collection",
    "Cursor",
    "Draw",
    "KVDataset",
    "KVLoader",
    "LayerStager",
    "LoaderStats",
    "Packed",
    "Padded",
    "StagedLayer",
    "concat",
    "gather",
    "lockstep",
    "mix",
    "open_across",
]

_LAZY = {
    "HF": "layouts",
    "Batch": "batch",
    "BatchSampler": "sampler",
    "Collate": "dataset",
    "Collection": "collection",
    "Cursor": "cursor",
    "Draw": "cursor",
    "KVDataset": "dataset",
    "KVLoader": "prefetch",
    "LayerStager": "stager",
    "LoaderStats": "stats",
    "Packed": "layouts",
    "Padded": "layouts",
    "StagedLayer": "staged",
    "concat": "collection",
    "gather": "lookup",
    "lockstep": "ranks",
    "mix": "collection",
    "open_across": "ranks",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'kvformat.loader' has no attribute {name!r}")
    value = getattr(import_module(f"kvformat.loader.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
