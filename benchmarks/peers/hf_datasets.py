"""Hugging Face datasets: one memory-mapped Arrow file, read in the arrow format, so that no value is converted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Value, disable_caching
from datasets.arrow_writer import ArrowWriter

from benchmarks.peers import Destination, Purpose, ReaderBase, sync_tree
from benchmarks.peers._arrow import as_array, single_value

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

NAME = "HF datasets"
NOTE = "mapped Arrow, format 'arrow', value taken as a buffer; no checksum"

LOADER_NOTE = "torch's DataLoader, format 'arrow', packed in the worker; the format 'torch' converts and was slower"


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:  # noqa: ARG001 - one layout serves all
    features = Features({"kv": Value("large_binary")})
    with ArrowWriter(path=str(path / "data.arrow"), features=features) as writer:
        for record in records:
            writer.write_table(pa.table({"kv": as_array(record.payload)}))
        writer.finalize()
    sync_tree(path)


class _Datasets(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        disable_caching()
        self._dataset = Dataset.from_file(str(path / "data.arrow")).with_format("arrow")

    def _value(self, index: int) -> memoryview:
        table: Any = self._dataset[index]
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


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Datasets:  # noqa: ARG001 - as write
    return _Datasets(path, corpus)
