"""safetensors: all records in shards of at most 1 GiB, `0004/k` and `0004/v`, every shard kept open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.peers import Destination, Purpose, ReaderBase, memmove, sync_tree

if TYPE_CHECKING:
    import torch

    from benchmarks.shapes import Corpus, Record

NAME = "safetensors, shard"
NOTE = "safe_open kept open, mapped tensors; no checksum"
_SHARD_NBYTES = 1 << 30


def _groups(sizes: Sequence[int]) -> list[range]:
    groups, first, total = [], 0, 0
    for index, nbytes in enumerate(sizes):
        if total and total + nbytes > _SHARD_NBYTES:
            groups.append(range(first, index))
            first, total = index, 0
        total += nbytes
    return [*groups, range(first, len(sizes))]


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:  # noqa: ARG001 - one layout serves all
    for number, group in enumerate(_groups([record.payload.nbytes for record in records])):
        tensors: dict[str, torch.Tensor] = {}
        for index in group:
            tensors[f"{index}/k"], tensors[f"{index}/v"] = records[index].tensors()
        save_file(tensors, path / f"{number:04d}.safetensors")
    sync_tree(path)


class _Shards(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._where: list[tuple[Any, str, str]] = []
        for number, group in enumerate(_groups(corpus.nbytes_of)):
            file = safe_open(path / f"{number:04d}.safetensors", framework="pt")
            self._where += [(file, f"{index}/k", f"{index}/v") for index in group]

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        file, k, v = self._where[index]
        return file.get_tensor(k), file.get_tensor(v)

    def copy_record(self, index: int, destination: Destination) -> int:
        k, v = self.views(index)
        nbytes = k.nbytes
        memmove(destination.address, k.data_ptr(), nbytes)
        memmove(destination.address + nbytes, v.data_ptr(), nbytes)
        return 2 * nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        # A mapped tensor costs nothing to take whole, and is quicker to address than get_slice, which copies.
        file, k, _ = self._where[index]
        tensor = file.get_tensor(k)
        nbytes = tensor.nbytes // self.num_layers
        memmove(destination.address, tensor.data_ptr() + layer * nbytes, nbytes)
        return nbytes

    def close(self) -> None:
        self._where.clear()


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Shards:  # noqa: ARG001 - as write
    return _Shards(path, corpus)
