"""kvformat behind the interface of a peer, with the verification mode to read with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import kvformat
from benchmarks.peers import Destination, ReaderBase

if TYPE_CHECKING:
    import torch

    from benchmarks.shapes import Corpus, Record

__all__ = ["NAME", "KvformatReader", "Verify", "open_reader", "write"]

NAME = "kvformat"
Verify = Literal["off", "first", "always"]


def write(path: Path, records: Sequence[Record], *, shard_nbytes: int = 1 << 30) -> None:
    shape = records[0].shape
    schema = kvformat.Schema.uniform(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype="BF16"
    )
    with kvformat.create(
        path / "ds", schema=schema, context=kvformat.Context.unknown(), shard_nbytes=shard_nbytes
    ) as writer:
        for record in records:
            k, v = record.tensors()
            writer.add(record.name, {"k": k, "v": v}, token_ids=record.token_ids)


class KvformatReader(ReaderBase):
    """An open dataset; ``dataset`` is the library's own object."""

    def __init__(self, path: Path, corpus: Corpus, verify: Verify) -> None:
        super().__init__(corpus)
        self.dataset = kvformat.open(path / "ds", verify=verify)

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, as :meth:`benchmarks.peers.Reader.views`."""
        record = self.dataset[index]
        return record.component("k"), record.component("v")

    def copy_record(self, index: int, destination: Destination) -> int:
        """K then V, as :meth:`benchmarks.peers.Reader.copy_record`."""
        return self.dataset.read_into(index, destination.view)

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        """One layer of K, as :meth:`benchmarks.peers.Reader.copy_layer`."""
        return self.dataset.read_slab_into(index, "key", layer, destination.view)

    def close(self) -> None:
        """Release files and mappings."""
        del self.dataset


def open_reader(path: Path, corpus: Corpus, verify: Verify) -> KvformatReader:
    return KvformatReader(path, corpus, verify)
