"""Low-rank adapters (LoRA, Hu et al. 2021) as stored: read from a directory, each module found in a decoder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvformat.errors import make_error
from kvformat.extract.weights import weights_digest, weights_file
from kvformat.spec.context import ComputeDtype

__all__ = ["LowRank", "read_adapter"]

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Members of a configuration that are read here, or that change no value once the tensors are there. Any other member
# may stand only where it is switched off.
_READ = frozenset({"bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "use_rslora"})
_NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
_OFF: tuple[object, ...] = (None, False, "none", {}, [])
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # others begin by changing the base weights
_MERGE_IT = "merge it into its base model with peft (merge_and_unload), and save that"


class LowRank(NamedTuple):
    """A stored adapter.

    Attributes
    ----------
    pairs
        A ``[rank, in]`` and B ``[out, rank]`` by module name inside the decoder: what they add is ``B @ A``, scaled.
    rank, alpha, rslora
        The scale is ``alpha / rank``, or ``alpha / sqrt(rank)`` with ``rslora``.
    """

    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    rank: int
    alpha: float
    rslora: bool

    def digest(self, dtype: ComputeDtype) -> str:
        """SHA-256 (hex) over all of its tensors by ``kvf-tensors-1``."""
        tensors = {
            f"{path}.{name}.weight": tensor
            for path, pair in self.pairs.items()
            for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        }
        return weights_digest(weights_file(tensors, compute_dtype=dtype)).sha256


def read_adapter(directory: str | Path, decoder: nn.Module, *, stack: str) -> LowRank:
    """Read an adapter and find each of its modules in a decoder.

    Parameters
    ----------
    directory
        As ``PeftModel.save_pretrained`` writes it, whatever part of the model it was trained around.
    stack
        Name of the list of decoder layers.

    Raises
    ------
    InputError
        E310 where files are missing or damaged, for another kind than plain LoRA with one rank and scale, for tensors
        of modules the decoder does not have, and for shapes of another base model.
    """
    rank, alpha, rslora = _read_config(Path(directory))
    path = Path(directory) / _TENSORS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise make_error(
            "E310", f"no adapter tensors load from there: {error}; save the adapter as safetensors", path=path
        ) from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        owner, factor = _place(name, decoder, stack)
        if owner is None:
            raise make_error(
                "E310",
                f"tensor {name!r} belongs to no linear module of {type(decoder).__name__}: the adapter is of another "
                f"model, or reaches beyond its decoder layers; adapt those alone, or {_MERGE_IT}",
                path=path,
            )
        if factor in found.setdefault(owner, {}):
            raise make_error("E310", f"two tensors are {factor} of {owner!r}, one of them {name!r}", path=path)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise make_error("E310", f"tensor {name!r} does not hold finite real numbers", path=path)
        found[owner][factor] = tensor
    if not found:
        raise make_error("E310", "the adapter has no tensors", path=path)
    for owner, factors in found.items():
        rows, columns = _sizes(decoder.get_submodule(owner))
        shapes = {factor: list(tensor.shape) for factor, tensor in factors.items()}
        expected = {"lora_A": [rank, columns], "lora_B": [rows, rank]}
        if shapes != expected:
            raise make_error(
                "E310",
                f"the adapter has {shapes} for {owner!r}, this model with rank {rank} needs {expected}: it is the "
                "adapter of another model",
                path=path,
            )
    pairs = {owner: (factors["lora_A"], factors["lora_B"]) for owner, factors in found.items()}
    return LowRank(pairs=pairs, rank=rank, alpha=alpha, rslora=rslora)


def _read_config(directory: Path) -> tuple[int, float, bool]:
    """Rank, alpha and whether the scale goes by the root of the rank; E310 for what plain LoRA does not have."""
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise make_error(
            "E310", f"no adapter configuration loads: {error}; give an adapter's directory", path=path
        ) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise make_error("E310", f"expected an adapter of type 'LORA', found {kind!r}; {_MERGE_IT}", path=path)
    odd = {name: value for name, value in config.items() if name not in _READ | _NEUTRAL and value not in _OFF}
    if config.get("bias", "none") != "none":
        odd["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        odd["init_lora_weights"] = config["init_lora_weights"]
    if odd:
        shown = ", ".join(f"{name} = {value!r:.60}" for name, value in sorted(odd.items()))
        raise make_error("E310", f"not plain LoRA of one rank and scale: {shown}; {_MERGE_IT}", path=path)
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise make_error(
            "E310", f"expected numbers `r` from 1 and `lora_alpha`, found {rank!r} and {alpha!r}", path=path
        )
    return rank, float(alpha), bool(config.get("use_rslora", False))


def _place(name: str, decoder: nn.Module, stack: str) -> tuple[str | None, str]:
    """Module inside the decoder that a stored tensor belongs to, and which factor it is."""
    head, mark, rest = f".{name}".partition(f".{stack}.")
    # What an adapter was trained around puts words of its own before the layers; other towers have layers too.
    words = {"", "base_model", "language_model", "model", getattr(decoder, "base_model_prefix", "")}
    path, _, factor = f"{stack}.{rest}".removesuffix(".weight").rpartition(".")
    is_factor = factor in ("lora_A", "lora_B") and name.endswith(".weight")
    if not mark or not is_factor or not set(head.split(".")) <= words:
        return None, factor
    try:
        module = decoder.get_submodule(path)
    except AttributeError:
        return None, factor
    return (path if isinstance(module, (nn.Linear, Conv1D)) else None), factor


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Output and input width of a linear module."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "linear modules have a weight"
    first, second = weight.shape
    return (int(second), int(first)) if isinstance(module, Conv1D) else (int(first), int(second))
