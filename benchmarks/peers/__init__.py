"""Other ways to store the same records. A peer is a module with ``NAME``, ``NOTE``, ``write`` and ``open_reader``.

``write(path, records, purpose)`` leaves the records durable: what the library does not sync itself is synced here and
counted. ``open_reader(path, corpus, purpose)`` returns a :class:`Reader`; where the library has a training loader,
``open_loader`` returns that (:mod:`benchmarks.loaders`). Each peer is set up the way that is fastest
for these operations; where its interface forces a copy on the way, it pays for it and its note says so.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from benchmarks.memory import page_aligned

if TYPE_CHECKING:
    from types import ModuleType

    from benchmarks.shapes import Corpus, Outline, Record

__all__ = ["PEERS", "Destination", "Peer", "Purpose", "Reader", "ReaderBase", "load", "memmove", "sync_tree"]

PEERS = (
    "safetensors_shard",
    "safetensors_files",
    "lmdb_",
    "litdata_",
    "mosaic",
    "hf_datasets",
    "lance_",
    "memmap",
)

Purpose = Literal["read", "slab", "write", "load"]
"""What is measured: whole records read, single layers read, writing, or a training loader. A peer may lay its data out
for it."""

memmove = ctypes.memmove
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Destination:
    """A reused page-aligned buffer whose pages exist, in the forms a copy may want: array, memoryview, address."""

    def __init__(self, nbytes: int) -> None:
        self.array = page_aligned(nbytes)
        self.array[:] = 0xA5
        self.view = memoryview(self.array)
        self.address = int(self.array.ctypes.data)


class Reader(Protocol):
    """An open dataset."""

    def views(self, index: int) -> Any:
        """K and V of a record in the cheapest form the library has; views of its storage where it can."""

    def views_of(self, numbers: Sequence[int]) -> list[Any]:
        """:meth:`views` of several records, in the quickest way the library has for that."""

    def copy_record(self, index: int, destination: Destination) -> int:
        """Copy K then V of a record to the start of ``destination``; the number of bytes."""

    def copy_layer(self, index: int, layer: int, destination: Destination) -> int:
        """Copy one layer of K of a record to the start of ``destination``; the number of bytes."""

    def close(self) -> None:
        """Release files and mappings."""


class Peer(Protocol):
    """What the module of a peer offers."""

    NAME: str
    NOTE: str

    def write(self, path: Path, records: Sequence[Record], purpose: Purpose) -> None:
        """Write all records below ``path``, which exists and is empty; return when they are durable."""

    def open_reader(self, path: Path, corpus: Corpus, purpose: Purpose) -> Reader:
        """Open what ``write`` made."""


class ReaderBase:
    """Sizes every reader needs, known from the corpus as a trainer would know them from its own index."""

    def __init__(self, corpus: Corpus | Outline) -> None:
        self.num_layers = corpus.shape.num_layers
        self.nbytes_of = corpus.nbytes_of
        self.dims = corpus.dims

    def views(self, index: int) -> Any:
        """As :meth:`Reader.views`."""
        raise NotImplementedError

    def views_of(self, numbers: Sequence[int]) -> list[Any]:
        """As :meth:`Reader.views_of`."""
        return [self.views(number) for number in numbers]

    def close(self) -> None:
        """Nothing is held."""


def load(name: str) -> ModuleType:
    """The module of a peer; raises what its imports raise."""
    return importlib.import_module(f"benchmarks.peers.{name}")


def sync_tree(path: Path) -> None:
    """``fsync`` every file and directory below ``path``, and its parent."""
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync(os.path.join(directory, name))  # noqa: PTH118 - os.walk yields strings, one a file
        _sync(directory)
    _sync(os.fspath(path.parent))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
