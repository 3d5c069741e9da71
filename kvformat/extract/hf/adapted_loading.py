"""Loading the decoder of an extractor: its weights, from wherever they come, and an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvformat.errors import make_error
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.adapters import Adapted, attach_adapter, load_peft
from kvformat.extract.hf.hub import commit_of
from kvformat.extract.hf.loading import (
    compute_dtype_of,
    decoder_stack,
    load_decoder,
    load_from_checkpoint,
    provenance_of,
)
from kvformat.extract.hf.options import AdapterMode, check_adapter_mode, wanted_layers

__all__ = ["AdaptedDecoder", "load_adapted"]


class AdaptedDecoder(NamedTuple):
    """A decoder on the CPU, what an adapter did to it, and what is recorded of both."""

    decoder: Any
    adapted: Adapted | None
    provenance: dict[str, str]


def load_adapted(
    model: str | Path,
    *,
    device: torch.device,
    revision: str | None = None,
    compute_dtype: str | None = None,
    attn_implementation: str | None = None,
    checkpoint: CheckpointSource | str | None = None,
    adapter: str | Path | None = None,
    adapter_mode: AdapterMode | None = None,
    layers: Sequence[int] | None = None,
) -> AdaptedDecoder:
    """Load a decoder, and merge or apply an adapter.

    Parameters
    ----------
    device
        Where it is going to compute, for what is recorded.
    model, revision, compute_dtype, attn_implementation, checkpoint, adapter, adapter_mode, layers
        As for :meth:`kvformat.extract.hf.HuggingFaceExtractor.load`.

    Raises
    ------
    KVFormatError
        As that one.
    """
    if adapter is None and adapter_mode is not None:
        raise make_error("E081", f"adapter_mode {adapter_mode!r:.80} is given without an adapter")
    mode = None if adapter is None else check_adapter_mode(adapter_mode)
    if mode is not None:
        load_peft()  # before the model, which takes its time
    commit = commit_of(model, revision)
    how: dict[str, Any] = {
        "revision": commit or revision,
        "compute_dtype": compute_dtype,
        "attn_implementation": attn_implementation,
    }
    recorded: dict[str, str] = {}
    if checkpoint is None:
        decoder = load_decoder(model, **how)
    else:
        restored = load_from_checkpoint(model, checkpoint, layers=layers, **how)
        decoder = restored.module
        recorded |= restored.provenance
    adapted: Adapted | None = None
    if adapter is not None and mode is not None:
        num_layers = int(decoder.config.num_hidden_layers)
        decoder, adapted, found = attach_adapter(
            decoder,
            adapter,
            mode=mode,
            stack=decoder_stack(decoder, num_layers)[0],
            last=wanted_layers(layers, num_layers)[-1],
            compute_dtype=compute_dtype_of(decoder),
        )
        recorded |= found
    return AdaptedDecoder(decoder, adapted, provenance_of(decoder, model, device, commit=commit) | recorded)
