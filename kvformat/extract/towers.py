"""What is known of vision towers: which of their tensors reach K and V, and what no tensor tells.

Sizes of a tower are the shapes of its tensors, which the weights digest covers. The rest has no place in a context:
a context is derived for the values that are published, and for no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu

from kvformat.errors import make_error
from kvformat.extract.families import DO_WITHOUT, Config, setting

__all__ = ["PREFIX", "TOWERS", "Tower", "check_tower", "takes_images", "tower_tensors"]

PREFIX = "visual."
"""Before the names of a tower's tensors in the covered file ``weights``; no tensor of a decoder stack has it."""
_EPS = 1e-6
_DEEPSTACK = "deepstack_merger_list"
_REACHING = ("blocks", "merger", "patch_embed", "pos_embed")


class Tower(NamedTuple):
    """What the vision towers of one ``model_type`` have in common.

    Attributes
    ----------
    demands
        Settings, and the one value that is known.
    deepstack
        Blocks whose output is handed to the decoder's first layers, by the number of blocks.
    theta
        Base of the rotary embedding.
    """

    demands: Mapping[str, object]
    deepstack: Mapping[int, tuple[int, ...]]
    theta: float


TOWERS: Mapping[str, Tower] = {
    "qwen3_vl_vision": Tower(
        demands={"hidden_act": "gelu_pytorch_tanh", "num_heads": 16},
        deepstack={24: (5, 11, 17), 27: (8, 16, 24)},
        theta=10000.0,
    )
}


def takes_images(config: Config) -> bool:
    """Whether a model of this configuration has a vision tower that is known here."""
    return getattr(getattr(config, "vision_config", None), "model_type", None) in TOWERS


def tower_tensors(state: Mapping[str, torch.Tensor], *, last: int) -> dict[str, torch.Tensor]:
    """The tensors of a tower that determine K and V of the decoder's layers up to ``last``, by canonical name.

    The i-th deepstack merger adds to the output of the decoder's layer i, and so reaches the layers above it alone.

    Raises
    ------
    InputError
        E302 for a tensor that is unknown.
    """
    found = {}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        if part == _DEEPSTACK:
            if int(rest.partition(".")[0]) >= last:
                continue
        elif part not in _REACHING:
            raise make_error("E302", f"the vision tower has a tensor {name!r}, unknown here; {DO_WITHOUT}")
        found[PREFIX + name] = tensor
    return found


def check_tower(config: Config, visual: Any) -> None:
    """Refuse a tower that computes otherwise than the known ones, by configuration or by modules.

    Parameters
    ----------
    config
        Of the tower.
    visual
        Its module.

    Raises
    ------
    InputError
        E302 naming what was expected and what was found.
    """
    tower = TOWERS[config.model_type]
    depth = setting(config, "depth")
    for name, demanded in tower.demands.items():
        _demand(name, demanded, setting(config, name))
    _demand(f"deepstack_visual_indexes of {depth} blocks", tower.deepstack.get(depth), _tuple(config))
    rope = setting(config, "rope_parameters")
    _demand("rope_parameters", {"rope_type": "axial", "rope_theta": tower.theta}, dict(rope))
    head_dim = setting(config, "hidden_size") // setting(config, "num_heads")
    _agree("blocks", depth, len(visual.blocks))
    _agree("deepstack_visual_indexes", _tuple(config), _tuple(visual))
    _agree("spatial_merge_size", config.spatial_merge_size, visual.spatial_merge_size)
    _agree("interpolation of positions", ("bilinear", True), _interpolation(visual))
    for block in visual.blocks:
        _agree("num_heads", config.num_heads, block.attn.num_heads)
        if not math.isclose(block.attn.scaling, head_dim**-0.5, rel_tol=1e-9):
            _agree("attention scale", head_dim**-0.5, block.attn.scaling)
        _agree("norm eps", {_EPS}, {block.norm1.eps, block.norm2.eps})
        _check_activation(block.mlp.act_fn, approximate="tanh")
    for merger in (visual.merger, *visual.deepstack_merger_list):
        _agree("norm eps", {_EPS}, {merger.norm.eps})
        _check_activation(merger.act_fn, approximate="none")
    _check_rotary(visual.rotary_pos_emb, head_dim // 2, tower.theta)


def _demand(name: str, demanded: object, found: object) -> None:
    if found != demanded:
        known = "none is known" if demanded is None else f"only {demanded!r} is known"
        raise make_error("E302", f"vision tower: {name} = {found!r} has no place in a context, {known}; {DO_WITHOUT}")


def _agree(what: str, configured: object, found: object) -> None:
    if configured != found:
        raise make_error("E302", f"vision tower: {what}: expected {configured}, the module has {found}")


def _tuple(holder: Any) -> tuple[int, ...]:
    return tuple(setting(holder, "deepstack_visual_indexes"))


def _interpolation(visual: Any) -> tuple[object, object]:
    return getattr(visual, "interpolation_mode", None), getattr(visual, "interpolation_align_corners", None)


def _check_activation(function: Callable[[torch.Tensor], torch.Tensor], *, approximate: str) -> None:
    values = torch.linspace(-4, 4, 17)
    with torch.inference_mode():
        same = torch.allclose(function(values), gelu(values, approximate=approximate), rtol=1e-5, atol=1e-6)
    _agree(f"activation gelu (approximate {approximate!r})", configured=True, found=same)


def _check_rotary(rotary: nn.Module, spatial_dim: int, theta: float) -> None:
    expected = theta ** (-np.arange(0, spatial_dim, 2, dtype=np.float64) / spatial_dim)
    found: Any = rotary.inv_freq
    values = found.detach().double().cpu().numpy()
    if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-6, atol=0.0):
        raise make_error(
            "E302",
            f"vision tower: it rotates with other frequencies than those of theta {theta:g}; load the model in the "
            "dtype it is to compute in, a cast of the whole model casts its frequencies too",
        )
