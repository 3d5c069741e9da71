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
        help="Weights from dcp:DIR or safetensors:PATH; --model gives configuration and tokenizer.",
    ),
]
Select = Annotated[
    str | None, typer.Option("--select", metavar="REGEX", help="Tensors of the checkpoint that are the model's.")
]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="REGEX=TEXT", help="Make their names those of the model; repeatable, in order."),
]
Preset = Annotated[
    str | None, typer.Option("--preset", metavar="NAME", help="Known names of a training framework, such as mot.")
]
Weights = Annotated[
    Literal["live", "ema"] | None, typer.Option("--weights", help="Which weights of a preset's checkpoint.")
]
CheckpointDtype = Annotated[
    str | None,
    typer.Option("--checkpoint-dtype", metavar="DTYPE", help="What its tensors must be stored in [default: any]."),
]
AdapterDir = Annotated[str | None, typer.Option("--adapter", metavar="DIR", help="LoRA adapter, as peft saves it.")]
AdapterMode = Annotated[
    Literal["merge", "apply"] | None,
    typer.Option("--adapter-mode", help="Add the adapter to the weights, or compute it beside them."),
]
KeyStage = Annotated[
    Literal["raw", "normed", "attention"],
    typer.Option("--key-stage", help="Keys as projected, behind their norm, or as attention consumes them."),
]
Quantise = Annotated[
    str | None, typer.Option("--quantise", metavar="SCHEME", help="Store in 8 bits: int8, fp8 or fp8-e5m2.")
]
Images = Annotated[bool, typer.Option("--images/--no-images", help="Messages may have images, which the model takes.")]
