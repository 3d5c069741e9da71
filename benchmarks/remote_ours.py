"""kvformat with the face of a remote peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvformat
from benchmarks.loaders import Delivered
from benchmarks.peers._remote import Source, Variant
from kvformat.loader import BatchSampler, KVLoader
from kvformat.storage.cache_options import CacheOptions

if TYPE_CHECKING:
    from benchmarks.shapes import Shape

NAME = "kvformat"
REMOTE = (
    Variant(
        "cache",
        "kvformat KVLoader",
        "first",
        "unit auto",
        "KVLoader(BatchSampler(shuffle='window'), prefetch_nbytes=128 MiB), packed, 2 threads; one process",
    ),
)
_CACHE_NBYTES = 32 << 30
_AHEAD_NBYTES = 128 << 20


class _Remote:
    def __init__(self, source: Source, cache: Path, batch_size: int) -> None:
        dataset = kvformat.open(
            source.url,
            verify="first",
            cache=CacheOptions(dir=str(cache / "kv"), max_nbytes=_CACHE_NBYTES),
            storage_options=source.options,
        )
        sampler = BatchSampler(dataset, batch_size=batch_size, shuffle="window", seed=5)
        self._loader: Any = KVLoader(dataset, sampler, layout="packed", prefetch_nbytes=_AHEAD_NBYTES)

    def epoch(self) -> Iterator[Delivered]:
        """All records once."""
        for batch in self._loader:
            found = batch.components
            yield Delivered(found["k"], found["v"], batch.num_tokens)
            del batch, found  # its memory goes into the next one

    def close(self) -> None:
        """Nothing outlives it."""
        self._loader = None


def open_remote(source: Source, shape: Shape, variant: str, cache: Path, batch_size: int) -> _Remote:  # noqa: ARG001 - it knows the shape, and there is one variant
    return _Remote(source, cache, batch_size)
