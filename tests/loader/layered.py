"""A batch of layers for the stager's tests."""

from __future__ import annotations

import torch


class Layered:
    """Components ``k`` and ``v``, ``[rows, tokens, width]``, of unlike values.

    Parameters
    ----------
    layers
        Model layers, each with the row that holds it.
    """

    def __init__(
        self, layers: dict[int, int], *, tokens: int = 3, width: int = 4, dtype: torch.dtype = torch.float32
    ) -> None:
        self.rows = layers
        self.layers = tuple(layers)
        shape = (max(layers.values()) + 1, tokens, width)
        generator = torch.Generator().manual_seed(1)
        self.components = {name: torch.randn(shape, generator=generator).to(dtype) for name in ("k", "v")}

    def rows_of(self, layer: int) -> dict[str, int]:
        return dict.fromkeys(self.components, self.rows[layer])

    def role_of(self, name: str) -> str:
        return {"k": "key", "v": "value"}[name]

    def tensor(self, name: str, layer: int) -> torch.Tensor:
        return self.components[name][self.rows[layer]]

    @property
    def layer_nbytes(self) -> int:
        return sum(component[0].nbytes for component in self.components.values())


def several(count: int, **options) -> Layered:
    return Layered({layer: layer for layer in range(count)}, **options)
