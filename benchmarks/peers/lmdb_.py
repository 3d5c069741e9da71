"""LMDB: payload by 8-byte key, read through the mapping without copies, lock, or read-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from benchmarks.peers import Destination, Purpose, ReaderBase, sync_tree

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

NAME = "LMDB"
NOTE = "readonly, lock=False, buffers=True, one read transaction; no checksum"


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:  # noqa: ARG001 - one layout serves all
    total = sum(record.payload.nbytes for record in records)
    # One page of slack a record, and room for the tree.
    map_size = total + len(records) * 8192 + (64 << 20)
    with lmdb.open(str(path / "db"), map_size=map_size, subdir=True, readahead=False, writemap=True) as database:
        with database.begin(write=True, buffers=True) as transaction:
            for index, record in enumerate(records):
                transaction.put(index.to_bytes(8, "big"), record.payload, append=True)
        database.sync(True)  # noqa: FBT003 - LMDB's own signature
    sync_tree(path)


class _Lmdb(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._database = lmdb.open(str(path / "db"), readonly=True, lock=False, readahead=False, max_spare_txns=1)
        self._transaction = self._database.begin(buffers=True)
        self._get = self._transaction.get
        self._keys = [index.to_bytes(8, "big") for index in range(len(corpus))]

    def views(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        both = np.frombuffer(self._get(self._keys[index]), dtype=np.uint16).reshape(2, *self.dims[index])
        return both[0], both[1]

    def copy_record(self, index: int, destination: Destination) -> int:
        value = self._get(self._keys[index])
        nbytes = len(value)
        destination.view[:nbytes] = value
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        value = self._get(self._keys[index])
        nbytes = len(value) // 2 // self.num_layers
        destination.view[:nbytes] = value[layer * nbytes : (layer + 1) * nbytes]
        return nbytes

    def close(self) -> None:
        self._transaction.abort()
        self._database.close()


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Lmdb:  # noqa: ARG001 - as write
    return _Lmdb(path, corpus)
