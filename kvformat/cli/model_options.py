"""The options that say what computes keys and values, beyond a model directory: whose weights, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvformat.errors import UsageError, make_error

if TYPE_CHECKING:
    from kvformat.extract.checkpoint import CheckpointSource

__all__ = [
    "AdapterDir",
    "AdapterMode",
    "Checkpoint",
    "CheckpointDtype",
    "Images",
    "KeyStage",
    "Preset",
    "Quantise",
    "Rename",
    "Select",
    "Weights",
    "parse_checkpoint",
]

Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="KIND:PATH",
        help="Take the weights from dcp:DIR or safetensors:PATH; --model gives configuration and tokenizer.",
    ),
]
Select = Annotated[
    str | None,
    typer.Option("--select", metavar="REGEX", help="Which tensors of the checkpoint are the model's, by name."),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="REGEX=TEXT",
        help="Turn names of the checkpoint into those of the model; repeatable, in order.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="In place of --select and --rename: the names of a training framework, such as mot.",
    ),
]
Weights = Annotated[
    Literal["live", "ema"] | None, typer.Option("--weights", help="Which weights of a preset's checkpoint.")
]
CheckpointDtype = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-dtype", metavar="DTYPE", help="Dtype the checkpoint's tensors must have [default: any]."
    ),
]
AdapterDir = Annotated[
    str | None,
    typer.Option("--adapter", metavar="DIR", help="LoRA adapter: a directory that peft saved; needs --adapter-mode."),
]
AdapterMode = Annotated[
    Literal["merge", "apply"] | None,
    typer.Option("--adapter-mode", help="Add the adapter to the weights, or compute it beside them."),
]
KeyStage = Annotated[
    Literal["raw", "normed", "attention"],
    typer.Option(
        "--key-stage",
        help="Keys as they are projected (raw), behind their norm (normed), or rotated, as attention consumes them.",
    ),
]
Quantise = Annotated[
    str | None,
    typer.Option(
        "--quantise", metavar="SCHEME", help="Store in 8 bits, with scales: int8, fp8 or fp8-e5m2 [default: no]."
    ),
]
Images = Annotated[
    bool, typer.Option("--images/--no-images", help="Take images in messages, for a model that has a vision tower.")
]


def parse_checkpoint(
    checkpoint: str | None,
    *,
    select: str | None,
    rename: Sequence[str] | None,
    preset: str | None,
    weights: str | None,
    dtype: str | None,
) -> CheckpointSource | None:
    """The checkpoint of the options of those names; None where none of them is given.

    Raises
    ------
    UsageError
        E081, which names the options as they are typed.
    """
    from kvformat.extract.checkpoint import parse_checkpoint as parse

    given = {
        "--select": select,
        "--rename": rename or None,
        "--preset": preset,
        "--weights": weights,
        "--checkpoint-dtype": dtype,
    }
    alone = [option for option, value in given.items() if value is not None]
    if checkpoint is None and alone:
        go = "goes" if len(alone) == 1 else "go"
        raise make_error("E081", f"{', '.join(alone)} {go} with a checkpoint: name that too, --checkpoint dcp:DIR")
    try:
        return parse(checkpoint, select=select, rename=rename or (), preset=preset, weights=weights, dtype=dtype)
    except UsageError as error:
        if not error.message.startswith("dtype of a checkpoint"):
            raise
        message = error.message.replace("dtype of a checkpoint", "--checkpoint-dtype", 1)
        raise make_error("E081", message, path=error.path) from error
