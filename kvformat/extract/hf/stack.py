"""The list of decoder layers in a model."""

from __future__ import annotations

from torch import nn

from kvformat.errors import make_error

__all__ = ["decoder_stack"]


def decoder_stack(decoder: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Name and modules of the list of decoder layers.

    Raises
    ------
    InputError
        E302 where no single list has as many entries as the model has layers.
    """
    found = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and ".0." not in f".{name}."
    ]
    if len(found) != 1:
        raise make_error(
            "E302", f"{type(decoder).__name__} has {len(found)} module lists of {num_layers} layers, expected one"
        )
    return found[0]
