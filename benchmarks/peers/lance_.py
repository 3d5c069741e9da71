"""Lance: a row a record, `take` of one row; for one layer the blob interface, which reads a byte range."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa

from benchmarks.peers import Destination, Purpose, ReaderBase, sync_tree
from benchmarks.peers._arrow import all_values, as_array, single_value

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record, Shape

# It says so at every fork of a process that imported it; forks that use it are not made here.
warnings.filterwarnings("ignore", message="lance is not fork-safe")

NAME = "Lance"
NOTE = "take([i]) into fresh memory, threads of its own; layers of long records as blobs; no checksum"
LOADER_NOTE = "DataLoader over take(batch) in spawned workers, packed there; get_safe_loader makes Python objects"
CONTEXT = "spawn"  # its threads do not survive a fork; its own get_safe_loader spawns too
_LARGE_TOKEN_NBYTES = 1 << 16


def _is_blob(purpose: Purpose, shape: Shape) -> bool:
    # The blob interface reads a byte range, which pays once a record is much longer than a layer is worth.
    return purpose == "slab" and shape.token_nbytes > _LARGE_TOKEN_NBYTES


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:
    shape = records[0].shape
    blob = _is_blob(purpose, shape)
    metadata = {"lance-encoding:blob": "true"} if blob else None
    schema = pa.schema([pa.field("kv", pa.large_binary(), metadata=metadata)])
    # Format 2.0 writes fastest and takes small rows fastest, 2.2 takes large rows fastest; blobs need the default.
    version = "2.2" if purpose in {"read", "load"} and shape.token_nbytes > _LARGE_TOKEN_NBYTES else "2.0"

    def batches() -> Iterator[pa.RecordBatch]:
        for record in records:
            yield pa.record_batch([as_array(record.payload)], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    lance.write_dataset(reader, str(path / "lance"), data_storage_version=None if blob else version)
    sync_tree(path)


class _Lance(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus, purpose: Purpose) -> None:
        super().__init__(corpus)
        self._dataset = lance.dataset(str(path / "lance"))
        self._blob = _is_blob(purpose, corpus.shape)

    def _value(self, index: int) -> memoryview:
        return single_value(self._dataset.take([index], columns=["kv"]).column(0).chunk(0))

    def views(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        both = np.frombuffer(self._value(index), dtype=np.uint16).reshape(2, *self.dims[index])
        return both[0], both[1]

    def views_of(self, numbers: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        column = self._dataset.take(list(numbers), columns=["kv"]).column(0)
        values = (value for chunk in column.chunks for value in all_values(chunk))
        found = []
        for number, value in zip(numbers, values, strict=True):
            both = np.frombuffer(value, dtype=np.uint16).reshape(2, *self.dims[number])
            found.append((both[0], both[1]))
        return found

    def copy_record(self, index: int, destination: Destination) -> int:
        value = self._value(index)
        nbytes = len(value)
        destination.view[:nbytes] = value
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        nbytes = self.nbytes_of[index] // 2 // self.num_layers
        if not self._blob:
            destination.view[:nbytes] = self._value(index)[layer * nbytes : (layer + 1) * nbytes]
            return nbytes
        with self._dataset.take_blobs("kv", indices=[index])[0] as file:
            file.seek(layer * nbytes)
            return int(file.readinto(destination.view[:nbytes]))


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Lance:
    return _Lance(path, corpus, purpose)
