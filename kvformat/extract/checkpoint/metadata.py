"""The ``.metadata`` of a DCP directory: a pickle, read without running any code it names."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from kvformat.errors import make_error
from kvformat.extract.checkpoint.reading import unreadable

__all__ = ["METADATA", "StorageInfo", "read_metadata"]

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where properties were up to torch 2.2
_PATHS = frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"})


class StorageInfo:
    """Where a chunk of a tensor lies: stands in for ``_StorageInfo``, which is private to torch."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


def read_metadata(directory: Path) -> tuple[dcp.Metadata, int]:
    """The metadata of a DCP directory, and the bytes read for it.

    torch reads this file with a plain ``pickle.load``, which runs whatever the file says. Here only the dozen record
    types that DCP writes are made, and nothing is imported: a file from an untrusted source can state wrong numbers,
    or ask for much memory, and no more. The tensors are loaded with ``weights_only=True``, pickled objects never.

    Raises
    ------
    InputError
        E308 where the directory is none of DCP's, where its save was not finished, and where the file is damaged.
    StorageError
        E203, E207 where the file cannot be read.
    """
    path = directory / METADATA
    try:
        absent = None if path.is_file() else _absent(directory)
        raw = path.read_bytes() if absent is None else b""
    except OSError as error:
        raise unreadable(error, path) from error
    if absent is not None:
        raise make_error("E308", absent, path=directory)
    try:
        found = _Unpickler(io.BytesIO(raw)).load()
        _check(found)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        raise make_error(
            "E308",
            f"this is no metadata of a DCP checkpoint, or it is damaged ({type(error).__name__}: {error}); save it "
            "with torch.distributed.checkpoint, or restore it from another copy",
            path=path,
        ) from error
    return found, len(raw)


class _Unpickler(pickle.Unpickler):
    """Makes the records of DCP's metadata and nothing else: what is not listed is refused, not imported."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        listed = _RECORDS.get((module_name, global_name))
        if listed is not None:
            return listed
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if module_name.partition(".")[0] == "pathlib" and global_name in _PATHS:
            return _joined
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is none of DCP's records")


def _joined(*parts: object) -> str:
    """In place of a path, which is only said and never used: where the checkpoint was saved to."""
    return "/".join(map(str, parts))


def _member(enumeration: object, name: object) -> Any:
    """In place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickles the members of an enumeration."""
    if enumeration is not dcp._MEM_FORMAT_ENCODING:  # noqa: SLF001 -- part of the file format
        raise pickle.UnpicklingError("it asks for an attribute of something that is no enumeration")
    return dcp._MEM_FORMAT_ENCODING[str(name)]  # noqa: SLF001 -- as above


def _layout(name: object) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"no layout {name!r}")
    return found


_RECORDS: Mapping[tuple[str, str], Callable[..., Any]] = {
    (_DCP, "BytesStorageMetadata"): dcp.BytesStorageMetadata,
    (_DCP, "ChunkStorageMetadata"): dcp.ChunkStorageMetadata,
    (_DCP, "Metadata"): dcp.Metadata,
    (_DCP, "MetadataIndex"): dcp.MetadataIndex,
    (_DCP, "StorageMeta"): dcp.StorageMeta,
    (_DCP, "TensorProperties"): dcp.TensorProperties,
    (_DCP, "TensorStorageMetadata"): dcp.TensorStorageMetadata,
    (_DCP, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 -- part of the file format
    (_SHARDED, "MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 -- as above
    (_SHARDED, "TensorProperties"): dcp.TensorProperties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
}


def _check(found: Any) -> None:
    """Types and signs of all that is used later; UnpicklingError."""
    if not isinstance(found, dcp.Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it holds no DCP metadata")
    entries: Mapping[Any, Any] = found.state_dict_metadata
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata):
            raise pickle.UnpicklingError(f"{name!r} is neither a tensor nor an object")
        if isinstance(entry, dcp.TensorStorageMetadata):
            sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
            if not all(_is_size(size, len(entry.size)) for size in sizes):
                raise pickle.UnpicklingError(f"{name!r} has sizes that are none")
            if not isinstance(entry.properties.dtype, torch.dtype):
                raise pickle.UnpicklingError(f"{name!r} has no dtype")
    if not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError("it does not say where the tensors lie")
    for index, info in found.storage_data.items():
        if not isinstance(index, dcp.MetadataIndex) or not isinstance(info, StorageInfo):
            raise pickle.UnpicklingError("what says where the tensors lie is something else")
        numbers = (info.offset, info.length)
        if not all(type(number) is int and number >= 0 for number in numbers) or type(info.relative_path) is not str:
            raise pickle.UnpicklingError(f"{index.fqn!r} lies at {numbers} of {info.relative_path!r}")


def _is_size(size: object, rank: int) -> bool:
    return isinstance(size, torch.Size) and len(size) == rank and min(size, default=0) >= 0


def _absent(directory: Path) -> str:
    """Why there may be no metadata, as far as the directory shows."""
    if not directory.is_dir():
        what = "a file stands there, not a directory" if directory.exists() else "no such directory"
        return f"{what}; give the directory that torch.distributed.checkpoint saved"
    below = sorted(entry.name for entry in directory.iterdir() if (entry / METADATA).is_file())
    if below:
        return f"no {METADATA} in it, but in {', '.join(map(repr, below[:3]))} below: give that directory"
    if any(directory.glob("__*_*.distcp")):
        alone = any(directory.glob(f"__*{METADATA}"))
        why = "each rank saved alone (no_dist=True): save with coordination" if alone else "its save did not finish"
        return f"no {METADATA} in it, which DCP writes last: {why}, or take an earlier checkpoint"
    return f"no {METADATA} in it: this is no directory that torch.distributed.checkpoint saved"
