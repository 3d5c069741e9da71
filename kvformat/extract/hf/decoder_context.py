"""What determines the values of a decoder: its context, and the covered files that belong to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import structs

from kvformat.extract.identity import derive_context, inv_freq_file
from kvformat.extract.weights import state_digest, weights_digest, weights_file
from kvformat.spec import canonical
from kvformat.spec.context import ComputeDtype, Context, real

if TYPE_CHECKING:
    from kvformat.extract.hf.adapters import Adapted
    from kvformat.extract.hf.stored_layers import StoredLayers

__all__ = ["DecoderContext", "decoder_context", "values_digest"]


class DecoderContext(NamedTuple):
    """A context, and by label the covered files ``weights`` and, with rotary embedding, ``inv_freq``."""

    context: Context
    files: dict[str, bytes]


def decoder_context(
    decoder: Any,
    stored: StoredLayers,
    *,
    state: Mapping[str, torch.Tensor],
    compute_dtype: ComputeDtype,
    adapted: Adapted | None,
) -> DecoderContext:
    """Derive the context of a decoder.

    Parameters
    ----------
    stored
        What of it is stored.
    state
        The tensors that reach it, those of an adapter included.
    adapted
        What an adapter did to it.

    Raises
    ------
    InputError
        E302 for a family no context is known of; E310 where the adapter has no part in the values.
    """
    config = decoder.config
    base: Mapping[str, torch.Tensor] = state
    low_rank: Mapping[str, torch.Tensor] = {}
    if adapted is not None:
        base, low_rank = adapted.split(state)
    files = {"weights": weights_file(base, compute_dtype=compute_dtype)}
    derived = derive_context(
        config,
        decoder,
        stored.stack,
        stored.forms,
        compute_dtype=compute_dtype,
        weights=weights_digest(files["weights"]),
    )
    assert derived.model is not None, "a derived context is of a known model"
    if stored.stages is not None:
        stored.stages.check_groups(derived.model.rope)
    if adapted is not None:
        named = adapted.named(low_rank, compute_dtype=compute_dtype)
        derived = Context.of(structs.replace(derived.model, adapters=named))
    frequencies = inv_freq_file(derived, config, decoder)
    if frequencies is not None:
        files["inv_freq"] = frequencies
    return DecoderContext(derived, files)


def values_digest(decoder: Any, *, provenance: Mapping[str, str], adapted: Adapted | None) -> str:
    """SHA-256 (hex) over what determines the values, where no context says it.

    Covers all weights as loaded, the configuration, what is recorded of libraries, device and settings, and an adapter
    that is applied.
    """
    state = {
        name: tensor for name, tensor in decoder.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    determining: dict[str, object] = {
        "configuration": decoder.config.to_json_string(use_diff=False),
        "provenance": provenance,
        "state": state_digest(state),
    }
    if adapted is not None and adapted.applied is not None:
        name, scale = adapted.applied
        determining["adapter"] = {"name": name, "scale": real(scale)}
    return hashlib.sha256(canonical.encode(determining)).hexdigest()
