"""Memory that the K and V of one forward are gathered in, as they are stored."""

from __future__ import annotations

import torch

from kvformat.errors import make_error
from kvformat.extract.hf.stored_layers import StoredLayers
from kvformat.interfaces import Extracted

__all__ = ["RecordBuffers"]


class RecordBuffers:
    """Buffers of one forward over some documents of one length.

    Parameters
    ----------
    stored
        What of the model is stored; components have the tokens first.
    num_documents, num_tokens
        Of the forward.
    device
        Where the model computes.
    """

    def __init__(
        self,
        stored: StoredLayers,
        *,
        num_documents: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        self._stored = stored
        self._num_documents = num_documents
        self._seen: set[int] = set()
        self._buffers = {
            component.name: torch.empty(
                (num_documents, len(component.layers), num_tokens, *(int(a.size) for a in component.axes[1:])),  # type: ignore[arg-type]
                dtype=stored.dtype,
                device=device,
            )
            for component in stored.schema.components
        }

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store what a layer wrote into the cache: ``[documents, heads, tokens, width]`` each.

        Raises
        ------
        InputError
            E303 for other shapes than the schema says.
        """
        slot = self._stored.slots[layer]
        for name, tensor in ((slot.key, key), (slot.value, value)):
            target = self._buffers[name][:, slot.row]
            rows = tensor.transpose(1, 2)
            if self._stored.forms[layer].latent:
                rows = rows.squeeze(2)
            if rows.shape != target.shape:
                raise make_error(
                    "E303",
                    f"the cache holds {list(rows.shape)} for {name!r}, expected {list(target.shape)}",
                    layer=layer,
                )
            target.copy_(rows)  # casts to the storage dtype
        self._seen.add(layer)

    def records(self) -> list[Extracted]:
        """The components of each document, as views of the buffers.

        Raises
        ------
        InputError
            E303 where a layer is missing.
        """
        missing = self._stored.slots.keys() - self._seen
        if missing:
            raise make_error("E303", f"layers {sorted(missing)} wrote no K/V into the cache", layer=min(missing))
        return [
            Extracted(components={name: buffer[index] for name, buffer in self._buffers.items()}, extras={})
            for index in range(self._num_documents)
        ]
