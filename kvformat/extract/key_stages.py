"""Keys before their norm or rotary embedding, taken where a model's own modules put them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.keys import rotate
from kvformat.spec.context import RopeGroup
from kvformat.spec.schema import Stage

__all__ = ["KeyStages", "find_stages"]

_Kind = Literal["plain", "fused", "latent"]
# Modules that put keys out, by name inside an attention module. A fused one ends with all of K, then all of V.
_PROJECTIONS: Mapping[str, _Kind] = {
    "k_proj": "plain",
    "c_attn": "fused",
    "qkv_proj": "fused",
    "kv_a_proj_with_mqa": "latent",
}
_NORMS = ("k_norm", "k_layernorm", "kv_a_layernorm")
_INSTEAD = "store keys of stage 'attention'"


class _Taps(NamedTuple):
    """The modules of one layer that its keys go through."""

    attention: nn.Module
    projection: nn.Module
    kind: _Kind
    norm: nn.Module | None


class _Given(NamedTuple):
    """What the modules of a layer were given and put out since its attention began."""

    projected: list[torch.Tensor]
    normed: list[tuple[torch.Tensor, torch.Tensor]]  # input and output
    rotary: list[tuple[torch.Tensor, torch.Tensor]]  # cosine and sine


class KeyStages:
    """Takes keys of an earlier stage than the cached one while a model runs; :func:`find_stages` makes one.

    A model is run once under :meth:`watching` with :meth:`verify` for each layer before :meth:`take` is used.
    """

    def __init__(self, stage: Stage, taps: Mapping[int, _Taps]) -> None:
        self._stage = stage
        self._taps = taps
        self._given: dict[int, _Given] = {}
        self._heads_first: dict[int, bool] = {}
        self._rotations: dict[int, tuple[bool, int] | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep hooks on the modules while the block runs, and take them off again."""
        handles = []
        try:
            for layer, taps in self._taps.items():
                handles.append(taps.attention.register_forward_pre_hook(self._begin(layer), with_kwargs=True))
                handles.append(taps.projection.register_forward_hook(self._keep_projected(layer)))
                if taps.norm is not None:
                    handles.append(taps.norm.register_forward_hook(self._keep_normed(layer)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._given.clear()

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer that is writing its cache, K at the stage.

        Parameters
        ----------
        key, value
            ``[batch, heads, tokens, width]`` as cached; latent and rotary key where the model caches those.

        Returns
        -------
        tuple of torch.Tensor
            Of the same shapes; copies of what the modules put out. A layer that is not wanted comes back as given.

        Raises
        ------
        InputError
            E302 where the layer's modules ran otherwise than when they were verified.
        """
        if layer not in self._taps:
            return key, value
        given = self._given_in(layer)
        del self._given[layer]
        if self._stage == "raw":
            return self._projected(layer, given, key, value)
        if len(given.normed) != 1:
            raise make_error("E302", f"the key norm ran {len(given.normed)} times in this layer", layer=layer)
        normed = _by_heads(given.normed[0][1], key.shape, heads_first=self._heads_first[layer])
        if normed is None:
            raise make_error("E302", "the key norm gives another shape than when the model was looked at", layer=layer)
        return normed, value

    def verify(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Show, bit for bit, that the missing steps lead from the projection's output to what is cached.

        Known steps are the norm module, on what the projection put out, then the rotary embedding, with the cosine
        and sine that the attention module was given. Parameters are as for :meth:`take`.

        Raises
        ------
        InputError
            E302 where they lead elsewhere: this attention does something else in between.
        """
        if layer not in self._taps:
            return
        given = self._given_in(layer)
        with torch.no_grad():
            raw_key, raw_value = self._projected(layer, given, key, value)
            normed = self._check_norm(layer, given, raw_key)
            if self._taps[layer].kind != "latent":
                self._check_rotation(layer, given, normed, key)
                return
            if not torch.equal(normed, key):
                raise _unknown_step("the norm", layer)
            self._check_rotation(layer, given, raw_value, value)

    def check_groups(self, groups: Sequence[RopeGroup]) -> None:
        """Compare how the keys turned out to be rotated with the RoPE groups of a context.

        Raises
        ------
        InputError
            E302 where they differ: who rotates by the context would not get the keys that attention consumes.
        """
        stated = {layer: (group.interleaved, group.rotary_dim) for group in groups for layer in group.layers}
        for layer, found in self._rotations.items():
            if stated.get(layer) != found:
                raise make_error(
                    "E302",
                    f"rotation (interleaved, rotary_dim): the context gives {stated.get(layer)}, the keys show "
                    f"{found}; {_INSTEAD}",
                    layer=layer,
                )

    def _begin(self, layer: int) -> Callable[..., None]:
        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            pairs = [pair for pair in (kwargs.get("position_embeddings"), *args) if isinstance(pair, (tuple, list))]
            self._given[layer] = _Given([], [], [(pair[0], pair[1]) for pair in pairs if len(pair) == 2])

        return begin

    def _keep_projected(self, layer: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._given[layer].projected.append(output.clone())  # what follows may work in place

        return keep

    def _keep_normed(self, layer: int) -> Callable[..., None]:
        def keep(_module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._given[layer].normed.append((args[0], output.clone()))

        return keep

    def _given_in(self, layer: int) -> _Given:
        given = self._given.get(layer)
        if given is None or len(given.projected) != 1:
            times = 0 if given is None else len(given.projected)
            raise make_error(
                "E302", f"the key projection ran {times} times before this layer's cache, expected once", layer=layer
            )
        return given

    def _projected(
        self, layer: int, given: _Given, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What was projected for ``key``, and for a shared rotary key in ``value``; another ``value`` as it is."""
        (output,) = given.projected
        kind = self._taps[layer].kind
        width, after = key.shape[1] * key.shape[3], value.shape[1] * value.shape[3]
        start = {"plain": 0, "fused": output.shape[-1] - width - after, "latent": 0}[kind]
        behind = {"plain": 0, "fused": after, "latent": after}[kind]
        found = None
        if start >= 0 and output.shape[-1] == start + width + behind:
            found = _by_heads(output[..., start : start + width], key.shape, heads_first=False)
        rope_key = _by_heads(output[..., width:], value.shape, heads_first=False) if kind == "latent" else value
        if found is None or rope_key is None:
            raise make_error(
                "E302",
                f"the key projection gives {list(output.shape)} for keys of {list(key.shape)}; {_INSTEAD}",
                layer=layer,
            )
        return found, rope_key

    def _check_norm(self, layer: int, given: _Given, raw: torch.Tensor) -> torch.Tensor:
        """Keys behind the norm; notes how the norm lays them out, which their shape may leave open."""
        if not given.normed:
            return raw
        for heads_first in (False, True):
            taken, normed = (_by_heads(tensor, raw.shape, heads_first=heads_first) for tensor in given.normed[0])
            if taken is not None and normed is not None and torch.equal(taken, raw):
                self._heads_first[layer] = heads_first
                return normed
        raise _unknown_step("the norm", layer)

    def _check_rotation(self, layer: int, given: _Given, before: torch.Tensor, cached: torch.Tensor) -> None:
        if torch.equal(before, cached):
            self._rotations[layer] = None
            return
        for cos, sin in given.rotary:
            if cos.ndim != 3 or not 0 < cos.shape[-1] <= before.shape[-1] or cos.shape[-1] % 2:
                continue
            for interleaved in (False, True):
                if torch.equal(rotate(before, cos.unsqueeze(1), sin.unsqueeze(1), interleaved=interleaved), cached):
                    self._rotations[layer] = (interleaved, cos.shape[-1])
                    return
        raise _unknown_step("the rotary embedding", layer)


def find_stages(stack: nn.ModuleList, layers: Sequence[int], key_stage: Stage) -> KeyStages | None:
    """Where keys of a stage are put out; None for ``attention``, the stage of what is cached.

    Looks at modules and their names only, so the model may be on the ``meta`` device.

    Parameters
    ----------
    stack
        Decoder layers, in order.
    layers
        Wanted model layers.

    Raises
    ------
    InputError
        E302 for a layer without one key projection known here.
    UsageError
        E081 for ``normed`` in a layer without key norm, where it would be ``raw``, and in latent attention, whose
        rotary key has none.
    """
    if key_stage == "attention":
        return None
    taps = {}
    for layer in layers:
        taps[layer] = _taps(stack[layer], layer)
        if key_stage == "normed" and (taps[layer].norm is None or taps[layer].kind == "latent"):
            what = "keys have" if taps[layer].norm is None else "rotary key has"
            raise make_error("E081", f"its {what} no norm: key_stage must be 'raw' or 'attention'", layer=layer)
    return KeyStages(key_stage, taps)


def _taps(block: nn.Module, layer: int) -> _Taps:
    found = [
        (module, name)
        for module in block.modules()
        for name in _PROJECTIONS
        if isinstance(getattr(module, name, None), nn.Module)
    ]
    if len(found) != 1:
        raise make_error(
            "E302",
            f"the layer has {len(found)} key projections known here ({', '.join(_PROJECTIONS)}), expected one; "
            f"{_INSTEAD}",
            layer=layer,
        )
    ((attention, name),) = found
    norms = [norm for norm in (getattr(attention, norm, None) for norm in _NORMS) if isinstance(norm, nn.Module)]
    norms = [norm for norm in norms if not isinstance(norm, nn.Identity)]
    return _Taps(
        attention=attention,
        projection=getattr(attention, name),
        kind=_PROJECTIONS[name],
        norm=norms[0] if norms else None,
    )


def _by_heads(tensor: torch.Tensor, shape: torch.Size, *, heads_first: bool) -> torch.Tensor | None:
    """A view as ``[batch, heads, tokens, width]``; None for a tensor that is none of ``[batch, tokens, ...]``."""
    if heads_first:
        return tensor if tensor.shape == shape else None
    batch, heads, tokens, width = shape
    if tensor.shape not in ((batch, tokens, heads * width), (batch, tokens, heads, width)):
        return None
    return tensor.reshape(batch, tokens, heads, width).transpose(1, 2)


def _unknown_step(step: str, layer: int) -> KVFormatError:
    return make_error(
        "E302",
        f"what the key projection puts out does not become the cached key by {step} as known here: this attention "
        f"does something else in between; {_INSTEAD}",
        layer=layer,
    )
