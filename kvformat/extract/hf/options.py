"""Reading options and configurations: layers, dtypes, positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvformat.errors import make_error
from kvformat.spec.context import ComputeDtype
from kvformat.tensors import torch_dtype

__all__ = ["DTYPES", "check_dtype", "configured_dtype", "latent_widths", "max_positions", "wanted_layers"]

DTYPES: tuple[ComputeDtype, ...] = ("BF16", "F16", "F32")


def wanted_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Wanted layers, ascending; all of them for None. E081 for one the model has not, or one given twice."""
    if layers is None:
        return tuple(range(num_layers))
    wanted = tuple(sorted(layers))
    if not wanted or len(set(wanted)) != len(wanted) or not 0 <= wanted[0] <= wanted[-1] < num_layers:
        raise make_error("E081", f"layers must be distinct and of 0 to {num_layers - 1}, found {list(layers)}")
    return wanted


def latent_widths(config: Any) -> tuple[int, int] | None:
    """Widths of latent and rotary key where a model's configuration has them."""
    widths = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    return (int(widths[0]), int(widths[1])) if widths[0] and widths[1] else None


def check_dtype(name: str, what: str) -> str:
    """E081 unless a dtype is BF16, F16 or F32."""
    if name not in DTYPES:
        raise make_error("E081", f"{what} dtype must be one of {', '.join(DTYPES)}, found {name!r}")
    return name


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
