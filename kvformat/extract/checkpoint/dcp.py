"""Tensors of a DCP (``torch.distributed.checkpoint``) directory, without a process group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from kvformat.errors import make_error
from kvformat.extract.checkpoint.archive import damaged_member, saved_value
from kvformat.extract.checkpoint.dtypes import name_of
from kvformat.extract.checkpoint.matching import TensorForm
from kvformat.extract.checkpoint.metadata import StorageInfo, read_metadata
from kvformat.extract.checkpoint.reading import CountedFiles, in_threads

__all__ = ["DcpCheckpoint", "DcpReader"]


class DcpCheckpoint:
    """A DCP directory, of which single tensors are read; see :func:`read_metadata` for what is trusted.

    Attributes
    ----------
    forms
        Everything that was saved, by name.

    Raises
    ------
    InputError
        E308 as :func:`read_metadata`.
    """

    def __init__(self, path: Path, files: CountedFiles) -> None:
        self._path = path
        self._files = files
        self._metadata, nbytes = read_metadata(path)
        files.nbytes += nbytes
        self.forms: Mapping[str, TensorForm] = {
            name: TensorForm(name_of(entry.properties.dtype), tuple(entry.size))
            if isinstance(entry, TensorStorageMetadata)
            else TensorForm(None, ())
            for name, entry in self._metadata.state_dict_metadata.items()
        }

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors (on the CPU, of the stored shape, any dtype) from those of the same names.

        DCP's own planner finds the chunks that make up each tensor, over however many files.

        Raises
        ------
        InputError
            E308 for a file that is missing, cut short or damaged, and for chunks that do not make up a tensor.
        StorageError
            E203.
        """
        state = {name: target.detach() for name, target in targets.items()}
        for name in state:
            self._check(name)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(state), self._metadata, is_coordinator=True)
        reader = DcpReader(self._path, self._files, self._metadata)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()

    def _check(self, name: str) -> None:
        """Refuse a tensor whose chunks leave part of it out, or overlap: DCP would leave what was there before."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
        inside = all(
            offset + size <= whole
            for chunk in chunks
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        )
        held = sum(prod(chunk.sizes) for chunk in chunks)
        if not inside or held != prod(entry.size) or _overlap(chunks):
            raise make_error(
                "E308",
                f"{name!r} has {prod(entry.size):,} values, and its {len(chunks):,} chunks do not make them up "
                f"({held:,} values): the checkpoint is incomplete; save it with all ranks, or take another",
                path=self._path,
            )


class DcpReader(StorageReader):
    """Reads the chunks of a plan, each once and whole, and checks the checksum torch saved with it.

    ``torch.distributed.checkpoint.FileSystemReader`` checks none: torch loads flipped bits without a word.
    """

    def __init__(self, path: Path, files: CountedFiles, metadata: Metadata) -> None:
        super().__init__()
        self._path = path
        self._files = files
        self._metadata = metadata
        self._storage: Mapping[MetadataIndex, StorageInfo] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:  # noqa: ARG002 -- torch's signature
        """Forget what was set up."""
        self._storage = {}

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What was read before."""
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002, FBT001 -- torch's signature
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """Take over where the chunks lie."""
        self._storage = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same reads, file by file and in the order of their bytes."""
        return LoadPlan(sorted(plan.items, key=self._place))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in the plan; done when it returns. Errors as :meth:`DcpCheckpoint.read`."""
        missing = {path for item in plan.items if not (path := self._file(item)).exists()}
        if missing:
            raise make_error(
                "E308",
                f"{len(missing)} of {len({self._file(item) for item in plan.items})} files are missing, the first "
                f"{min(missing).name!r}: copy them here, or take another checkpoint",
                path=self._path,
            )

        def read(item: ReadItem) -> None:
            part = self._load(item)
            for axis, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(axis, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)

        in_threads(read, plan.items)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a directory."""
        return Path(checkpoint_id).is_dir()

    def _info(self, item: ReadItem) -> StorageInfo:
        info = self._storage.get(item.storage_index)
        if info is None:
            raise make_error(
                "E308", f"the metadata does not say where {item.storage_index.fqn!r} lies", path=self._path
            )
        return info

    def _file(self, item: ReadItem) -> Path:
        relative = PurePosixPath(self._info(item).relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise make_error("E308", f"the metadata names {str(relative)!r}, outside the directory", path=self._path)
        return self._path / relative

    def _place(self, item: ReadItem) -> tuple[str, int]:
        info = self._info(item)
        return info.relative_path, info.offset

    def _load(self, item: ReadItem) -> torch.Tensor:
        """The chunk an item is part of."""
        info = self._info(item)
        path = self._file(item)
        name = item.storage_index.fqn

        def refuse(why: str, error: BaseException | None = None) -> NoReturn:
            where = f"bytes {info.offset:,} to {info.offset + info.length:,}"
            raise make_error("E308", f"{name!r} ({where}) {why}", path=path) from error

        if info.transform_descriptors:
            refuse(f"was saved through {info.transform_descriptors}, which is not read; save it without extensions")
        size = self._files.size(path)
        if size < info.offset + info.length:
            refuse(f"is cut short: the file has {size:,} bytes; restore it from another copy")
        raw = self._files.read(path, info.offset, info.length)
        try:
            damaged = damaged_member(raw)
            found = saved_value(raw) if damaged is None else None
        except Exception as error:  # noqa: BLE001 -- torch raises whatever the damaged bytes led to
            refuse(f"is no tensor that loads ({type(error).__name__}: {error}); restore the file", error)
        if damaged is not None:
            refuse(f"is damaged: {damaged} has another checksum than was saved; restore the file")
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        sizes = _sizes(entry.chunks, item.storage_index)
        if not isinstance(found, torch.Tensor) or found.shape != sizes or found.dtype != entry.properties.dtype:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            refuse(f"holds {what}, expected {entry.properties.dtype} {list(sizes)}: the files belong to two saves")
        return found


def _sizes(chunks: Iterable[ChunkStorageMetadata], index: MetadataIndex) -> torch.Size:
    return next(chunk.sizes for chunk in chunks if index.offset is None or chunk.offsets == index.offset)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether any two chunks share a value."""
    if len(chunks) < 2:
        return False
    first = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
    last = first + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
    if not first.shape[1]:
        return True
    for axis in range(first.shape[1]):
        order = np.argsort(first[:, axis], kind="stable")
        if np.all(last[order, axis][:-1] <= first[order, axis][1:]):
            return False
    return any(
        bool(np.any(np.all((first[row] < last[row + 1 :]) & (first[row + 1 :] < last[row]), axis=1)))
        for row in range(len(chunks) - 1)
    )
