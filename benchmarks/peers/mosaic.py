"""MosaicML streaming: local MDS shards of raw bytes, without compression or hashes, through LocalDataset."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers import Destination, ReaderBase, sync_tree

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Record

NAME = "MosaicML streaming"
NOTE = "MDS bytes, no hash; opens the shard and copies twice on every read, by design"
# MDS offsets are 32 bits wide.
_SHARD_NBYTES = 1 << 30


def _placeholder(name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module


def _torchvision() -> None:
    """Let ``streaming`` import beside a torch its torchvision was not built for.

    It imports torchvision for image datasets alone, which nothing here touches. A CPU build of torch with the default
    torchvision wheel is the usual case.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _placeholder("torchvision")
        _placeholder("torchvision.datasets", VisionDataset=object)
        _placeholder("torchvision.transforms")
        _placeholder("torchvision.transforms.functional", to_tensor=None)


_torchvision()
from streaming import LocalDataset, MDSWriter  # noqa: E402 - after torchvision was looked at


def write(path: Path, records: Sequence[Record]) -> None:
    # A column is cut out of its sample by another copy, so K and V share one.
    with MDSWriter(out=str(path / "mds"), columns={"kv": "bytes"}, size_limit=_SHARD_NBYTES) as writer:
        for record in records:
            writer.write({"kv": record.payload.tobytes()})
    sync_tree(path)


class _Mosaic(ReaderBase):
    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._dataset = LocalDataset(str(path / "mds"))

    def views(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        both = np.frombuffer(self._dataset[index]["kv"], dtype=np.uint16).reshape(2, *self.dims[index])
        return both[0], both[1]

    def copy_record(self, index: int, destination: Destination) -> int:
        value = self._dataset[index]["kv"]
        nbytes = len(value)
        destination.view[:nbytes] = value
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        value = self._dataset[index]["kv"]
        nbytes = len(value) // 2 // self.num_layers
        destination.view[:nbytes] = memoryview(value)[layer * nbytes : (layer + 1) * nbytes]
        return nbytes


def open_reader(path: Path, corpus: Corpus) -> _Mosaic:
    return _Mosaic(path, corpus)
