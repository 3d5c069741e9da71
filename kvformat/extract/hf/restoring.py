"""A model whose configuration comes from one place and whose weights come from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kvformat.extract.checkpoint.dtypes import name_of
from kvformat.extract.checkpoint.filling import open_checkpoint
from kvformat.extract.checkpoint.matching import ModelNames, TensorForm
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.options import wanted_layers
from kvformat.extract.hf.skeleton import outline, skeleton, tensors_of
from kvformat.extract.hf.stack import decoder_stack

__all__ = ["Restored", "restore"]


class Restored(NamedTuple):
    """A module with the weights of a checkpoint.

    Attributes
    ----------
    module
        Decoder, or the whole base model where that was asked for; on the CPU, in evaluation mode.
    provenance
        What is recorded of the checkpoint: its name without the directories it lies in, and what was taken of it.
    nbytes
        Bytes read of its files.
    """

    module: Any
    provenance: Mapping[str, str]
    nbytes: int


def restore(
    config: Any,
    checkpoint: CheckpointSource,
    *,
    dtype: torch.dtype,
    model: str | Path,
    attn_implementation: str | None = None,
    layers: Sequence[int] | None = None,
    whole: bool = False,
) -> Restored:
    """Make a model of its configuration, and read the tensors it needs out of a checkpoint.

    Parameters
    ----------
    config
        Configuration of the whole model.
    dtype
        Compute dtype. Stored values are rounded to it once, as loading a model in that dtype does.
    model
        Where the configuration is from, for messages.
    layers
        Wanted model layers. What lies above the highest is neither read nor given memory: it is NaN.
    whole
        Read everything of the base model, such as a vision tower, and not its decoder alone.

    Raises
    ------
    InputError
        E302, E304 for the configuration, E308 for the checkpoint.
    StorageError
        E203, E207.
    UsageError
        E081 for layers the model has not.
    """
    outlined = outline(config, dtype=dtype, model=model)
    decoder = outlined.get_decoder()
    head = next(f"{name}." if name else "" for name, module in outlined.named_modules() if module is decoder)
    num_layers = int(decoder.config.num_hidden_layers)
    stack = decoder_stack(decoder, num_layers)[0]
    last = wanted_layers(layers, num_layers)[-1]
    base = str(getattr(outlined, "base_model_prefix", ""))
    names = _names(
        outlined if whole else decoder,
        prefixes=["", *([head] if head and not whole else [])],
        base=f"{base}." if base else "",
        stack=f"{head}{stack}" if whole else stack,
        last=last,
    )
    with open_checkpoint(checkpoint, names) as filling:
        made = skeleton(
            outlined,
            config,
            needed={name if whole else f"{head}{name}" for name in names.needed},
            dtype=dtype,
            attn_implementation=attn_implementation,
            model=model,
        )
        module = made if whole else made.get_decoder()
        nbytes = filling.into(tensors_of(module))
        return Restored(module, filling.provenance, nbytes)


def _names(module: nn.Module, *, prefixes: Sequence[str], base: str, stack: str, last: int) -> ModelNames:
    """The tensors of a module, of which those of layers above ``last``, and second names of one, are not needed."""
    forms, needed, seen = {}, set(), set()
    for name, tensor in tensors_of(module).items():
        forms[name] = TensorForm(name_of(tensor.dtype), tuple(tensor.shape))
        number = name.removeprefix(f"{stack}.").partition(".")[0] if name.startswith(f"{stack}.") else ""
        if id(tensor) not in seen and not (number.isdigit() and int(number) > last):
            needed.add(name)
        seen.add(id(tensor))
    both = [*prefixes, *(f"{base}{prefix}" for prefix in prefixes)]
    return ModelNames(forms=forms, needed=needed, prefixes=tuple(dict.fromkeys(both)), stack=stack)
