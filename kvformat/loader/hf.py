"""The cache of a Hugging Face model over the memory of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvformat.errors import make_error

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

__all__ = ["cache_of"]


def cache_of(keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
    """A ``DynamicCache`` whose layers are views of ``keys`` and ``values``, ``[layers, records, heads, tokens, dim]``.

    Its own way of being filled joins each tensor to an empty one, a copy: so the layers are made here.

    Raises
    ------
    DependencyError
        E205 where transformers is not installed.
    """
    try:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer
    except ImportError as error:
        raise make_error("E205", "a cache needs transformers: pip install 'kvformat[hf]'") from error
    cache = DynamicCache()
    for key, value in zip(keys.unbind(0), values.unbind(0), strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        cache.layers.append(layer)
    return cache
