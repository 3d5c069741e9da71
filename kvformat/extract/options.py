"""The options of an extraction, gathered and checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.spec import limits

__all__ = ["ContextKind", "ExtractionOptions"]

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
    out: Path
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
        kinds = get_args(ContextKind)
        if self.context not in kinds:
            raise make_error("E081", f"context must be {' or '.join(map(repr, kinds))}, found {self.context!r}")
