"""What the stager hands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kvformat.errors import make_error

__all__ = ["StagedLayer"]


class StagedLayer(Mapping[str, torch.Tensor]):
    """Tensors of one model layer by component name, ``[...]`` as the batch's layout has them after its layer axis.

    Attributes
    ----------
    layer
        Model layer.
    """

    __slots__ = ("_roles", "_tensors", "layer")

    def __init__(self, layer: int, tensors: Mapping[str, torch.Tensor], roles: Mapping[str, str]) -> None:
        self.layer = layer
        self._tensors = tensors
        self._roles = roles

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise make_error("E082", f"no component {name!r} here; there are {sorted(self)}", layer=self.layer)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.items())
        return f"<layer {self.layer}: {shapes}>"

    @property
    def key(self) -> torch.Tensor:
        """Keys; E082 where the layer has none."""
        return self.of_role("key")

    @property
    def value(self) -> torch.Tensor:
        """Values; E082 where the layer has none."""
        return self.of_role("value")

    def of_role(self, role: str) -> torch.Tensor:
        """Tensor of a role, say ``latent``: a layer has at most one, ``other`` excepted, whose first one this is.

        Raises
        ------
        LookupFailedError
            E082 where the layer has no such tensor.
        """
        for name, tensor in self._tensors.items():
            if self._roles.get(name) == role:
                return tensor
        known = sorted({self._roles[name] for name in self if name in self._roles})
        raise make_error("E082", f"no role {role!r} here; there are {known}", layer=self.layer)
