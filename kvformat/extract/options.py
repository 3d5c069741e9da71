"""The options of an extraction, gathered and checked once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from kvformat.errors import make_error
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.documents.opening import DocumentsSource, is_documents_file
from kvformat.extract.schemes import scheme_named
from kvformat.loader.world import World
from kvformat.spec import limits
from kvformat.spec.context import Context
from kvformat.spec.schema import Stage
from kvformat.storage.readers import Location, remote_of
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.write.spool_places import spool_directory

__all__ = [
    "ContextKind",
    "ModelOptions",
    "PlanOptions",
    "RayOptions",
    "SourceOptions",
    "TargetOptions",
    "WorkOptions",
    "context_kind",
    "layer_numbers",
]

ContextKind = Literal["derive", "unknown"]

_MOST_THREADS = 1024
"""What a machine of any size is asked for; more only where it has so many cores."""


class ModelOptions(Struct, frozen=True, kw_only=True):
    """What computes keys and values, and which of them; :func:`kvformat.extract.run` says what each option means.

    ``images``: whether documents may have images, which needs a model that takes them.

    Raises
    ------
    UsageError
        E081 for a value that makes no sense, before anything is read.
    """

    model: str
    revision: str | None = None
    dtype: str | None = None
    compute_dtype: str | None = None
    device: str = "cpu"
    attn_implementation: str | None = None
    layers: tuple[int, ...] | None = None
    key_stage: Stage = "attention"
    quantise: str | None = None
    images: bool = False
    checkpoint: CheckpointSource | None = None
    adapter: str | None = None
    adapter_mode: Literal["merge", "apply"] | None = None
    context: ContextKind = "derive"

    def __post_init__(self) -> None:
        if self.quantise is not None:
            force_setattr(self, "quantise", scheme_named(self.quantise).name)
        if self.adapter_mode is not None and self.adapter is None:
            raise make_error("E081", f"adapter_mode={self.adapter_mode} goes with an adapter: name its directory too")
        if self.adapter is not None and self.adapter_mode is None and not self.images:
            raise make_error("E081", "an adapter needs its mode: adapter_mode=merge, or adapter_mode=apply")


class SourceOptions(Struct, frozen=True, kw_only=True):
    """Which documents there are, and how they become token ids.

    Raises
    ------
    UsageError
        E081 for options of a documents file, whose documents are tokenised already.
    """

    documents: DocumentsSource
    columns: Mapping[str, str] | None = None
    truncate: int | None = None
    too_long: Literal["refuse", "skip"] = "refuse"
    add_generation_prompt: bool = False
    special_tokens: bool = True

    def __post_init__(self) -> None:
        asked = {
            "truncation": self.truncate is not None,
            "leaving out what is too long": self.too_long != "refuse",
            "a generation prompt": self.add_generation_prompt,
            "no special tokens": not self.special_tokens,
        }
        found = [what for what, wanted in asked.items() if wanted]
        if found and is_documents_file(self.documents):
            message = f"a documents file is tokenised already: {', '.join(found)} must be asked for when it is made"
            raise make_error("E081", f"{message} (`kvformat documents`)", path=self.documents)


class PlanOptions(Struct, frozen=True, kw_only=True):
    """What goes into one shard and into one forward.

    Raises
    ------
    UsageError
        E081 for a value out of range.
    """

    shard_nbytes: int = 1 << 30
    shard_slots: int = 1024
    order: Literal["given", "length"] = "given"
    batch_size: int = 1
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise make_error("E081", f"batch_size must be at least 1, found {self.batch_size}")
        if not 1 <= self.shard_nbytes <= limits.MAX_FILE_NBYTES:
            raise make_error("E081", f"shard_nbytes must be 1 to 2^48-1, found {self.shard_nbytes}")


class TargetOptions(Struct, frozen=True, kw_only=True):
    """Where the dataset goes."""

    out: Location
    storage_options: Mapping[str, Any] | None = None
    remote_options: RemoteOptions | None = None
    spool: str | os.PathLike[str] | None = None

    def target(self) -> Path | Remote:
        """The directory or the object store; E081, E206 where it is neither."""
        return remote_of(self.out, storage_options=self.storage_options, remote_options=self.remote_options)

    def space(self, target: Path | Remote) -> Path:
        """Where disk space is needed: for the dataset, or for shards that wait for their upload."""
        return target if isinstance(target, Path) else spool_directory(self.spool)


class WorkOptions(Struct, frozen=True, kw_only=True):
    """How one worker goes about it.

    Raises
    ------
    UsageError
        E081 for a value out of range.
    """

    world: World = World(0, 1)
    threads: int | None = None
    accept_batches: bool = False
    on_error: Literal["fail", "skip"] = "fail"
    allow_skips: bool = False
    allow_non_finite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        most = max(_MOST_THREADS, 4 * (os.cpu_count() or 1))
        if self.threads is not None and not 1 <= self.threads <= most:
            raise make_error("E081", f"threads must be 1 to {most}, found {self.threads}")
        if self.on_error not in ("fail", "skip"):
            raise make_error("E081", f"on_error must be 'fail' or 'skip', found {self.on_error!r}")


class RayOptions(Struct, frozen=True, kw_only=True):
    """A Ray cluster whose workers make the shards; see :func:`kvformat.extract.ray_engine.run_with_ray`.

    Attributes
    ----------
    address
        ``host:port``, ``ray://host:port`` or ``auto``; None for ``RAY_ADDRESS``, else one started on this machine.
    num_workers
        Most workers; None for as many as there is room for.
    num_cpus, num_gpus
        What Ray sets aside for each of them.
    """

    address: str | None = None
    num_workers: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0


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
