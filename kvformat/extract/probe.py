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

_IDS = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]  # two inputs that differ in their last token only
_BATCH, _TOKENS = len(_IDS), len(_IDS[0])
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


def probe(
    decoder: nn.Module, layers: Sequence[int], *, latent: tuple[int, int] | None = None, watch: bool = True
) -> Probe:
    """Run ``decoder`` on a few tokens and look.

    Parameters
    ----------
    decoder
        Base decoder in evaluation mode. Neither its parameters nor their ``requires_grad`` are touched.
    layers
        Wanted model layers, ascending.
    latent
        Widths of the compressed latent and the shared rotary key, for a model that caches those in place of K and V.
    watch
        Whether values are looked at and the graph is walked; without it the decoder may be on the ``meta`` device.

    Raises
    ------
    InputError
        E302 for a model whose cache is not what its attention consumes, that keeps other state, or whose early tokens
        see later ones; E303 where a wanted layer never writes the cache, or where rows are missing.
    """
    last = layers[-1]
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    product = _ProductWatch(latent) if watch else None

    def sink(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        taken[layer] = (key, value)
        if product is not None:
            product.expect(layer, key, value)

    cache = CaptureCache(sink, stop=lambda layer: layer > last)
    argument = cache_argument(decoder)
    parameter = next(decoder.parameters())
    ids = torch.tensor(_IDS, device=parameter.device)
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
    forms = {layer: _form(layer, *taken[layer], latent, product) for layer in layers}
    if watch:
        for layer in layers:
            _check_causal(layer, *taken[layer])
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

    def __init__(self, latent: tuple[int, int] | None) -> None:
        super().__init__()
        self._latent = latent
        self._layer = -1
        self._open: dict[str, torch.Tensor] = {}
        self._missing: dict[int, set[str]] = {}

    def expect(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._layer = layer
        if _is_latent(key, value, self._latent):
            self._open = {"rope_key": value.detach()}
        else:
            self._open = {"key": key.detach(), "value": value.detach()}
        self._missing[layer] = set(self._open)

    def missing(self, layer: int) -> set[str]:
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


def _is_latent(key: torch.Tensor, value: torch.Tensor, latent: tuple[int, int] | None) -> bool:
    return key.shape[1] == value.shape[1] == 1 and (key.shape[-1], value.shape[-1]) == latent


def _form(
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    latent: tuple[int, int] | None,
    product: _ProductWatch | None,
) -> LayerForm:
    for name, tensor in (("K", key), ("V", value)):
        if tensor.ndim != 4 or tensor.shape[0] != _BATCH or tensor.shape[2] != _TOKENS:
            raise make_error(
                "E303",
                f"the cache holds {name} of shape {list(tensor.shape)}, expected [{_BATCH}, heads, {_TOKENS}, width]",
                layer=layer,
            )
    if product is not None and product.missing(layer):
        raise make_error(
            "E302",
            f"the {' and '.join(sorted(product.missing(layer)))} the model caches is not what its attention product "
            "consumes; keys at that stage cannot be taken from this model",
            layer=layer,
        )
    return LayerForm(
        key=(int(key.shape[1]), int(key.shape[3])),
        value=(int(value.shape[1]), int(value.shape[3])),
        latent=_is_latent(key, value, latent),
    )


def _check_causal(layer: int, *tensors: torch.Tensor) -> None:
    """The rows before the last token, equal in both inputs, must not depend on it (rounding apart)."""
    for tensor in tensors:
        one, other = tensor.detach()[:, :, : _TOKENS - 1].float()
        scale = float(one.abs().max())
        tolerance = 4 * torch.finfo(tensor.dtype).eps * max(scale, 1e-6)
        if float((one - other).abs().max()) > tolerance * max(1, layer):
            raise make_error(
                "E302", "early tokens see later ones: the model is not causal, and documents here are", layer=layer
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
