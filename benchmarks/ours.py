"""kvformat behind the interface of a peer, with the verification mode to read with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

import kvformat
from benchmarks.peers import Destination, ReaderBase, memmove

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

__all__ = ["NAME", "KvformatReader", "Verify", "open_reader", "write"]

NAME = "kvformat"
Verify = Literal["off", "first", "always"]


def write(path: Path, records: Sequence[Record]) -> None:
    shape = records[0].shape
    schema = kvformat.Schema.uniform(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype="BF16"
    )
    with kvformat.create(path / "ds", schema=schema, context=kvformat.Context.unknown()) as writer:
        for record in records:
            k, v = record.tensors()
            writer.add(record.name, {"k": k, "v": v}, token_ids=record.token_ids)


class KvformatReader(ReaderBase):
    """An open dataset; ``dataset`` is the library's own object."""

    def __init__(self, path: Path, corpus: Corpus, verify: Verify) -> None:
        super().__init__(corpus)
        self.dataset = kvformat.open(path / "ds", verify=verify)
        self._always = verify == "always"
        self._into: tuple[Destination, torch.Tensor] | None = None

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, as :meth:`benchmarks.peers.Reader.views`."""
        record = self.dataset[index]
        return record.component("k"), record.component("v")

    def copy_record(self, index: int, destination: Destination) -> int:
        """K then V, as :meth:`benchmarks.peers.Reader.copy_record`."""
        if self._always:
            return self._copy_checking(index, destination)
        record = self.dataset[index]
        k, v = record.component("k"), record.component("v")
        nbytes = k.nbytes
        memmove(destination.address, k.data_ptr(), nbytes)
        memmove(destination.address + nbytes, v.data_ptr(), nbytes)
        return 2 * nbytes

    def _copy_checking(self, index: int, destination: Destination) -> int:
        # `out=` checks a slab while it is in the processor's cache, which a view followed by a copy cannot.
        record = self.dataset[index]
        both = self._target(destination)[: self.nbytes_of[index] // 2].view(2, *self.dims[index])
        record.component("k", out=both[0])
        record.component("v", out=both[1])
        return self.nbytes_of[index]

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        """One layer of K, as :meth:`benchmarks.peers.Reader.copy_layer`."""
        slab = self.dataset[index].slab("key", layer=layer)
        nbytes = slab.nbytes
        memmove(destination.address, slab.data_ptr(), nbytes)
        return nbytes

    def _target(self, destination: Destination) -> torch.Tensor:
        if self._into is None or self._into[0] is not destination:
            self._into = (destination, torch.from_numpy(destination.array).view(torch.bfloat16))
        return self._into[1]

    def close(self) -> None:
        """Release files and mappings."""
        del self.dataset


def open_reader(path: Path, corpus: Corpus, verify: Verify) -> KvformatReader:
    return KvformatReader(path, corpus, verify)
