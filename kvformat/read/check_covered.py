"""Covered files: their digests, and the content of those the specification owns (SPEC.md, section 9)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.read.error_bounds import LABEL as BOUNDS
from kvformat.read.error_bounds import parse_bounds
from kvformat.read.frequencies import InverseFrequencies
from kvformat.spec import canonical, limits
from kvformat.spec.context import Context, TensorDigest, layer_groups_problem
from kvformat.spec.manifest import CoveredFile
from kvformat.spec.paths import covered_path
from kvformat.spec.schema import Schema
from kvformat.storage.local_read import OpenFile, sha256_of
from kvformat.storage.readers import Reader

__all__ = ["TensorList", "check_covered", "read_covered"]


class TensorList(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``weights``."""

    tensors: tuple[TensorDigest, ...]


def read_covered(reader: Reader, file: CoveredFile) -> bytes:
    """A covered file whose digest was checked; E002, E003, E005, E006."""
    return bytes(_open_checked(reader, file).read(0, file.size))


def check_covered(reader: Reader, file: CoveredFile, *, context: Context, schema: Schema) -> Iterator[KVFormatError]:
    """Digest of a covered file, and E044 of its content in a dataset of this context and schema."""
    opened = _open_checked(reader, file)
    if file.name not in ("weights", "inv_freq", BOUNDS):
        return
    path = opened.path
    if file.size > limits.MAX_CONTENT_NBYTES:
        message = f"covered file {file.name!r} has {file.size} bytes, at most {limits.MAX_CONTENT_NBYTES} are allowed"
        yield make_error("E044", message, path=path)
        return
    data = bytes(opened.read(0, file.size))
    if file.name == BOUNDS:
        parse_bounds(data, schema, path=path)
        return
    check = _weights_faults(data, context, path) if file.name == "weights" else _frequency_faults(data, path)
    try:
        yield from check
    except KVFormatError as error:
        yield make_error("E044", f"covered file {file.name!r}: {error.message}", path=path)


def _weights_faults(data: bytes, context: Context, path: str) -> Iterator[KVFormatError]:
    tensors = canonical.convert(canonical.decode(data), TensorList).tensors
    names = [tensor.name.encode() for tensor in tensors]
    if any(a >= b for a, b in pairwise(names)):
        yield make_error("E044", "tensors must be in strictly ascending order of their names", path=path)
    model = context.model
    if model is not None and any(tensor.dtype != model.compute_dtype for tensor in tensors):
        yield make_error("E044", f"every dtype must be the compute dtype, {model.compute_dtype}", path=path)


def _frequency_faults(data: bytes, path: str) -> Iterator[KVFormatError]:
    groups = canonical.convert(canonical.decode(data), InverseFrequencies).groups
    if any(not canonical.is_real(value) for group in groups for value in group.values):
        yield make_error("E044", "an inverse frequency is NaN, infinite or -0", path=path)
    if any(not group.values for group in groups):
        yield make_error("E044", "a group has no inverse frequencies", path=path)
    problem = layer_groups_problem([group.layers for group in groups])
    if problem is not None:
        yield make_error("E044", problem, path=path)


def _open_checked(reader: Reader, file: CoveredFile) -> OpenFile:
    opened = reader.open(covered_path(file.sha256), nbytes=file.size, sha256=file.sha256)
    if sha256_of(opened, file.size).hex() != file.sha256:
        raise make_error("E006", f"the SHA-256 of covered file {file.name!r} differs: restore it", path=opened.path)
    return opened
