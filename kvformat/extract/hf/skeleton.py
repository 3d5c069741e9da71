"""A model made of its configuration alone, with memory only for the tensors that will be read."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from kvformat.errors import make_error
from kvformat.extract.hf.library import first_line, no_progress_bars

__all__ = ["outline", "skeleton", "tensors_of"]


def outline(config: Any, *, dtype: torch.dtype, model: str | Path) -> Any:
    """The base model of a configuration, on the ``meta`` device.

    Raises
    ------
    InputError
        E304 where the configuration makes none.
    """
    try:
        with torch.device("meta"):
            return AutoModel.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the odd configuration led to
        raise make_error(
            "E304", f"no model can be made of the configuration: {first_line(error)}", path=model
        ) from error


def skeleton(
    outlined: Any,
    config: Any,
    *,
    needed: Collection[str],
    dtype: torch.dtype,
    attn_implementation: str | None,
    model: str | Path,
) -> Any:
    """The base model on the CPU in evaluation mode, its needed tensors uninitialised and all others without memory.

    The model's class makes it the way it loads a model: parameters it keeps in another dtype have that, and buffers it
    computes, such as ``inv_freq``, have their values. What is not needed is one value, repeated: NaN, so that nothing
    computed with it passes for a result.

    Parameters
    ----------
    outlined
        What :func:`outline` made of ``config``.
    needed
        Names of tensors of the base model.

    Raises
    ------
    InputError
        E304.
    """
    state = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) if name in needed else _nothing(tensor)
        for name, tensor in tensors_of(outlined).items()
    }
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with no_progress_bars():
            made, info = type(outlined).from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # as above
        raise make_error(
            "E304", f"no model can be made of the configuration: {first_line(error)}", path=model
        ) from error
    left = sorted(map(str, info["missing_keys"] | info["unexpected_keys"]))
    if left:
        raise make_error(
            "E304",
            f"{type(outlined).__name__} does not take {len(left)} tensors by the names it has, the first {left[0]!r}: "
            "no checkpoint is read into it; save the model with save_pretrained",
            path=model,
        )
    return made.eval()


def tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied ones under each name they have."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
