"""safetensors: a file for every record, opened at first touch and kept open, which a large dataset cannot afford."""

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

NAME = "safetensors, file a record"
NOTE = "every file kept open after its first touch; no checksum"


def _file(path: Path, index: int) -> Path:
    return path / f"{index // 1000:03d}" / f"{index:06d}.safetensors"


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:  # noqa: ARG001 - one layout serves all
    for index, record in enumerate(records):
        file = _file(path, index)
        file.parent.mkdir(exist_ok=True)
        k, v = record.tensors()
        save_file({"k": k, "v": v}, file)
    sync_tree(path)


class _Files(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._path = path
        self._open: list[Any] = [None] * len(corpus)

    def _touch(self, index: int) -> Any:
        file = self._open[index] = safe_open(_file(self._path, index), framework="pt")
        return file

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        file = self._open[index] or self._touch(index)
        return file.get_tensor("k"), file.get_tensor("v")

    def copy_record(self, index: int, destination: Destination) -> int:
        k, v = self.views(index)
        nbytes = k.nbytes
        memmove(destination.address, k.data_ptr(), nbytes)
        memmove(destination.address + nbytes, v.data_ptr(), nbytes)
        return 2 * nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        file = self._open[index] or self._touch(index)
        tensor = file.get_tensor("k")
        nbytes = tensor.nbytes // self.num_layers
        memmove(destination.address, tensor.data_ptr() + layer * nbytes, nbytes)
        return nbytes

    def close(self) -> None:
        self._open.clear()


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Files:  # noqa: ARG001 - as write
    return _Files(path, corpus)
