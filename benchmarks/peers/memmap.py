"""numpy.memmap: one flat file and an array of offsets. No names, no checksums, no header."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers import Destination, Purpose, ReaderBase, sync_tree

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

NAME = "numpy memmap"
NOTE = "flat file, offsets in a .npy; no checksum"


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:  # noqa: ARG001 - one layout serves all
    offsets = [0]
    with (path / "data.bin").open("wb", buffering=0) as file:
        for record in records:
            view = memoryview(record.payload)
            while view:
                view = view[file.write(view) :]
            offsets.append(offsets[-1] + record.payload.nbytes)
    np.save(path / "offsets.npy", np.array(offsets, dtype=np.int64))
    sync_tree(path)


class _Memmap(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._data = np.memmap(path / "data.bin", dtype=np.uint8, mode="r")
        self._plain = self._data.view(np.ndarray)
        self._view = memoryview(self._plain)
        self._offsets = np.load(path / "offsets.npy").tolist()

    def views(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, end, dims = self._offsets[index], self._offsets[index + 1], self.dims[index]
        middle = (start + end) // 2
        # numpy has no bfloat16: the bits are viewed as uint16.
        k = self._plain[start:middle].view(np.uint16).reshape(dims)
        v = self._plain[middle:end].view(np.uint16).reshape(dims)
        return k, v

    def copy_record(self, index: int, destination: Destination) -> int:
        start, end = self._offsets[index], self._offsets[index + 1]
        nbytes = end - start
        destination.view[:nbytes] = self._view[start:end]
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        start, end = self._offsets[index], self._offsets[index + 1]
        nbytes = (end - start) // 2 // self.num_layers
        start += layer * nbytes
        destination.view[:nbytes] = self._view[start : start + nbytes]
        return nbytes

    def close(self) -> None:
        del self._plain, self._view
        self._data._mmap.close()  # noqa: SLF001 - numpy offers no other way to unmap


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Memmap:  # noqa: ARG001 - as write
    return _Memmap(path, corpus)
