"""A Hugging Face cache that hands every layer's K and V on instead of keeping them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from kvformat.errors import make_error

__all__ = ["CaptureCache", "LastLayerReachedError", "run_decoder"]

Sink = Callable[[int, torch.Tensor, torch.Tensor], None]


class LastLayerReachedError(Exception):
    """Raised inside a forward when the K and V of the last wanted layer are there: the rest need not be computed."""


class CaptureCache(Cache):  # type: ignore[misc, unused-ignore]
    """Looks empty and unlimited to the model, so masks cover the whole input and no sliding layer drops a row.

    Parameters
    ----------
    sink
        Called with (layer, K, V) as the model hands them to its cache, each layer once.
    stop
        Whether the forward ends at this layer, right after ``sink`` saw it.
    """

    def __init__(self, sink: Sink, *, stop: Callable[[int], bool]) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._sink = sink
        self._stop = stop
        self._seen: set[int] = set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass the layer's K and V on and return them as they are."""
        if layer_idx in self._seen:
            raise make_error("E302", "the model writes this layer's cache twice in one pass", layer=layer_idx)
        self._seen.add(layer_idx)
        self._sink(layer_idx, key_states, value_states)
        if self._stop(layer_idx):
            raise LastLayerReachedError
        return key_states, value_states


def cache_argument(decoder: nn.Module) -> str:
    """Name of the forward argument that takes the cache.

    Raises
    ------
    InputError
        E303 where there is none.
    """
    parameters = inspect.signature(type(decoder).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise make_error("E303", f"{type(decoder).__name__} takes no K/V cache; use a decoder-only language model")


def run_decoder(call: Callable[..., Any], cache: CaptureCache, *, argument: str, **inputs: Any) -> None:
    """Run ``call`` on ``inputs``, its further arguments by name, up to the layer at which ``cache`` stops.

    Parameters
    ----------
    call
        Forward of a decoder.
    argument
        Name of the argument that takes the cache.
    inputs
        Such as ``input_ids`` and ``position_ids``, int64 ``[batch, tokens]``.
    """
    try:
        call(**inputs, use_cache=True, **{argument: cache})
    except LastLayerReachedError:
        return
