"""The options that say what computes keys and values, beyond a model directory: whose weights, and what is kept."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

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
