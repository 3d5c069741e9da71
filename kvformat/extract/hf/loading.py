"""Loading a decoder, and refusing what would load into something else than its weights say."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from kvformat import __version__
from kvformat.errors import make_error
from kvformat.extract.checkpoint.source import CheckpointSource, parse_checkpoint
from kvformat.extract.hf.library import first_line
from kvformat.extract.hf.options import DTYPES, check_dtype, configured_dtype
from kvformat.extract.hf.pretrained import load_pretrained
from kvformat.extract.hf.restoring import Restored, restore
from kvformat.extract.hf.stack import decoder_stack
from kvformat.spec.context import ComputeDtype
from kvformat.tensors import torch_dtype

__all__ = [
    "compute_dtype_of",
    "decoder_stack",
    "load_config",
    "load_decoder",
    "load_from_checkpoint",
    "provenance_of",
    "refuse_adapters",
    "watchable_attention",
]

_WATCHABLE = ("eager", "sdpa")


def load_config(model: str | Path, *, revision: str | None = None) -> Any:
    """Configuration of a model directory or hub id.

    Raises
    ------
    InputError
        E302 encoder-decoder or adapter, E304 no configuration that loads.
    UsageError
        E081 for a revision of a directory.
    """
    directory = Path(model)
    if not directory.is_dir() and (str(model).startswith((".", "~", os.sep)) or directory.exists()):
        what = "a file stands there, not a directory" if directory.exists() else "no such directory"
        raise make_error("E304", f"{what}: give a model directory or a hub id", path=model)
    if directory.is_dir():
        if revision is not None:
            raise make_error("E081", f"{model} is a directory, which has no revision {revision!r}", path=model)
        if (directory / "adapter_config.json").exists():
            raise make_error(
                "E302",
                "the directory holds an adapter; give its base model, and this directory as adapter (--adapter)",
                path=model,
            )
    try:
        config = AutoConfig.from_pretrained(str(model), revision=revision or "main", trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the missing or odd file led to
        where = "there" if directory.is_dir() else "the hub, and no such directory is here"
        raise make_error(
            "E304",
            f"no model configuration loads from {where}: {first_line(error)}; give a directory or a hub id",
            path=model,
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise make_error(
            "E302", f"{config.model_type!r} is an encoder-decoder model; only decoders are read", path=model
        )
    if getattr(config, "quantization_config", None) is not None:
        raise make_error(
            "E302", "the model is quantised; save it dequantised, then its weights can be identified", path=model
        )
    return config


def load_decoder(
    model: str | Path,
    *,
    revision: str | None = None,
    compute_dtype: str | None = None,
    attn_implementation: str | None = None,
    checkpoint: CheckpointSource | str | None = None,
    layers: Sequence[int] | None = None,
) -> Any:
    """The decoder of a model, on the CPU, in evaluation mode.

    Parameters
    ----------
    checkpoint, layers
        As for :func:`load_from_checkpoint`, which also tells what to record; without a checkpoint all layers are
        loaded.

    Raises
    ------
    InputError
        E302, E304; among others where a weight is missing, or where the model's files hold weights of the decoder
        layers that its class does not know. E308 for a checkpoint.
    """
    if checkpoint is not None:
        return load_from_checkpoint(
            model,
            checkpoint,
            revision=revision,
            compute_dtype=compute_dtype,
            attn_implementation=attn_implementation,
            layers=layers,
        ).module
    config = load_config(model, revision=revision)
    loaded = load_pretrained(
        model, config, revision=revision, compute_dtype=compute_dtype, attn_implementation=attn_implementation
    )
    return loaded.get_decoder()


def load_from_checkpoint(
    model: str | Path,
    checkpoint: CheckpointSource | str,
    *,
    revision: str | None = None,
    compute_dtype: str | None = None,
    attn_implementation: str | None = None,
    layers: Sequence[int] | None = None,
    whole: bool = False,
) -> Restored:
    """A model whose directory or hub id gives its configuration alone, and a checkpoint its weights.

    Parameters
    ----------
    checkpoint
        Or its text, such as ``dcp:DIR``, where its names are the model's.
    layers, whole
        As for :func:`kvformat.extract.hf.restoring.restore`.

    Raises
    ------
    InputError
        E302, E304, E308.
    StorageError
        E203, E207.
    UsageError
        E081.
    """
    source = parse_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
    assert source is not None
    config = load_config(model, revision=revision)
    compute = check_dtype(compute_dtype or configured_dtype(config), "compute")
    return restore(
        config,
        source,
        dtype=torch_dtype(compute),
        model=model,
        attn_implementation=attn_implementation,
        layers=layers,
        whole=whole,
    )


def compute_dtype_of(decoder: nn.Module) -> ComputeDtype:
    """Dtype of the decoder's input embedding.

    Raises
    ------
    InputError
        E302 for another dtype than BF16, F16 and F32.
    """
    find = getattr(decoder, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise make_error("E303", f"{type(decoder).__name__} has no token embedding; use a decoder-only language model")
    for name in DTYPES:
        if weight.dtype == torch_dtype(name):
            return name
    raise make_error("E302", f"the model computes in {weight.dtype}; load it in one of {', '.join(DTYPES)}")


def refuse_adapters(decoder: nn.Module) -> None:
    """Refuse a model with adapter layers in it, merged or not: their base weights are not what computes; E302."""
    for name, module in decoder.named_modules():
        if type(module).__module__.partition(".")[0] == "peft" or hasattr(module, "lora_A"):
            raise make_error(
                "E302", f"{name!r} is an adapter layer; merge the adapter and take it out (merge_and_unload) first"
            )


@contextmanager
def watchable_attention(decoder: Any) -> Iterator[None]:
    """Let attention run through plain products while the block runs, where its kernel would hide them."""
    chosen = getattr(decoder.config, "_attn_implementation", None)
    if chosen in _WATCHABLE or not hasattr(decoder, "set_attn_implementation"):
        yield
        return
    decoder.set_attn_implementation("eager")
    try:
        yield
    finally:
        decoder.set_attn_implementation(chosen)


def provenance_of(
    decoder: Any, model: str | Path, device: torch.device, *, commit: str | None = None
) -> dict[str, str]:
    """What is recorded and never compared. A directory counts by its last name only, a hub id with its commit."""
    config = decoder.config
    if device.type == "cuda":
        where = f"cuda: {torch.cuda.get_device_name(device)}"
    elif device.type == "cpu":
        where = f"cpu: {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    else:
        where = device.type
    found = {
        "attn_implementation": str(getattr(config, "_attn_implementation", None) or "eager"),
        "device": where,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "kvformat": __version__,
        "model_class": type(decoder).__name__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }
    if str(model):
        found["model"] = Path(model).resolve().name if Path(model).exists() else str(model)
    if commit is not None:
        found["revision"] = commit
    return found
