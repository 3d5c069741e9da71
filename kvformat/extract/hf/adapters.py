"""A low-rank adapter in a decoder: merged into its weights, or applied beside them and named in the context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.extras import needing
from kvformat.extract.hf.adapter_files import read_adapter
from kvformat.extract.hf.options import AdapterMode
from kvformat.extract.weights import weights_digest, weights_file
from kvformat.spec.context import Adapter, ComputeDtype, real
from kvformat.tensors import torch_dtype

__all__ = ["Adapted", "Applied", "applied_adapter", "attach_adapter", "load_peft"]

_NAME = "default"


class Applied(NamedTuple):
    """Name of an adapter in its layers, and the factor of its product."""

    name: str
    scale: float


class Adapted(NamedTuple):
    """What an adapter did to a decoder.

    Attributes
    ----------
    paths
        Modules it changes, by name inside the decoder; of an applied one, all modules that are adapter layers.
    applied
        None where it is merged, and no such layers are left.
    """

    paths: frozenset[str]
    applied: Applied | None

    def split(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Tensors of the base, under the names they have without adapter, and tensors of the adapter.

        Parameters
        ----------
        state
            The tensors that determine what is stored.

        Raises
        ------
        InputError
            E310 where the adapter has no part in them.
        """
        base: dict[str, torch.Tensor] = {}
        low_rank: dict[str, torch.Tensor] = {}
        changed = False
        for name, tensor in state.items():
            path = next((path for path in _owners(name) if path in self.paths), None)
            if path is None or self.applied is None:
                base[name] = tensor
                changed |= path is not None
                continue
            inner = name[len(path) + 1 :]
            if inner.startswith("base_layer."):
                base[f"{path}.{inner.removeprefix('base_layer.')}"] = tensor
            elif inner in (f"lora_A.{self.applied.name}.weight", f"lora_B.{self.applied.name}.weight"):
                low_rank[f"{path}.{inner.partition('.')[0]}.weight"] = tensor
        if not low_rank and not changed:
            raise _reaches_nothing(len(self.paths))
        return base, low_rank

    def named(self, low_rank: Mapping[str, torch.Tensor], *, compute_dtype: ComputeDtype) -> tuple[Adapter, ...]:
        """What a context says of an applied adapter with these tensors; nothing of a merged one."""
        if self.applied is None:
            return ()
        digest = weights_digest(weights_file(low_rank, compute_dtype=compute_dtype))
        return (Adapter(scale=real(self.applied.scale), scheme=digest.scheme, sha256=digest.sha256),)


def attach_adapter(
    decoder: Any, directory: str | Path, *, mode: AdapterMode, stack: str, last: int, compute_dtype: ComputeDtype
) -> tuple[Any, Adapted, dict[str, str]]:
    """Merge or apply the adapter of a directory.

    Parameters
    ----------
    decoder
        Changed in place.
    directory
        As :func:`~kvformat.extract.hf.adapter_files.read_adapter` takes it.
    mode
        ``merge``: added to the weights by peft from float32, as its ``merge_and_unload`` does by default. ``apply``:
        computed beside them, in the compute dtype.
    stack
        Name of the list of decoder layers.
    last
        Last layer that is going to run; those above it are left as they are.

    Returns
    -------
    tuple
        The decoder, what was done, and what provenance records of it.

    Raises
    ------
    InputError
        E310 for what is no plain LoRA adapter of this decoder, or reaches no layer that runs.
    DependencyError
        E205 without peft.
    """
    peft = load_peft()
    stored = read_adapter(directory, decoder, stack=stack)
    dtype: ComputeDtype = "F32" if mode == "merge" else compute_dtype
    pairs = {path: pair for path, pair in stored.pairs.items() if _layer(path, stack) <= last}
    if not pairs:
        raise _reaches_nothing(len(stored.pairs))
    config = peft.LoraConfig(
        r=stored.rank,
        lora_alpha=stored.alpha,
        use_rslora=stored.rslora,
        target_modules=list(pairs),
        fan_in_fan_out=all(isinstance(decoder.get_submodule(path), Conv1D) for path in pairs),
        inference_mode=True,
    )
    # Layers are made without storage, so no random numbers are drawn for tensors that are about to be replaced.
    tuner = peft.LoraModel(decoder, config, _NAME, low_cpu_mem_usage=True)
    made = {name for name, module in decoder.named_modules() if _is_adapter_layer(module)}
    assert made == pairs.keys(), "peft made adapter layers of other modules than it was told"
    for path, pair in pairs.items():
        layer = decoder.get_submodule(path)
        for factor, tensor in zip((layer.lora_A, layer.lora_B), pair, strict=True):
            factor[_NAME].weight = nn.Parameter(tensor.to(torch_dtype(dtype)), requires_grad=False)
    found = {
        "adapter": Path(directory).resolve().name,
        "adapter_mode": mode,
        "adapter_sha256": stored.digest(dtype),
        "peft": version("peft"),
    }
    if mode == "merge":
        decoder = tuner.merge_and_unload(progressbar=False)
        return decoder.eval(), Adapted(frozenset(pairs), None), found
    decoder.eval()
    return decoder, applied_adapter(decoder, compute_dtype=compute_dtype), found


def applied_adapter(decoder: nn.Module, *, compute_dtype: ComputeDtype) -> Adapted:
    """The adapter whose layers are in a decoder.

    Raises
    ------
    InputError
        E310 for anything but one active, plain LoRA adapter of one scale, in the compute dtype.
    DependencyError
        E205 without peft.
    """
    plain = load_peft().tuners.lora.Linear
    layers = {name: module for name, module in decoder.named_modules() if _is_adapter_layer(module)}
    if not layers:
        raise make_error("E310", "the model has no adapter layers that could be applied; leave adapter_mode out")
    active: set[str] = set()
    scales: set[float] = set()
    for path, layer in layers.items():
        if type(layer) is not plain:
            raise make_error("E310", f"{path!r} is a {type(layer).__name__}: only LoRA of linear modules is applied")
        if layer.merged or layer.disable_adapters:
            state = "merged" if layer.merged else "switched off"
            raise make_error("E310", f"the adapter of {path!r} is {state}; take it out (merge_and_unload, unload)")
        for name in (name for name in layer.active_adapters if name in layer.lora_A):
            _check_plain(path, layer, name, compute_dtype)
            active.add(name)
            scales.add(float(layer.scaling[name]))
    if len(active) != 1 or len(scales) != 1:
        raise make_error(
            "E310",
            f"found {len(active)} active adapters and {len(scales)} scales, a context names one of each; merge them "
            "instead",
        )
    return Adapted(frozenset(layers), Applied(active.pop(), scales.pop()))


def load_peft() -> Any:
    """The package that adapter layers come from; E205 where it is not installed."""
    with needing("adapters need"):
        return import_module("peft")


def _check_plain(path: str, layer: Any, name: str, compute_dtype: ComputeDtype) -> None:
    if name in layer.lora_variant or layer.lora_bias[name]:
        raise make_error("E310", f"{path!r} is no plain LoRA layer (DoRA, a bias, ...); merge it instead")
    dtypes = {layer.lora_A[name].weight.dtype, layer.lora_B[name].weight.dtype}
    if dtypes != {torch_dtype(compute_dtype)}:
        raise make_error(
            "E310",
            f"the adapter of {path!r} is {', '.join(sorted(map(str, dtypes)))}, the model computes in "
            f"{compute_dtype}: cast the adapter to that, then its digest covers what is computed with",
        )


def _is_adapter_layer(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft" or hasattr(module, "lora_A")


def _reaches_nothing(num_modules: int) -> KVFormatError:
    return make_error(
        "E310",
        f"the adapter changes {num_modules} modules, of which none reaches what is to be stored; extract without it, "
        "or store higher layers",
    )


def _layer(path: str, stack: str) -> int:
    return int(path.removeprefix(f"{stack}.").partition(".")[0])


def _owners(name: str) -> Iterator[str]:
    """Names of the modules a tensor lies in, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
