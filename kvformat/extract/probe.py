"""One tiny forward that shows what a model's cache holds: shapes, what attention consumes, which tensors reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.capture import CaptureCache, cache_argument, run_decoder

__all__ = ["LayerForm", "Probe", "probe", "reachable_state"]

_BATCH, _TOKENS = 2, 5
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


class LayerForm(NamedTuple):
    """What one layer hands to its cache.

    Attributes
    ----------
    key, value
        (heads, width) of ``[batch, heads, tokens, width]``.
    latent
        The cache holds a compressed latent and a shared rotary key, from which K and V are made later.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    latent: bool


class Probe(NamedTuple):
    """Forms of the wanted layers, and the names of the decoder's tensors that reach them."""

    forms: Mapping[int, LayerForm]
    reached: frozenset[str]


def probe(decoder: nn.Module, layers: Sequence[int], *, watch: bool = True) -> Probe:
    """Run ``decoder`` on a few tokens and look.

    Parameters
    ----------
    decoder
        Base decoder in evaluation mode. Neither its parameters nor their ``requires_grad`` are touched.
    layers
        Wanted model layers, ascending.
    watch
        Whether the check against the attention product and the walk of the graph are made; without them the decoder
        may be on the ``meta`` device.

    Raises
    ------
    InputError
        E302 for a model whose cache is not what its attention consumes, or that keeps other state; E303 where a wanted
        layer never writes the cache, or where rows are missing.
    """
    last = layers[-1]
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    product = _ProductWatch() if watch else None

    def sink(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        taken[layer] = (key, value)
        if product is not None:
            product.expect(layer, key, value)

    cache = CaptureCache(sink, stop=lambda layer: layer > last)
    argument = cache_argument(decoder)
    parameter = next(decoder.parameters())
    ids = torch.arange(_BATCH * _TOKENS, device=parameter.device).reshape(_BATCH, _TOKENS)
    state = reachable_state(decoder) if watch else {}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    try:
        with torch.set_grad_enabled(watch), product or _Nothing():
            run_decoder(_caller(decoder, leaves), cache, argument=argument, input_ids=ids)
    except KVFormatError:
        raise
    except Exception as error:
        raise make_error(
            "E302",
            f"{type(decoder).__name__} does not run on a K/V cache alone ({type(error).__name__}: {error}); models that "
            "keep other state between tokens are refused",
        ) from error
    missing = [layer for layer in layers if layer not in taken]
    if missing:
        raise make_error(
            "E303",
            f"layers {missing} of {type(decoder).__name__} write no K/V of their own into the cache; leave them out of "
            "the wanted layers",
            layer=missing[0],
        )
    forms = {layer: _form(layer, *taken[layer], product) for layer in layers}
    wanted = [tensor for layer in layers for tensor in taken[layer]]
    return Probe(forms=forms, reached=frozenset(_reached(wanted, leaves)) if watch else frozenset())


def reachable_state(decoder: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent floating-point buffers by name, each tensor once, under its first name.

    Raises
    ------
    InputError
        E302 for quantised parameters.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in sorted(decoder.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        if not tensor.is_floating_point():
            if isinstance(tensor, nn.Parameter):
                raise make_error("E302", f"parameter {name!r} is {tensor.dtype}: quantised models are refused")
            continue
        seen.add(id(tensor))
        found[name] = tensor
    return found


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_error: object) -> None:
        return None


class _ProductWatch(TorchFunctionMode):
    """Sees every matrix product, and notes whether K and V of the layer at hand enter one as they were cached."""

    def __init__(self) -> None:
        super().__init__()
        self._layer = -1
        self._open: dict[str, torch.Tensor] = {}
        self._consumed: dict[int, set[str]] = {}

    def expect(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._layer = layer
        self._open = {"key": key.detach(), "value": value.detach()}
        self._consumed[layer] = set()

    def consumed(self, layer: int) -> bool:
        return self._consumed[layer] == {"key", "value"}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._open and func in _PRODUCTS:
            operands = [t for t in _tensors((*args, *(kwargs or {}).values())) if t.ndim >= 3]
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for name, wanted in list(self._open.items()):
                    if any(_same(operand.detach(), wanted) for operand in operands):
                        self._consumed[self._layer].add(name)
                        del self._open[name]
        return func(*args, **(kwargs or {}))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _same(operand: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether an operand holds the cached values: whole or transposed, heads repeated or merged into the batch."""
    batch, heads, tokens, width = wanted.shape
    if operand.numel() % wanted.numel():
        return False
    for candidate in (operand, operand.transpose(-1, -2)):
        if candidate.shape[-2:] != (tokens, width):
            continue
        split = candidate.reshape(batch, -1, tokens, width)
        repeats = split.shape[1] // heads
        expected = wanted.repeat_interleave(repeats, dim=1).to(split.dtype)
        if torch.equal(split, expected):
            return True
    return False


def _form(layer: int, key: torch.Tensor, value: torch.Tensor, product: _ProductWatch | None) -> LayerForm:
    for name, tensor in (("K", key), ("V", value)):
        if tensor.ndim != 4 or tensor.shape[0] != _BATCH or tensor.shape[2] != _TOKENS:
            raise make_error(
                "E303",
                f"the cache holds {name} of shape {list(tensor.shape)}, expected [{_BATCH}, heads, {_TOKENS}, width]",
                layer=layer,
            )
    heads = (key.shape[1], value.shape[1])
    latent = product is not None and not product.consumed(layer)
    if latent and heads != (1, 1):
        raise make_error(
            "E302",
            "what the model caches is not what its attention product consumes; keys at that stage cannot be taken",
            layer=layer,
        )
    return LayerForm(
        key=(int(key.shape[1]), int(key.shape[3])), value=(int(value.shape[1]), int(value.shape[3])), latent=latent
    )


def _caller(decoder: nn.Module, leaves: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    if not leaves:
        return decoder

    def call(**options: Any) -> Any:
        return functional_call(decoder, dict(leaves), kwargs=options)

    return call


def _reached(tensors: Sequence[torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> Iterator[str]:
    names = {id(leaf): name for name, leaf in leaves.items()}
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            yield names[id(variable)]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
