"""Loading a vision-language model with its vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvformat.errors import make_error
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.loading import load_config, load_from_checkpoint
from kvformat.extract.hf.pretrained import load_pretrained
from kvformat.extract.towers import PREFIX, takes_images

__all__ = ["load_vision_model"]


def load_vision_model(
    model: str | Path,
    *,
    revision: str | None = None,
    compute_dtype: str | None = None,
    attn_implementation: str | None = None,
    checkpoint: CheckpointSource | str | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[Any, dict[str, str]]:
    """The base model with tower and decoder, on the CPU, in evaluation mode.

    Parameters
    ----------
    checkpoint, layers
        As for :func:`kvformat.extract.hf.loading.load_from_checkpoint`.

    Returns
    -------
    tuple
        The model, and what is recorded of the checkpoint.

    Raises
    ------
    InputError
        E302, E304; among others where a weight is missing, or where the model's files hold weights of the tower or of
        the decoder layers that its class does not know. E308 for a checkpoint.
    """
    config = load_config(model, revision=revision)
    if not takes_images(config):
        raise make_error(
            "E302", f"models of type {config.model_type!r} take no images that are known here", path=model
        )
    if checkpoint is not None:
        restored = load_from_checkpoint(
            model,
            checkpoint,
            revision=revision,
            compute_dtype=compute_dtype,
            attn_implementation=attn_implementation,
            layers=layers,
            whole=True,
        )
        return restored.module, dict(restored.provenance)
    loaded = load_pretrained(
        model,
        config,
        revision=revision,
        compute_dtype=compute_dtype,
        attn_implementation=attn_implementation,
        own=(PREFIX,),
    )
    return loaded, {}
