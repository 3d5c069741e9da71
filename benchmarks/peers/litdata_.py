"""LitData: local chunks of a flat BF16 tensor a record, memory-mapped, every chunk kept mapped, nothing decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from litdata import StreamingDataset
from litdata.streaming.cache import Cache

from benchmarks.peers import Destination, ReaderBase, memmove, sync_tree

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

NAME = "LitData"
NOTE = "StreamingDataset[i], mapped chunks, item decode; no checksum"
# Chunk offsets are 32 bits wide.
_CHUNK_NBYTES = 1 << 30


def write(path: Path, records: Sequence[Record]) -> None:
    cache = Cache(str(path / "lit"), chunk_bytes=_CHUNK_NBYTES)
    for index, record in enumerate(records):
        # uint8, because the tensor passes through numpy, which has no bfloat16.
        cache[index] = torch.from_numpy(record.payload)
    cache.done()
    cache.merge()
    sync_tree(path)


class _LitData(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._dataset: Any = StreamingDataset(str(path / "lit"), shuffle=False, batch_decode=0)

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._dataset[index].view(torch.bfloat16).view(2, *self.dims[index])
        return both[0], both[1]

    def copy_record(self, index: int, destination: Destination) -> int:
        tensor = self._dataset[index]
        nbytes = tensor.nbytes
        memmove(destination.address, tensor.data_ptr(), nbytes)
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        tensor = self._dataset[index]
        nbytes = tensor.nbytes // 2 // self.num_layers
        memmove(destination.address, tensor.data_ptr() + layer * nbytes, nbytes)
        return nbytes

    def close(self) -> None:
        self._dataset = None


def open_reader(path: Path, corpus: Corpus) -> _LitData:
    return _LitData(path, corpus)
