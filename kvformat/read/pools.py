"""How the shards of a dataset are held open: whole, or of a remote one by the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvformat.read.records import RecordPool
from kvformat.read.shards import ShardPool
from kvformat.spec.manifest import Totals
from kvformat.storage.remote_read import RemoteReader

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["pool_of"]

_SMALL_NBYTES = 2 << 20
_SHARDS_HELD = 4


def pool_of(dataset: Dataset, max_open_files: int) -> ShardPool | RecordPool:
    """What holds the shards of a dataset whose reader, index and schema are there."""
    reader, totals = dataset.reader, dataset.manifest.totals
    if isinstance(reader, RemoteReader) and not _whole_shards(reader, totals):
        return RecordPool(dataset, reader, max_open_files=max_open_files)
    return ShardPool(reader, dataset.index, max_open_files=max_open_files, tensors=len(dataset.slabs), totals=totals)


def _whole_shards(reader: RemoteReader, totals: Totals) -> bool:
    """Whether the cache holds whole shards: as told, or where records are small and there is room for several."""
    if reader.unit == "auto":
        small = totals.nbytes <= totals.records * _SMALL_NBYTES
        return small and (reader.cache_nbytes or 0) >= _SHARDS_HELD * totals.nbytes // totals.shards
    return reader.unit == "shard"
