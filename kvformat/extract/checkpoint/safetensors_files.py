"""Tensors of safetensors files: one file, or a directory of them with or without an index."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.checkpoint.dtypes import dtype_of
from kvformat.extract.checkpoint.matching import TensorForm
from kvformat.extract.checkpoint.reading import CountedFiles, in_threads, unreadable

__all__ = ["SafetensorsCheckpoint"]

_MAX_HEADER_NBYTES = 100_000_000  # what the safetensors library takes
_INDEX = "*.safetensors.index.json"


class _Range(NamedTuple):
    path: Path
    offset: int
    nbytes: int
    form: TensorForm


class SafetensorsCheckpoint:
    """Safetensors files, of which single tensors are read.

    Attributes
    ----------
    forms
        Every tensor, by name.

    Raises
    ------
    InputError
        E308 where there are no such files, where a header is none, and where two files hold the same name.
    StorageError
        E203, E207.
    """

    def __init__(self, path: Path, files: CountedFiles) -> None:
        self._files = files
        self._ranges: dict[str, _Range] = {}
        try:
            found = _files_of(path)
        except OSError as error:
            raise unreadable(error, path) from error
        for file in found:
            for name, part in _ranges_of(file, files).items():
                if name in self._ranges:
                    other = self._ranges[name].path.name
                    raise make_error(
                        "E308",
                        f"{name!r} is in {other!r} too: the directory holds two copies; give one file, or an index",
                        path=file,
                    )
                self._ranges[name] = part
        self.forms: Mapping[str, TensorForm] = {name: part.form for name, part in self._ranges.items()}

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors (contiguous, on the CPU, of the stored shape, any dtype) from those of the same names.

        Raises
        ------
        InputError, StorageError
            E308, E203 as :class:`CountedFiles`.
        """

        def read(name: str) -> None:
            part, target = self._ranges[name], targets[name].detach()
            dtype = dtype_of(str(part.form.dtype))
            assert dtype is not None
            straight = dtype == target.dtype and target.is_contiguous()
            buffer = target if straight else torch.empty(part.form.shape, dtype=dtype)
            self._files.read_into(part.path, part.offset, _bytes_of(buffer))
            if not straight:
                target.copy_(buffer)

        order = sorted(targets, key=lambda name: (self._ranges[name].path, self._ranges[name].offset))
        in_threads(read, order)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Memory of a contiguous tensor, uint8 ``[nbytes]``."""
    found: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise make_error("E308", "no such file or directory; give a safetensors file or a directory", path=path)
        return [path]
    indexes = sorted(path.glob(_INDEX))
    if len(indexes) > 1:
        raise make_error(
            "E308", f"the directory has {len(indexes)} indexes ({_INDEX}); give one of the files", path=path
        )
    if indexes:
        return _indexed(indexes[0])
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise make_error("E308", "no *.safetensors in this directory", path=path)
    return found


def _indexed(index: Path) -> list[Path]:
    """Files that an index names."""
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise make_error(
            "E308", f"the index is damaged ({type(error).__name__}: {error}); restore it", path=index
        ) from error
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise make_error("E308", f"the index names {outside[0]!r}, outside the directory", path=index)
    files = [index.parent / name for name in sorted(names)]
    missing = [file for file in files if not file.exists()]
    if missing:
        raise make_error(
            "E308",
            f"{len(missing)} of {len(files)} files are missing, the first {missing[0].name!r}: copy them here",
            path=index,
        )
    return files


def _ranges_of(path: Path, files: CountedFiles) -> dict[str, _Range]:
    """Where the tensors of one file lie, by its header."""
    size = files.size(path)

    def damaged(why: str) -> KVFormatError:
        return make_error(
            "E308", f"this is no safetensors file, or it is damaged: {why}; restore it from another copy", path=path
        )

    if size < 8:
        raise damaged(f"it has {size} bytes")
    (length,) = struct.unpack("<Q", files.read(path, 0, 8).tobytes())
    start = 8 + length
    if length > _MAX_HEADER_NBYTES or start > size:
        raise damaged(f"its header would have {length:,} bytes, the file has {size:,}")
    try:
        header = msgspec.json.decode(files.read(path, 8, length).tobytes(), type=dict[str, dict[str, Any]])
        found = {name: _range(path, start, entry) for name, entry in header.items() if name != "__metadata__"}
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"its header cannot be read ({type(error).__name__}: {error})") from error
    ordered = sorted(found.values(), key=lambda part: part.offset)
    ends = [start, *(part.offset + part.nbytes for part in ordered)]
    if any(part.offset != end for part, end in zip(ordered, ends[:-1], strict=True)) or ends[-1] != size:
        raise damaged(f"its tensors would end at byte {ends[-1]:,}, the file has {size:,}")
    return found


def _range(path: Path, start: int, entry: Mapping[str, Any]) -> _Range:
    dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)) or last < first:
        raise ValueError("sizes and offsets must be integers")
    known = dtype_of(dtype)
    if known is not None and last - first != prod(shape) * known.itemsize:
        raise ValueError(f"{last - first} bytes for {dtype} {list(shape)}")
    return _Range(path, start + first, last - first, TensorForm(dtype, shape))
