"""What a model's records will look like, from its configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModel

from kvformat.errors import make_error
from kvformat.extract.hf.hub import commit_of
from kvformat.extract.hf.loading import load_config
from kvformat.extract.hf.options import (
    check_dtype,
    check_key_stage,
    configured_dtype,
    latent_widths,
    max_positions,
    wanted_layers,
)
from kvformat.extract.hf.stack import decoder_stack
from kvformat.extract.key_stages import find_stages
from kvformat.extract.probe import probe
from kvformat.extract.shapes import cached_schema
from kvformat.extract.towers import takes_images
from kvformat.spec.schema import Schema, Stage

__all__ = ["Description", "describe"]


class Description(NamedTuple):
    """What is known of a model before its weights are loaded.

    Attributes
    ----------
    family
        ``model_type`` of the decoder.
    schema
        Of the records that would be extracted.
    max_tokens, vocab_size
        Positions and embedding rows; None where the configuration does not say.
    compute_dtype
        Given, or what the configuration names.
    revision
        Commit of a hub id, so that weights and tokenizer are loaded from the very same; as given where nobody knows.
    takes_images
        Whether documents may have images. Records of documents with images have more extras than ``schema``:
        :func:`kvformat.extract.media.with_media`.
    """

    family: str
    schema: Schema
    max_tokens: int | None
    vocab_size: int | None
    compute_dtype: str
    revision: str | None
    takes_images: bool = False


def describe(
    model: str | Path,
    *,
    revision: str | None = None,
    layers: Sequence[int] | None = None,
    dtype: str | None = None,
    compute_dtype: str | None = None,
    key_stage: Stage = "attention",
) -> Description:
    """Build the model without storage (on the ``meta`` device) and look at what it hands to its cache.

    Raises
    ------
    InputError
        E302, E303, E304.
    UsageError
        E081.
    """
    revision = commit_of(model, revision) or revision
    config = load_config(model, revision=revision)
    text_config = config.get_text_config(decoder=True)
    compute = check_dtype(compute_dtype or configured_dtype(config), "compute")
    storage = check_dtype(dtype or compute, "storage")
    wanted = wanted_layers(layers, int(text_config.num_hidden_layers))
    decoder = _without_storage(config, model)
    find_stages(decoder_stack(decoder, int(text_config.num_hidden_layers))[1], wanted, check_key_stage(key_stage))
    probed = probe(decoder, wanted, latent=latent_widths(text_config), watch=False)
    vocab = getattr(text_config, "vocab_size", None)
    return Description(
        family=str(text_config.model_type),
        schema=cached_schema(probed.forms, dtype=storage, key_stage=key_stage),
        max_tokens=max_positions(text_config),
        vocab_size=int(vocab) if vocab else None,
        compute_dtype=compute,
        revision=revision,
        takes_images=takes_images(config),
    )


def _without_storage(config: Any, model: str | Path) -> Any:
    try:
        with torch.device("meta"):
            # Shapes do not depend on the dtype, and some kernels are defined for this one only without storage.
            made = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
            return made.get_decoder().eval()
    except Exception as error:  # transformers raises whatever the odd configuration led to
        raise make_error(
            "E304", f"no model can be made of the configuration: {type(error).__name__}: {error}", path=model
        ) from error
