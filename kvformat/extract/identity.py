"""The context of a model, derived from its configuration and checked against the modules that compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.families import Config, Family, activation, family_of, setting
from kvformat.extract.probe import LayerForm
from kvformat.extract.rope import attention_factor, inverse_frequencies, refuse_history, rope_group, tolerance
from kvformat.spec import canonical
from kvformat.spec.context import ComputeDtype, Context, Model, RopeGroup, Sizes, WeightsDigest, Window, check, real

__all__ = ["check_history", "derive_context", "inv_freq_file"]

_RELATIVE = 1e-6
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_history(config: Config, decoder: nn.Module) -> None:
    """Refuse a model whose keys depend on what it saw before, whatever else is known of it.

    Looks at the configuration and at the modules, which need not agree.

    Raises
    ------
    InputError
        E302.
    """
    kinds = [settings.get("rope_type", settings.get("type")) for _, settings in _rope_settings(config)]
    for module in decoder.modules():
        found = getattr(module, "rope_type", None)
        kinds += list(found.values()) if isinstance(found, Mapping) else [found]
    for kind in kinds:
        if isinstance(kind, str):
            refuse_history(kind)


def derive_context(
    config: Config,
    decoder: nn.Module,
    stack: nn.ModuleList,
    forms: Mapping[int, LayerForm],
    *,
    compute_dtype: ComputeDtype,
    weights: WeightsDigest,
) -> Context:
    """Context of a decoder.

    Parameters
    ----------
    config
        Configuration of the decoder itself (of its text part, for a model of several).
    decoder, stack
        The modules, and the decoder layers among them, in order.
    forms
        What the wanted layers cache.

    Raises
    ------
    InputError
        E302 for an unknown family, for what has no place in a context, and where configuration and modules disagree.
    """
    family = family_of(config)
    sizes = family.sizes(config)
    rope = _rope(config, family, sizes)
    windows = _windows(config, family, sizes.num_hidden_layers)
    scalars = family.scalars(config)
    _check_structure(config, family, sizes, stack, forms, windows)
    for group in rope:
        _check_frequencies(decoder, group, _live(decoder, config, group.layers[0]))
    context = Context.of(
        Model(
            activation=activation(config, family),
            adapters=(),
            compute_dtype=compute_dtype,
            family=config.model_type,
            norm_eps=real(setting(config, family.eps)),
            qk_norm=family.qk_norm,
            rope=rope,
            scalars=scalars,
            sizes=sizes,
            weights=weights,
            windows=windows,
        )
    )
    try:
        check(context)
    except KVFormatError as error:
        raise make_error("E302", f"the configuration gives no valid context: {error.message}") from error
    return context


def inv_freq_file(context: Context, config: Config, decoder: nn.Module) -> bytes | None:
    """The covered file ``inv_freq``: frequencies as the modules hold them; None where nothing rotates."""
    if context.model is None or not context.model.rope:
        return None
    groups = [
        {"layers": list(group.layers), "values": [real(float(v)) for v in _live(decoder, config, group.layers[0])[0]]}
        for group in context.model.rope
    ]
    return canonical.encode({"groups": groups})


def _check_structure(
    config: Config,
    family: Family,
    sizes: Sizes,
    stack: nn.ModuleList,
    forms: Mapping[int, LayerForm],
    windows: Sequence[Window],
) -> None:
    """Compare what the configuration says with what the modules have and the cache holds.

    Raises
    ------
    InputError
        E302 naming both values.
    """
    for layer, form in forms.items():
        if form.latent:
            expected = ((1, sizes.kv_lora_rank), (1, sizes.qk_rope_head_dim))
        else:
            width = (sizes.num_key_value_heads, sizes.head_dim)
            expected = (width, (width[0], sizes.v_head_dim or width[1]))
        if (form.key, form.value) != expected:
            raise make_error(
                "E302",
                f"the cache holds K and V of (heads, width) {form.key} and {form.value}, the configuration says "
                f"{expected[0]} and {expected[1]}",
                layer=layer,
            )
    window_of = {layer: window.size for window in windows for layer in window.layers}
    default_scale = 1 / math.sqrt(sizes.head_dim)
    scale = family.scalars(config).attention_scale
    for layer, block in enumerate(stack):
        attention = getattr(block, family.attention, None)
        if attention is None:
            raise make_error("E302", f"the layer has no attention module {family.attention!r}", layer=layer)
        normed = getattr(attention, "k_norm", None) is not None
        _agree("key norm", family.qk_norm != "none", normed, layer)
        if hasattr(attention, "sliding_window"):
            _agree("sliding window", window_of.get(layer), attention.sliding_window, layer)
        expected_scale = default_scale * _yarn_attention(config) if scale is None else canonical.decode_real(scale)
        if not math.isclose(attention.scaling, expected_scale, rel_tol=1e-9):
            _agree("attention scale", expected_scale, attention.scaling, layer)
        eps = {e for e in (_eps(m) for m in block.children()) if e is not None}
        _agree("norm eps", {setting(config, family.eps)}, eps, layer)


def _agree(what: str, configured: object, found: object, layer: int) -> None:
    if configured != found:
        raise make_error("E302", f"{what}: the configuration gives {configured}, the module has {found}", layer=layer)


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _yarn_attention(config: Config) -> float:
    """Square of the yarn magnitude that latent attention folds into its scale (DeepSeek-V3)."""
    settings = getattr(config, "rope_parameters", None) or {}
    factor, mscale = settings.get("factor"), settings.get("mscale_all_dim")
    if (
        config.model_type != "deepseek_v3"
        or settings.get("rope_type") != "yarn"
        or not mscale
        or not factor
        or factor <= 1
    ):
        return 1.0
    return float(0.1 * mscale * math.log(factor) + 1.0) ** 2


def _windows(config: Config, family: Family, num_layers: int) -> tuple[Window, ...]:
    size = getattr(config, "sliding_window", None)
    types = _layer_types(config, num_layers)
    if types is not None:
        layers = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    else:
        layers = tuple(range(num_layers)) if family.window and size is not None else ()
    return (Window(layers=layers, size=setting(config, "sliding_window")),) if layers else ()


def _layer_types(config: Config, num_layers: int) -> list[str] | None:
    types = getattr(config, "layer_types", None)
    if types is None:
        return None
    unknown = sorted(set(types) - _LAYER_TYPES)
    if unknown or len(types) != num_layers:
        raise make_error(
            "E302", f"layer_types: {len(types)} for {num_layers} layers, unknown here: {unknown or 'none'}"
        )
    return list(types)


def _rope_settings(config: Config) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Flat settings, by kind of layer where they are nested."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = {kind: value for kind, value in settings.items() if isinstance(value, Mapping)}
    if nested:
        yield from ((kind, dict(value)) for kind, value in nested.items())
    elif settings:
        yield None, dict(settings)


def _rope(config: Config, family: Family, sizes: Sizes) -> tuple[RopeGroup, ...]:
    if not family.rotary:
        return ()
    num_layers = sizes.num_hidden_layers
    by_kind = dict(_rope_settings(config))
    if None in by_kind:
        layers_of: dict[str | None, list[int]] = {None: list(range(num_layers))}
    else:
        layers_of = {}
        for layer, layer_type in enumerate(_layer_types(config, num_layers) or []):
            layers_of.setdefault(layer_type, []).append(layer)
    missing = sorted(str(kind) for kind in layers_of.keys() - by_kind.keys())
    if missing or not layers_of:
        raise make_error(
            "E302", f"the configuration has no rope_parameters for layers of type {', '.join(missing) or 'any'}"
        )
    groups = []
    for kind, layers in layers_of.items():
        settings = by_kind[kind]
        has_sections = "mrope_section" in settings
        if has_sections != family.sections or (has_sections and settings.get("mrope_interleaved") is not True):
            raise make_error("E302", "the split of rotary dimensions over position rows is not the one of this family")
        groups.append(
            rope_group(
                settings,
                layers=layers,
                head_dim=sizes.qk_rope_head_dim or sizes.head_dim,
                interleaved=bool(setting(config, family.interleaved)) if family.interleaved else False,
                max_positions=getattr(config, "max_position_embeddings", None),
            )
        )
    return tuple(sorted(groups, key=lambda group: group.layers[0]))


def _live(decoder: nn.Module, config: Config, layer: int) -> tuple[NDArray[np.float64], float]:
    """Frequencies and attention factor the modules hold for a layer."""
    types = getattr(config, "layer_types", None)
    prefixes = ["", *([f"{types[layer]}_"] if types else [])]
    for module in decoder.modules():
        for prefix in prefixes:
            buffer = getattr(module, f"{prefix}inv_freq", None)
            scale = getattr(module, f"{prefix}attention_scaling", None)
            if buffer is not None and isinstance(scale, int | float):
                return buffer.detach().double().cpu().numpy(), float(scale)
    raise make_error(
        "E302", "no module holds inverse frequencies, so the RoPE parameters cannot be checked", layer=layer
    )


def _check_frequencies(decoder: nn.Module, group: RopeGroup, live: tuple[NDArray[np.float64], float]) -> None:
    values, scale = live
    expected = inverse_frequencies(group)
    layer = group.layers[0]
    if values.shape != expected.shape or not np.allclose(values, expected, rtol=tolerance(group), atol=0.0):
        off = "in number" if values.shape != expected.shape else f"by {np.max(np.abs(values / expected - 1)):.1e}"
        raise make_error(
            "E302",
            f"{type(decoder).__name__} rotates with frequencies that differ {off} from those of its parameters "
            f"({group.kind}, theta {canonical.decode_real(group.theta):g}): either the library reads the "
            "configuration otherwise, or the whole model was cast after it was made, frequencies included; load it in "
            "the dtype it is to compute in",
            layer=layer,
        )
    if not math.isclose(scale, attention_factor(group), rel_tol=_RELATIVE):
        _agree("rotary attention factor", attention_factor(group), scale, layer)
