"""Watching what a model's attention product consumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["ProductWatch", "is_latent"]

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        nn.functional.scaled_dot_product_attention,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.baddbmm,
        torch.Tensor.bmm,
        torch.Tensor.matmul,
    }
)


class ProductWatch(TorchFunctionMode):
    """Sees every matrix product, and notes whether K and V of the layer at hand enter one as they were cached.

    Parameters
    ----------
    latent
        Widths of latent and rotary key, of which only the rotary key can be seen in a product.
    """

    def __init__(self, latent: tuple[int, int] | None) -> None:
        super().__init__()
        self._latent = latent
        self._layer = -1
        self._open: dict[str, torch.Tensor] = {}
        self._missing: dict[int, set[str]] = {}

    def expect(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """From now on, look for what this layer cached."""
        self._layer = layer
        if is_latent(key, value, self._latent):
            self._open = {"rope_key": value.detach()}
        else:
            self._open = {"key": key.detach(), "value": value.detach()}
        self._missing[layer] = set(self._open)

    def missing(self, layer: int) -> set[str]:
        """What of a layer entered no product as it was cached."""
        return self._missing[layer]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._open and func in _PRODUCTS:
            operands = [t.detach() for t in _tensors((*args, *(kwargs or {}).values())) if t.ndim >= 3]
            for name, wanted in list(self._open.items()):
                if any(_holds(operand, wanted, tail=name == "rope_key") for operand in operands):
                    self._missing[self._layer].discard(name)
                    del self._open[name]
        return func(*args, **(kwargs or {}))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _holds(operand: torch.Tensor, wanted: torch.Tensor, *, tail: bool) -> bool:
    """Whether an operand holds cached values: whole or transposed, heads repeated or merged into the batch.

    With ``tail``, only the last columns of the operand are compared: a shared rotary key stands there.
    """
    batch, heads, tokens, width = wanted.shape
    for candidate in (operand, operand.transpose(-1, -2)):
        if candidate.shape[-2] != tokens or candidate.shape[-1] < width:
            continue
        part = candidate[..., candidate.shape[-1] - width :] if tail else candidate
        if part.shape[-1] != width or part.numel() % wanted.numel():
            continue
        split = part.reshape(batch, -1, tokens, width)
        if torch.equal(split, wanted.repeat_interleave(split.shape[1] // heads, dim=1).to(split.dtype)):
            return True
    return False


def is_latent(key: torch.Tensor, value: torch.Tensor, latent: tuple[int, int] | None) -> bool:
    """Whether K and V of a cache, ``[batch, heads, tokens, width]``, are a latent and a rotary key of these widths."""
    return key.shape[1] == value.shape[1] == 1 and (key.shape[-1], value.shape[-1]) == latent
