"""One tiny forward that shows what a model's cache holds: shapes, what attention consumes, which tensors reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.capture import CaptureCache, cache_argument, run_decoder
from kvformat.extract.key_stages import KeyStages
from kvformat.extract.watch import ProductWatch, is_latent

__all__ = ["LayerForm", "Probe", "probe", "reachable_state"]

_IDS = [[0, 1, 2, 3, 4], [5, 4, 3, 2, 1]]
_BATCH, _TOKENS = len(_IDS), len(_IDS[0])


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
    decoder: nn.Module,
    layers: Sequence[int],
    *,
    latent: tuple[int, int] | None = None,
    watch: bool = True,
    stages: KeyStages | None = None,
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
    stages
        Verified, and gives the keys that are wanted in place of the cached ones; needs ``watch``.

    Raises
    ------
    InputError
        E302 for a model whose cache is not what its attention consumes, that keeps other state, whose early tokens
        see later ones, or whose keys of an earlier stage do not become the cached ones by the known steps; E303 where
        a wanted layer never writes the cache, or where rows are missing.
    """
    last = layers[-1]
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    product = ProductWatch(latent) if watch else None

    def sink(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        taken[layer] = (key, value)
        if stages is not None:
            stages.verify(layer, key, value)
            taken[layer] = stages.take(layer, key, value)
        if product is not None:
            product.expect(layer, key, value)

    cache = CaptureCache(sink, stop=lambda layer: layer > last)
    argument = cache_argument(decoder)
    parameter = next(decoder.parameters())
    state = reachable_state(decoder) if watch else {}
    try:
        with torch.inference_mode(mode=False), torch.set_grad_enabled(watch):
            ids = torch.tensor(_IDS, device=parameter.device)
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(watch),
            _embedding_output(decoder) as embedded,
            nullcontext() if stages is None else stages.watching(),
            product or nullcontext(),
        ):
            run_decoder(_caller(decoder, leaves), cache, argument=argument, input_ids=ids)
    except KVFormatError:
        raise
    except Exception as error:
        raise make_error(
            "E302",
            f"{type(decoder).__name__} does not run on a K/V cache alone ({type(error).__name__}: {error}); models "
            "that keep other state between tokens are refused",
        ) from error
    missing = [layer for layer in layers if layer not in taken]
    if missing:
        raise make_error(
            "E303",
            f"layers {missing} of {type(decoder).__name__} write no K/V of their own into the cache; leave them out "
            "of the wanted layers",
            layer=missing[0],
        )
    forms = {layer: _form(layer, *taken[layer], latent, product) for layer in layers}
    if not watch:
        return Probe(forms=forms, reached=frozenset())
    reached = frozenset(_reached([tensor for layer in layers for tensor in taken[layer]], leaves))
    _check_causal(last, embedded[0] if embedded else None, *taken[last])
    return Probe(forms=forms, reached=reached)


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


def _form(
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    latent: tuple[int, int] | None,
    product: ProductWatch | None,
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
        latent=is_latent(key, value, latent),
    )


def _check_causal(layer: int, embedded: torch.Tensor | None, *tensors: torch.Tensor) -> None:
    """Early rows must not depend on a later token, nor one document of the batch on another: exactly, by gradient."""
    if embedded is None:
        raise make_error("E302", "the model has no input embedding its tokens go through")
    with torch.inference_mode(mode=False), torch.enable_grad():
        early = torch.stack([tensor[0, :, : _TOKENS - 1].float().square().sum() for tensor in tensors]).sum()
        (gradient,) = torch.autograd.grad(early, embedded)
    if bool(gradient[0, _TOKENS - 1].any()):
        raise make_error(
            "E302", "early tokens see later ones: the model is not causal, and documents here are", layer=layer
        )
    if bool(gradient[1].any()):
        raise make_error("E302", "documents of one batch see each other in this model", layer=layer)


@contextmanager
def _embedding_output(decoder: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collects what the input embedding puts out while the block runs."""
    seen: list[torch.Tensor] = []
    find = getattr(decoder, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    if not isinstance(embedding, nn.Module):
        yield seen
        return

    def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        seen.append(output)

    handle = embedding.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


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
