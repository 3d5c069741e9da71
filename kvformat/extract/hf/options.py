"""Reading options and configurations: layers, dtypes, positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from kvformat.errors import make_error
from kvformat.extract.options import layer_numbers
from kvformat.spec.context import ComputeDtype
from kvformat.spec.schema import Stage
from kvformat.tensors import torch_dtype

__all__ = [
    "DTYPES",
    "AdapterMode",
    "check_adapter_mode",
    "check_device",
    "check_dtype",
    "check_key_stage",
    "configured_dtype",
    "latent_widths",
    "max_positions",
    "wanted_layers",
]

AdapterMode = Literal["merge", "apply"]
DTYPES: tuple[ComputeDtype, ...] = ("BF16", "F16", "F32")
_DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "xpu")
_SHOWN = 8  # layers a message lists


def wanted_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Wanted layers, ascending; all of them for None. E081 for one the model has not, or one given twice."""
    given = layer_numbers(layers)
    if given is None:
        return tuple(range(num_layers))
    wanted = tuple(sorted(given))
    has = f"the model has layers 0 to {num_layers - 1}"
    if not wanted:
        raise make_error("E081", f"no layer is asked for; {has}")
    absent = [layer for layer in wanted if not 0 <= layer < num_layers]
    if absent:
        raise make_error("E081", f"{has}, and not those that are asked for besides: {_brief(absent)}")
    twice = [layer for layer, following in pairwise(wanted) if layer == following]
    if twice:
        raise make_error("E081", f"each layer may be given once, found twice: {_brief(twice)}")
    return wanted


def check_device(device: str | torch.device) -> torch.device:
    """The device, where this machine and this build of torch have it; E081 elsewhere."""
    available = [name for name in _DEVICES if _is_available(name)]
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in available:
        raise make_error("E081", f"device {str(device)!r} is not available here, only {' and '.join(available)}")
    count = 1 if found.type == "cpu" else getattr(torch, found.type).device_count()
    if (found.index or 0) >= count:
        raise make_error("E081", f"device {str(device)!r} is not there: {found.type} has {count}, counted from 0")
    return found


def latent_widths(config: Any) -> tuple[int, int] | None:
    """Widths of latent and rotary key where a model's configuration has them."""
    widths = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    return (int(widths[0]), int(widths[1])) if widths[0] and widths[1] else None


def check_dtype(name: str, what: str) -> str:
    """BF16, F16 or F32, in upper or lower case, as the format writes it; E081 for anything else."""
    found = str(name).upper()
    if found not in DTYPES:
        raise make_error("E081", f"{what} dtype must be one of {', '.join(DTYPES)}, found {name!r}")
    return found


def check_key_stage(key_stage: object) -> Stage:
    """``raw``, ``normed`` or ``attention``; E081 for anything else."""
    for stage in get_args(Stage):
        if key_stage == stage:
            return stage  # type: ignore[no-any-return]
    raise make_error("E081", f"key_stage must be one of {', '.join(get_args(Stage))}, found {key_stage!r:.80}")


def check_adapter_mode(mode: object) -> AdapterMode:
    """``merge`` or ``apply``; E081 for anything else."""
    for known in get_args(AdapterMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise make_error("E081", f"adapter_mode must be one of {', '.join(get_args(AdapterMode))}, found {mode!r:.80}")


def configured_dtype(config: Any) -> str:
    """safetensors name of the dtype a configuration names; F32 where it names none, as transformers does."""
    dtype = getattr(config, "dtype", None)
    if dtype is None:
        dtype = getattr(config.get_text_config(decoder=True), "dtype", None)
    names = {torch_dtype(name): name for name in DTYPES} | {str(torch_dtype(name))[6:]: name for name in DTYPES}
    if dtype is None:
        return "F32"
    if dtype not in names:
        raise make_error(
            "E302", f"the configuration names dtype {dtype}; choose one of {', '.join(DTYPES)} to compute in"
        )
    return names[dtype]


def max_positions(config: Any) -> int | None:
    """Positions a model has, by its configuration."""
    value = getattr(config, "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def _is_available(device: str) -> bool:
    module = torch.backends.mps if device == "mps" else getattr(torch, device, None)
    return module is not None and bool(module.is_available())


def _brief(layers: Sequence[int]) -> str:
    """Ascending layers: each of a few, of many their number and ends."""
    if len(layers) <= _SHOWN:
        return ", ".join(map(str, layers))
    return f"{len(layers):,} of {layers[0]} to {layers[-1]}"
