"""Which checkpoint the weights of a model come from, and which of its tensors they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.extract.checkpoint.presets import PRESETS

__all__ = ["CheckpointKind", "CheckpointSource", "Weights", "parse_checkpoint"]

CheckpointKind = Literal["dcp", "safetensors"]
Weights = Literal["live", "ema"]

_DTYPES = ("BF16", "F16", "F32", "F64")


class CheckpointSource(Struct, frozen=True, kw_only=True):
    """A checkpoint, and how its names become those of the model.

    Without ``select`` and ``preset``, what has the model's names is taken and the rest is left. With either, every
    selected tensor must be one of the model's: a pattern that takes in too much is an error, not a surplus.

    Parameters
    ----------
    kind
        ``dcp``: a directory that ``torch.distributed.checkpoint`` saved. ``safetensors``: a file, or a directory of
        files, with an index or without.
    path
        Directory or file on a local file system.
    select
        Regular expression that is searched for in the names of the checkpoint: ``^`` and ``$`` tie it to their ends.
    rename
        (pattern, replacement) pairs, applied as :func:`re.sub` in order to each selected name. The result must be a
        name of the model, as the decoder or the whole model calls it (``layers.0. ...``, ``model.layers.0. ...``).
    preset
        Name of an entry of :data:`kvformat.extract.checkpoint.PRESETS`, in place of ``select`` and ``rename``.
    weights
        ``live`` or ``ema``, of a preset; needed where the checkpoint holds both.
    dtype
        What the tensors must be stored in: BF16, F16, F32 or F64. When absent any of these will do: training often
        keeps F32 master weights, which are rounded to the compute dtype once, as loading a model of that dtype does.

    Raises
    ------
    UsageError
        E081 for options that exclude each other, and for what is no regular expression.
    """

    kind: CheckpointKind
    path: str | Path
    select: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    preset: str | None = None
    weights: Weights | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CheckpointKind):
            raise make_error("E081", f"kind of checkpoint must be dcp or safetensors, found {self.kind!r}")
        if self.preset is not None and self.preset not in PRESETS:
            raise make_error("E081", f"no preset {self.preset!r}; there are {', '.join(PRESETS)}")
        if self.preset is not None and (self.select is not None or self.rename):
            raise make_error("E081", "a preset selects and renames by itself; give it, or select and rename")
        if self.weights is not None and self.weights not in get_args(Weights):
            raise make_error("E081", f"weights must be live or ema, found {self.weights!r}")
        if self.weights is not None and self.preset is None:
            raise make_error(
                "E081",
                "weights=live|ema goes with a preset, which knows their names; "
                r"without one, select them by their prefix, such as ^net_ema\.",
            )
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise make_error(
                "E081", f"dtype of a checkpoint must be one of {', '.join(_DTYPES)}, found {self.dtype!r}"
            )
        if self.select is not None:
            _compiled(self.select)
        for pattern, replacement in self.rename:
            try:
                _compiled(pattern).sub(replacement, "")
            except (re.error, IndexError) as error:
                raise make_error("E081", f"{replacement!r} cannot replace {pattern!r}: {error}") from error

    def text(self) -> str:
        """Kind and last name of the path, as it is recorded: ``dcp:iter_000001000``, wherever a copy of it lies."""
        return f"{self.kind}:{Path(self.path).resolve().name}"


def parse_checkpoint(
    text: str | None,
    *,
    select: str | None = None,
    rename: Iterable[str] = (),
    preset: str | None = None,
    weights: str | None = None,
    dtype: str | None = None,
) -> CheckpointSource | None:
    """Read the options of a command line.

    Parameters
    ----------
    text
        ``dcp:DIR`` or ``safetensors:DIR_OR_FILE``; None, with no other option given, gives None.
    rename
        ``PATTERN=REPLACEMENT``, parted at the last ``=``: a pattern may hold ``=``, a replacement may not.
    select, preset, weights, dtype
        As for :class:`CheckpointSource`; the dtype in upper or lower case.

    Raises
    ------
    UsageError
        E081.
    """
    pairs = tuple(map(_pair, rename))
    if text is None:
        given = {"select": select, "rename": pairs or None, "preset": preset, "weights": weights, "dtype": dtype}
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise make_error("E081", f"{', '.join(alone)} say what to take of a checkpoint; name that too: dcp:DIR")
        return None
    kind, colon, path = text.partition(":")
    if not colon or kind not in get_args(CheckpointKind) or not path:
        raise make_error("E081", f"a checkpoint is dcp:DIR, safetensors:DIR or safetensors:FILE, found {text!r}")
    if "://" in path:
        raise make_error("E081", f"checkpoints are read from local file systems, not from {path!r}; copy it first")
    return CheckpointSource(
        kind=kind,  # type: ignore[arg-type]
        path=os.path.expanduser(path),  # noqa: PTH111 -- the path stays as it was given otherwise
        select=select,
        rename=pairs,
        preset=preset,
        weights=weights,  # type: ignore[arg-type]
        dtype=None if dtype is None else dtype.upper(),
    )


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise make_error("E081", rf"rename is PATTERN=REPLACEMENT such as ^net\.=, found {text!r}")
    return pattern, replacement


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise make_error("E081", f"{pattern!r} is no regular expression: {error}") from error
