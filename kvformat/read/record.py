"""One record: views of its tensors, verified as they are touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvformat.errors import make_error
from kvformat.read.copyable import CopyableRecord
from kvformat.read.dequantise import dequantised_component, dequantised_slab
from kvformat.spec import digests
from kvformat.spec.layout import Placed
from kvformat.tensors import flat_bytes, from_buffer

if TYPE_CHECKING:
    import torch

    from kvformat.read.dataset import Dataset

__all__ = ["Record"]


class Record(CopyableRecord):
    """One record of a dataset; cheap to make, and valid as long as it is referred to.

    Views of one shard share its mapping: treat them as read-only. The file is never written to.

    Attributes
    ----------
    index
        Number of the record in the dataset.
    """

    __slots__ = ()

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the document."""
        return self._placement.dims[0]

    @property
    def dims(self) -> dict[str, int]:
        """The sizes that vary from record to record, ``tokens`` first."""
        return dict(zip(self._dataset.schema.dims, self._placement.dims, strict=True))

    @property
    def names(self) -> list[str]:
        """Names, in the order they were given."""
        return self._dataset.index.names_of(self.index)

    @property
    def document(self) -> bytes:
        """Document digest, 32 bytes."""
        return self._dataset.index.document(self.index)

    @property
    def fingerprint(self) -> bytes | None:
        """Identity of the stored values, 32 bytes; None where the context is unknown."""
        return digests.fingerprint(self._dataset.context, self._dataset.schema, self.document)

    @property
    def nbytes(self) -> int:
        """Bytes of the record in its shard, padding included."""
        return self._placement.nbytes

    def __repr__(self) -> str:
        return f"<kvformat.Record {self.index} of {self._dataset.location} ({self.num_tokens} tokens)>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._dataset, self.index)

    # -- tensors -------------------------------------------------------------------------------------------------

    def component(self, name: str, *, copy: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        """A component, ``[layers, *axes]``; K and V usually are ``[layers, tokens, heads, head_dim]``.

        Parameters
        ----------
        name
            Component of the schema.
        copy
            Return a tensor of its own. Without it the tensor is a view of the mapped shard: do not write to it.
        out
            Contiguous CPU tensor of the same shape and dtype to copy into; it is returned.

        Returns
        -------
        torch.Tensor
            On the CPU, of the component's dtype. Where files are read instead of mapped, it is a tensor of its own.

        Raises
        ------
        LookupFailedError
            E082 where the schema has no such component.
        DamageError
            E070 to E072, E074 where the bytes are not those that were written.
        """
        placed = self._placement.tensors.get(name)
        if placed is None or not 0 <= placed.bit < self._dataset.num_components:
            raise make_error(
                "E082",
                f"no component {name!r}; the schema has {', '.join(c.name for c in self._dataset.schema.components)}",
            )
        return self._tensor(placed, copy, out)

    def extra(self, name: str, *, copy: bool = False) -> torch.Tensor:
        """An extra such as ``token_ids`` (int32 ``[tokens]``); a view unless ``copy``.

        Raises
        ------
        LookupFailedError
            E082 where the schema has no such extra.
        DamageError
            E070, E073.
        """
        placed = self._placement.tensors.get(name)
        if placed is None or placed.bit < self._dataset.num_components:
            raise make_error(
                "E082", f"no extra {name!r}; the schema has {', '.join(e.name for e in self._dataset.schema.extras)}"
            )
        return self._tensor(placed, copy, None)

    def slab(self, role: str, *, layer: int, copy: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        """One layer's tensor by role and model layer: for K and V ``[tokens, heads, head_dim]``.

        A layer that shares another's K/V gives the other's. Only the bytes of this slab and the small table of sums
        are read and verified. Parameters and errors otherwise as for :meth:`component`.
        """
        dataset = self._dataset
        name, row = dataset.slab_of(role, layer)
        placed = self._placement.tensors[name]
        shape = placed.shape[1:]
        if out is not None:
            self.copy_slab(self._target(out, placed, shape), name, row)
            return out
        if self._shard.fetches:
            self._need([(name, [(row, 1)])])
        fresh = dataset.level == 2 or not self._shard.checks.flags[self._slot] >> placed.bit & 1
        if self._shard.memory is None:
            data = self._read(placed, row, 1, fresh=fresh)
            if fresh:
                self.slabs_done(placed, row, 1)
            return from_buffer(data, placed.dtype).reshape(shape)
        if fresh:
            self._touch_slab(placed, row)
        start = self._offset + placed.offset + row * placed.slab_nbytes
        view = self._shard.view(placed.dtype).as_strided(shape, placed.strides[1:], start // placed.item)
        return view.clone() if copy else view

    def dequantised(self, name: str, *, dtype: Any = "F32") -> torch.Tensor:
        """A component as floats: float32(stored) x scale where it is stored in 8 bits.

        Parameters
        ----------
        name
            Component of the schema.
        dtype
            BF16, F16 or F32, as a torch dtype, or by its torch or safetensors name. Values are rounded to it once.

        Returns
        -------
        torch.Tensor
            ``[layers, *axes]`` on the CPU, a tensor of its own; of components that are not quantised a cast.

        Raises
        ------
        KVFormatError
            As :meth:`component`; E081 for another dtype.
        """
        return dequantised_component(self, self._dataset.schema, name, dtype)

    def dequantised_slab(self, role: str, *, layer: int, dtype: Any = "F32") -> torch.Tensor:
        """One layer as floats, as :meth:`dequantised` gives it: for K and V ``[tokens, heads, head_dim]``.

        Only the bytes of this slab, of its scales and the small table of sums are read and verified. Parameters and
        errors otherwise as for :meth:`slab`.
        """
        place = self._dataset.slab_of(role, layer)
        return dequantised_slab(self, self._dataset.schema, role, layer=layer, place=place, dtype=dtype)

    def tensors_in(self, buffer: memoryview) -> dict[str, torch.Tensor]:
        """Components as views of a buffer that begins with the record's body; see ``Dataset.tensors_in``."""
        placement = self._placement
        if len(buffer) < placement.body_nbytes:
            raise make_error(
                "E081", f"the buffer has {len(buffer)} bytes, the record {placement.body_nbytes}", record=self.index
            )
        found = {}
        for component in self._dataset.schema.components:
            placed = placement.tensors[component.name]
            at = placed.offset - placement.body
            found[component.name] = from_buffer(buffer[at : at + placed.nbytes], placed.dtype).reshape(placed.shape)
        return found

    # -- views ---------------------------------------------------------------------------------------------------

    def _tensor(self, placed: Placed, copy: bool, out: torch.Tensor | None) -> torch.Tensor:  # noqa: FBT001 -- hot path
        if self._shard.fetches:
            self._need([(placed.name, [(0, self._dataset.slabs[placed.name])])])
        flags = self._shard.checks.flags
        fresh = self._dataset.level == 2 or not flags[self._slot] >> placed.bit & 1
        if out is not None:
            self.copy_tensor(self._target(out, placed, placed.shape), placed)
            return out
        if self._shard.memory is None:
            data = self._read(placed, 0, self._dataset.slabs[placed.name], fresh=fresh)
            if fresh:
                flags[self._slot] |= 1 << placed.bit
            return from_buffer(data, placed.dtype).reshape(placed.shape)
        if fresh:
            self._touch(placed)
        start = (self._offset + placed.offset) // placed.item
        view = self._shard.view(placed.dtype).as_strided(placed.shape, placed.strides, start)
        return view.clone() if copy else view

    def _target(self, out: torch.Tensor, placed: Placed, shape: tuple[int, ...]) -> memoryview:
        found = flat_bytes(out, placed.dtype)
        if tuple(out.shape) != shape:
            raise make_error("E081", f"out has shape {list(out.shape)}, expected {list(shape)}", record=self.index)
        return found.data


def _reopen(dataset: Dataset, index: int) -> Record:
    return dataset[index]
