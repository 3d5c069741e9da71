"""Loading a vision-language model with its vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModel

from kvformat.errors import make_error
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.library import first_line, no_progress_bars
from kvformat.extract.hf.loading import decoder_stack, load_config, load_from_checkpoint
from kvformat.extract.hf.options import check_dtype, configured_dtype
from kvformat.extract.towers import PREFIX, takes_images
from kvformat.tensors import torch_dtype

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
    compute = check_dtype(compute_dtype or configured_dtype(config), "compute")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with no_progress_bars():
            loaded, info = AutoModel.from_pretrained(
                str(model),
                config=config,
                revision=revision or "main",
                dtype=torch_dtype(compute),
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers raises whatever the missing or odd file led to
        raise make_error("E304", f"the model does not load: {first_line(error)}", path=model) from error
    if getattr(loaded, "_hf_peft_config_loaded", False):
        raise make_error(
            "E302", "an adapter was loaded with the model; merge it and save the merged model", path=model
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise make_error(
            "E304",
            f"the checkpoint lacks {len(missing)} tensors, the first {missing[0]!r}: they would be random",
            path=model,
        )
    decoder = loaded.get_decoder()
    stack, blocks = decoder_stack(decoder, int(decoder.config.num_hidden_layers))
    own = [f".{stack}.{number}." for number in range(len(blocks))] + [f".{PREFIX}"]
    odd = sorted(name for name in info["unexpected_keys"] if any(part in f".{name}" for part in own))
    if odd:
        raise make_error(
            "E304",
            f"the checkpoint holds {len(odd)} tensors that {type(loaded).__name__} does not have, the first "
            f"{odd[0]!r}: it is another model than its configuration says",
            path=model,
        )
    return loaded.eval(), {}
