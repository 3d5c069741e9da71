"""webdataset: tar shards of one bytes member a record, read through curl, with its file cache or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import webdataset

from benchmarks.peers._loading import Batch, Collate, loader_options
from benchmarks.peers._remote import NUM_WORKERS, Source, Variant

if TYPE_CHECKING:
    from benchmarks.shapes import Record, Shape

NAME = "webdataset"
_HOW = "WebLoader, 2 workers, signed URLs through its curl, shardshuffle, shuffle(1000), batched in the worker"
REMOTE = (
    Variant("cache", "webdataset, cached", "none", "shards", f"{_HOW}; cache_dir: a shard is downloaded, then read"),
    Variant("stream", "webdataset, streamed", "none", "none", f"{_HOW}; no cache_dir: streamed in every epoch"),
)
_SHARD_NBYTES = 1 << 26
_SHUFFLED = 1000
_MEMBER = "kv.bin"


def write_remote(path: Path, records: Sequence[Record]) -> None:
    # Workers share out whole shards: each needs some, of few records too.
    most = min(_SHARD_NBYTES, sum(record.payload.nbytes for record in records) // (2 * NUM_WORKERS))
    with webdataset.ShardWriter(str(path / "shard-%06d.tar"), maxsize=most, verbose=0) as writer:
        for record in records:
            writer.write({"__key__": record.name, _MEMBER: record.payload.tobytes()})


class _Remote:
    def __init__(self, source: Source, shape: Shape, cache: Path | None, batch_size: int) -> None:
        dataset = (
            webdataset.WebDataset(
                source.signed,
                shardshuffle=len(source.signed),
                cache_dir=None if cache is None else str(cache),
                seed=7,
            )
            .shuffle(_SHUFFLED)
            .to_tuple(_MEMBER)
            .batched(batch_size, collation_fn=_Collate(shape))
        )
        self._loader: Any = webdataset.WebLoader(dataset, batch_size=None, **loader_options(NUM_WORKERS))

    def epoch(self) -> Iterator[Batch]:
        yield from self._loader

    def close(self) -> None:
        self._loader = None


class _Collate(Collate):
    def __call__(self, items: Sequence[Any]) -> Batch:
        return super().__call__([value for (value,) in items])


def open_remote(source: Source, shape: Shape, variant: str, cache: Path, batch_size: int) -> _Remote:
    return _Remote(source, shape, cache if variant == "cache" else None, batch_size)
