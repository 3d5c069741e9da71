"""MosaicML streaming: local MDS shards of raw bytes, without compression or hashes, through LocalDataset."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers import Destination, Purpose, ReaderBase, sync_tree
from benchmarks.peers._loading import Batch, Collate, loader_options
from benchmarks.peers._remote import NUM_WORKERS, Source, Variant

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus, Outline, Record, Shape

NAME = "MosaicML streaming"
NOTE = "MDS bytes, no hash; every read opens the shard and copies twice; layers: a sample each"
LOADER_NOTE = "StreamingDataLoader(StreamingDataset(shuffle=True)), shuffled in blocks; packed in the worker"
_HASH = "xxh64"
_REMOTE_NOTE = "StreamingDataLoader(StreamingDataset(remote, local, shuffle=True)), 2 workers, MDS shards of 64 MiB"
REMOTE = (
    Variant("plain", "MosaicML streaming", "none", "shards", _REMOTE_NOTE),
    Variant("hash", "MosaicML streaming, hashed", "xxh64, shards", "shards", f"as above, validate_hash={_HASH!r}"),
)
_SHARD_NBYTES = 1 << 26


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
from streaming import LocalDataset, MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402 - after torchvision was looked at


def write(path: Path, records: Sequence[Record], purpose: Purpose) -> None:
    # Small shards reuse the memory they are assembled in; when reading, their size does not matter.
    with MDSWriter(out=str(path / "mds"), columns={"kv": "bytes"}, size_limit=_SHARD_NBYTES) as writer:
        for record in records:
            # A column is cut out of its sample by another copy, so K and V share one.
            parts = 2 * record.shape.num_layers if purpose == "slab" else 1
            for part in np.split(record.payload, parts):
                writer.write({"kv": part.tobytes()})
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
        # For this purpose a sample is one layer of one component.
        value = self._dataset[index * 2 * self.num_layers + layer]["kv"]
        nbytes = len(value)
        destination.view[:nbytes] = value
        return nbytes


def open_reader(path: Path, corpus: Corpus, purpose: Purpose) -> _Mosaic:  # noqa: ARG001 - as many samples as were written
    return _Mosaic(path, corpus)


class _Collate(Collate):
    def __call__(self, items: Sequence[Any]) -> Batch:
        return super().__call__([item["kv"] for item in items])


class _Loader:
    def __init__(self, path: Path, corpus: Outline, *, batch_size: int, epochs: int, num_workers: int) -> None:
        # One epoch of all that a round reads, so that it does not start over in between.
        self._dataset = StreamingDataset(
            local=str(path / "mds"), shuffle=True, batch_size=batch_size, epoch_size=epochs * len(corpus)
        )
        self._loader: Any = StreamingDataLoader(
            self._dataset, batch_size=batch_size, collate_fn=_Collate(corpus.shape), **loader_options(num_workers)
        )

    def batches(self, order: Sequence[Sequence[int]]) -> Iterator[Batch]:  # noqa: ARG002 - it has an order of its own
        yield from self._loader

    def close(self) -> None:
        self._loader = self._dataset = None


def open_loader(path: Path, corpus: Outline, *, batch_size: int, epochs: int, num_workers: int) -> _Loader:
    return _Loader(path, corpus, batch_size=batch_size, epochs=epochs, num_workers=num_workers)


def write_remote(path: Path, records: Sequence[Record]) -> None:
    with MDSWriter(out=str(path / "mds"), columns={"kv": "bytes"}, size_limit=_SHARD_NBYTES, hashes=[_HASH]) as writer:
        for record in records:
            writer.write({"kv": record.payload.tobytes()})


class _Remote:
    def __init__(
        self, source: Source, shape: Shape, cache: Path, batch_size: int, *, validate_hash: str | None
    ) -> None:
        self._dataset = StreamingDataset(
            remote=f"{source.url}/mds",
            local=str(cache / "mds"),
            shuffle=True,
            batch_size=batch_size,
            validate_hash=validate_hash,
        )
        for stream in self._dataset.streams:
            # Else the forked workers share its connection, and get each other's answers: wrong bytes, or none.
            stream._downloader.clean_up()  # noqa: SLF001 - there is no other way
        self._loader: Any = StreamingDataLoader(
            self._dataset, batch_size=batch_size, collate_fn=_Collate(shape), **loader_options(NUM_WORKERS)
        )

    def epoch(self) -> Iterator[Batch]:
        yield from self._loader

    def close(self) -> None:
        self._loader = self._dataset = None


def open_remote(source: Source, shape: Shape, variant: str, cache: Path, batch_size: int) -> _Remote:
    return _Remote(source, shape, cache, batch_size, validate_hash=_HASH if variant == "hash" else None)
