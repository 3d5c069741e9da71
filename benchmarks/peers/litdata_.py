"""LitData: local chunks of one bytes item a record, memory-mapped, an item being a view of the mapping."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import downloader
from litdata.streaming.cache import Cache

from benchmarks.peers import Destination, Purpose, ReaderBase, sync_tree
from benchmarks.peers._loading import Batch, Collate, loader_options
from benchmarks.peers._remote import NUM_WORKERS, Source, Variant

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Outline, Record, Shape

NAME = "LitData"
NOTE = "StreamingDataset[i], bytes item, mapped chunk, batch_decode=0; no checksum"
LOADER_NOTE = "StreamingDataLoader(StreamingDataset(shuffle=True)), shuffles chunks, then items; packed in the worker"
REMOTE = (
    Variant(
        "cache",
        "LitData",
        "none",
        "chunks",
        "StreamingDataLoader(StreamingDataset(url, cache_dir, shuffle=True, batch_decode='all')), 2 workers",
    ),
)
REPEATED = True
# Offsets are 32 bits wide, so a chunk stays below 4 GiB. Reading is quickest with everything in one mapping, writing
# with small chunks, whose memory is reused, loading with something between.
_CHUNK_NBYTES: dict[Purpose, int] = {"read": 1 << 30, "slab": 1 << 30, "write": 1 << 26, "load": 1 << 28}


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:
    _write(path, records, _CHUNK_NBYTES[purpose])
    sync_tree(path)


def _write(path: Path, records: Sequence[Record], chunk_nbytes: int) -> None:
    cache = Cache(str(path / "lit"), chunk_bytes=chunk_nbytes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
        for index, record in enumerate(records):
            cache[index] = record.payload.tobytes()
        cache.done()
        cache.merge()


class _LitData(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._dataset: Any = StreamingDataset(str(path / "lit"), shuffle=False, batch_decode=0)

    def views(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        both = np.frombuffer(self._dataset[index], dtype=np.uint16).reshape(2, *self.dims[index])
        return both[0], both[1]

    def copy_record(self, index: int, destination: Destination) -> int:
        value = self._dataset[index]
        nbytes = len(value)
        destination.view[:nbytes] = value
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        value = self._dataset[index]
        nbytes = len(value) // 2 // self.num_layers
        destination.view[:nbytes] = value[layer * nbytes : (layer + 1) * nbytes]
        return nbytes

    def close(self) -> None:
        self._dataset = None


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _LitData:  # noqa: ARG001 - one reader serves all
    return _LitData(path, corpus)


class _Loader:
    """One epoch over what was written as often as a round reads it, so that it does not start over in between."""

    def __init__(self, path: Path, corpus: Outline, *, batch_size: int, num_workers: int) -> None:
        dataset = StreamingDataset(str(path / "lit"), shuffle=True, batch_decode=0)
        self._loader: Any = StreamingDataLoader(
            dataset, batch_size=batch_size, collate_fn=Collate(corpus.shape), **loader_options(num_workers)
        )

    def batches(self, order: Sequence[Sequence[int]]) -> Iterator[Batch]:  # noqa: ARG002 - it has an order of its own
        yield from self._loader

    def close(self) -> None:
        self._loader = None


def open_loader(path: Path, corpus: Outline, *, batch_size: int, epochs: int, num_workers: int) -> _Loader:  # noqa: ARG001 - written so often
    return _Loader(path, corpus, batch_size=batch_size, num_workers=num_workers)


def write_remote(path: Path, records: Sequence[Record]) -> None:
    _write(path, records, _CHUNK_NBYTES["write"])


class _Remote:
    def __init__(self, source: Source, shape: Shape, cache: Path, batch_size: int) -> None:
        # Its obstore takes no options and refuses plain HTTP, which a server on loopback speaks.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001 - there is no other way
        dataset = StreamingDataset(
            f"{source.url}/lit",
            cache_dir=str(cache),
            shuffle=True,
            batch_decode="all",  # by far the quickest: with fewer, a downloaded chunk is read again and again
            storage_options={
                "endpoint_url": source.endpoint,
                "aws_access_key_id": source.key,
                "aws_secret_access_key": source.secret,
                "region_name": source.region,
            },
        )
        self._loader: Any = StreamingDataLoader(
            dataset, batch_size=batch_size, collate_fn=Collate(shape), **loader_options(NUM_WORKERS)
        )

    def epoch(self) -> Iterator[Batch]:
        yield from self._loader

    def close(self) -> None:
        self._loader = None


def open_remote(source: Source, shape: Shape, variant: str, cache: Path, batch_size: int) -> _Remote:  # noqa: ARG001 - there is one
    return _Remote(source, shape, cache, batch_size)
