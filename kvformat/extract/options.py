"""The options of an extraction, gathered and checked once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.spec import limits
from kvformat.spec.context import Context
from kvformat.storage.readers import Location, remote_of
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.write.spool import spool_directory

__all__ = ["ContextKind", "ExtractionOptions", "context_kind", "documents_path", "layer_numbers"]

ContextKind = Literal["derive", "unknown"]


class ExtractionOptions(Struct, frozen=True, kw_only=True):
    """What :func:`kvformat.extract.run` was asked for; its parameters say what each option means.

    :func:`kvformat.extract.estimate` leaves those at their defaults that change no size.

    Raises
    ------
    UsageError
        E081 for a value out of range, before anything is read.
    """

    model: str
    documents: Path
    out: Location
    storage_options: Mapping[str, Any] | None
    remote_options: RemoteOptions | None
    spool: str | os.PathLike[str] | None
    revision: str | None
    dtype: str | None
    compute_dtype: str | None
    layers: tuple[int, ...] | None
    shard_nbytes: int
    truncate: int | None
    add_generation_prompt: bool
    special_tokens: bool
    device: str = "cpu"
    batch_size: int = 1
    attn_implementation: str | None = None
    context: ContextKind = "derive"
    allow_non_finite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise make_error("E081", f"batch_size must be at least 1, found {self.batch_size}")
        if not 1 <= self.shard_nbytes <= limits.MAX_FILE_NBYTES:
            raise make_error("E081", f"shard_nbytes must be 1 to 2^48-1, found {self.shard_nbytes}")

    def target(self) -> Path | Remote:
        """The directory or the object store the dataset goes to; E081, E206 where it is neither."""
        return remote_of(self.out, storage_options=self.storage_options, remote_options=self.remote_options)

    def space(self, target: Path | Remote) -> Path:
        """Where disk space is needed: for the dataset, or for shards that wait for their upload."""
        return target if isinstance(target, Path) else spool_directory(self.spool)


def context_kind(context: object) -> ContextKind:
    """What to do about a context: ``Context.unknown()`` says the same as ``"unknown"``. E081 for anything else."""
    if context == "derive":
        return "derive"
    if context == "unknown" or context == Context.unknown():
        return "unknown"
    raise make_error(
        "E081",
        f"context must be 'derive', 'unknown' or Context.unknown(), found {context!r:.80}; that of a known model is "
        "derived from the model itself",
    )


def layer_numbers(layers: object) -> tuple[int, ...] | None:
    """Layers as integers, in the order given; None for None. E081 for what is no sequence of integers."""
    if layers is None:
        return None
    try:
        if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
            raise TypeError
        return tuple(map(index, layers))
    except TypeError:
        raise make_error(
            "E081", f"layers must be integers such as [0, 1, 12] or range(4), found {layers!r:.80}"
        ) from None


def documents_path(documents: object) -> Path:
    """The documents file. E081 for anything but a path, such as the documents themselves."""
    if not isinstance(documents, str | os.PathLike) or not isinstance(os.fspath(documents), str):
        raise make_error(
            "E081",
            f"documents must be the path of a JSON Lines file, found {documents!r:.80}; write one JSON object a line",
        )
    return Path(documents)
