"""Lance: a row a record, `take` of one row; for one layer the blob interface, which reads a byte range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa

from benchmarks.peers import Destination, ReaderBase, sync_tree
from benchmarks.peers._arrow import as_array, single_value

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

NAME = "Lance"
NOTE = "take([i]); decodes into fresh memory, on threads of its own; no checksum"


def write(path: Path, records: Sequence[Record]) -> None:
    schema = pa.schema([pa.field("kv", pa.large_binary())])

    def batches() -> Iterator[pa.RecordBatch]:
        for record in records:
            yield pa.record_batch([as_array(record.payload)], schema=schema)

    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), str(path / "lance"))
    sync_tree(path)


class _Lance(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._dataset = lance.dataset(str(path / "lance"))

    def _value(self, index: int) -> memoryview:
        table = self._dataset.take([index], columns=["kv"])
        return single_value(table.column(0).chunk(0))

    def views(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        both = np.frombuffer(self._value(index), dtype=np.uint16).reshape(2, *self.dims[index])
        return both[0], both[1]

    def copy_record(self, index: int, destination: Destination) -> int:
        value = self._value(index)
        nbytes = len(value)
        destination.view[:nbytes] = value
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        value = self._value(index)
        nbytes = len(value) // 2 // self.num_layers
        destination.view[:nbytes] = value[layer * nbytes : (layer + 1) * nbytes]
        return nbytes


def open_reader(path: Path, corpus: Corpus) -> _Lance:
    return _Lance(path, corpus)
