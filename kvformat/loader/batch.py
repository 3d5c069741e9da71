"""A batch: tensors of several records, or the references from which they are packed when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvformat.errors import KVFormatError, make_error
from kvformat.loader.cursor import Cursor
from kvformat.loader.layouts import HF, BatchLayout, Packed, PaddedLayout
from kvformat.loader.pack import Content, pack
from kvformat.loader.source import Origin, Source, find_source

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

    from kvformat.loader.plan import Plan
    from kvformat.read.copyable import Proof

__all__ = ["Batch"]

_MOST_TOKENS = (1 << 31) - 1
"""Attention over variable lengths takes their sums as int32."""


class Batch:
    """K and V, and what belongs to them, of several records in one layout.

    Between processes a batch travels as references of a few hundred bytes, with what was verified of each record and
    the identity of its file. The process that receives it packs it from its own mapping, when its first tensor is
    asked for, or in the thread that pins memory. So damaged records are an error at the first access at the latest.

    A batch owns its memory until its last tensor, or any view or array of one, is dropped; then the memory is used
    again. A tensor that is still referred to is never overwritten.

    Attributes
    ----------
    records
        Numbers of the records, in order; of several datasets numbered through.
    layout
        The layout.
    cursor
        Where training stands after this batch; None where the sampler gives none.
    padding
        Whether it is a copy that fills the last step of an epoch, so that no rank waits: leave it out of the loss.
    """

    def __init__(
        self,
        source: Source | Origin,
        records: Sequence[int],
        layout: BatchLayout,
        *,
        cursor: Cursor | None = None,
        slots: Sequence[int] | None = None,
        padding: bool = False,
        proofs: Sequence[Proof] | None = None,
        error: KVFormatError | None = None,
    ) -> None:
        self._origin = source
        self.records = list(records)
        self.layout = layout
        self.cursor = cursor
        self.padding = padding
        self._slots = None if slots is None else list(slots)
        self._proofs = proofs
        self._error = error
        self._content: Content | None = None
        self._names: list[str] | None = None

    @property
    def _source(self) -> Source:
        # Opened when it is needed: a batch is unpickled where an error would end a DataLoader without its class.
        if not isinstance(self._origin, Source):
            self._origin = find_source(self._origin)
        return self._origin

    # -- how it is made --------------------------------------------------------------------------------------------

    def pack(self, *, pin_memory: bool = False) -> Batch:
        """Copy the records into memory now; returns the batch itself. Once is enough, more is harmless.

        Raises
        ------
        DamageError
            E053, E054, E070 to E074 where the bytes of a record are not those that were written.
        """
        if self._error is not None:
            raise self._error
        if self._content is None:
            if self._proofs is not None:
                for number, proof in zip(self.records, self._proofs, strict=True):
                    self._source.record(number).accept(proof)
            self._content = pack(self._plan, self._source, self.records, self._source.pool(pin_memory=pin_memory))
        return self

    def pin_memory(self, device: object = None) -> Batch:  # noqa: ARG002 -- DataLoader gives it, torch needs it no more
        """What ``DataLoader(pin_memory=True)`` calls in a thread of its own: packs into page-locked memory."""
        if self._error is None:
            try:
                self.pack(pin_memory=True)
            except KVFormatError as error:  # on its way out of that thread its class would be lost
                self._error = error
        return self

    def prove(self) -> Batch:
        """Verify the records and have their bytes in memory, but copy nothing: what a worker process does.

        An error is kept, and raised where the batch is used: between processes its class would be lost.
        """
        if self._content is None and self._error is None:
            wanted = self._plan.wanted
            try:
                self._proofs = [self._source.record(number).prove(wanted) for number in self.records]
            except KVFormatError as error:
                self._error = error
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._origin
        state = (
            origin.origin if isinstance(origin, Source) else origin,
            self.records,
            self.layout,
            self.cursor,
            self._slots,
            self.padding,
            self._proofs,
            self._error,
        )
        return _rebuild, state

    @property
    def _plan(self) -> Plan:
        return self._source.plan(self.layout)

    @property
    def _packed(self) -> Content:
        self.pack()
        assert self._content is not None
        return self._content

    # -- what it is --------------------------------------------------------------------------------------------------

    __iter__ = None
    """Records have no axis of their own in every layout. Without this, ``list(batch)`` would be empty."""

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"<kvformat.loader.Batch of {len(self)} records, {type(self.layout).__name__.lower()}>"

    @property
    def collection_id(self) -> str:
        """Dataset id of what it is from; of several datasets their common id."""
        return self._source.collection.id

    @property
    def names(self) -> list[str]:
        """The name each record was drawn by, or its first one."""
        if self._names is None:
            collection = self._source.collection
            if self._slots is not None:
                self._names = [collection.name(slot) for slot in self._slots]
            else:
                self._names = [self._source.record(number).names[0] for number in self.records]
        return self._names

    @property
    def documents(self) -> list[bytes]:
        """Document digest of each record, 32 bytes."""
        return [self._source.record(number).document for number in self.records]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the dataset in it, padding included."""
        return self._packed.nbytes

    @property
    def nbytes_copied(self) -> int:
        """Bytes that were copied to make them."""
        return self._packed.copied

    # -- keys and values ---------------------------------------------------------------------------------------------

    @property
    def components(self) -> dict[str, torch.Tensor]:
        """Components by name, on the CPU. Axis 0 is the layer: see :meth:`rows_of`.

        Packed ``[layers, sum of tokens, heads, head_dim]``; padded ``[layers, records, longest, heads, head_dim]``;
        hf ``[layers, records, heads, longest, head_dim]``. A component of a fixed size is
        ``[layers, records, ...]`` in each. Where a component holds the last tokens only, its own lengths count: see
        :meth:`cu_seqlens_of`.
        """
        return self._packed.components

    def __getitem__(self, name: str) -> torch.Tensor:
        """A component, or an extra, by name; E082 where the batch has none of that name."""
        content = self._packed
        found = content.components.get(name)
        if found is None:
            found = content.extras.get(name)
        if found is None:
            raise make_error("E082", f"no {name!r}; the batch has {', '.join([*content.components, *content.extras])}")
        return found

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layers in the batch, ascending; with those that share another's keys and values."""
        return tuple(self._plan.rows_of)

    def rows_of(self, layer: int) -> dict[str, int]:
        """By component, the row of axis 0 that holds a model layer; E082 where none does."""
        found = self._plan.rows_of.get(layer)
        if found is None:
            raise make_error("E082", f"no layer {layer!r}; the batch has {list(self.layers)}")
        return found

    def role_of(self, name: str) -> str:
        """Role of a component, for example ``"key"``."""
        for part in self._plan.parts:
            if part.name == name:
                return part.role
        raise make_error("E082", f"no component {name!r} in the batch")

    def slab(self, role: str, *, layer: int) -> torch.Tensor:
        """One layer by role, a view: packed ``[sum of tokens, heads, head_dim]``, and so on.

        Raises
        ------
        LookupFailedError
            E082 where the batch does not hold it.
        """
        for name, row in self.rows_of(layer).items():
            if self.role_of(name) == role:
                return self.components[name][row]
        roles = sorted({self.role_of(name) for name in self.rows_of(layer)})
        raise make_error("E082", f"no role {role!r} in this layer; it has {', '.join(roles)}", layer=layer)

    # -- lengths and positions ---------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each record."""
        if self._content is not None:
            return self._content.tokens
        return [self._source.record(number).num_tokens for number in self.records]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Where each record begins in a packed batch, and their sum: int32 ``[records + 1]``."""
        return _cumulated(self.num_tokens)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest record."""
        return max(self.num_tokens)

    def lengths_of(self, name: str) -> list[int]:
        """Entries a component has in each record: its tokens, or fewer where it holds the last ones only."""
        found = self._packed.lengths.get(name)
        if found is None:
            raise make_error("E082", f"no {name!r} in the batch")
        return found

    def cu_seqlens_of(self, name: str) -> torch.Tensor:
        """As :attr:`cu_seqlens`, for a component that does not hold all tokens."""
        return _cumulated(self.lengths_of(name))

    @property
    def mask(self) -> torch.Tensor:
        """Padded and hf: bool ``[records, longest]``, true where there is a token."""
        if not isinstance(self.layout, PaddedLayout):
            raise make_error("E088", "a packed batch has no padding, so no mask: use cu_seqlens")
        import torch

        lengths = torch.tensor(self.num_tokens)[:, None]
        longest = self.layout.padded(self.max_seqlen)
        at = torch.arange(longest)[None]
        return at < lengths if self.layout.side == "right" else at >= longest - lengths

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids, int32: packed ``[sum of tokens]``, else ``[records, longest]`` with zeros as padding."""
        return self["token_ids"]

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions, int32, in the form of :attr:`token_ids`; with 3 rows in front where the layout says so.

        Those stored with the documents, or 0 to the number of tokens less one: a dataset that stores token ids stores
        positions too where documents have others.

        Raises
        ------
        LookupFailedError
            E082 where the dataset stores neither, so that nobody knows.
        """
        stored = self._packed.extras.get("position_ids")
        if stored is not None:
            return stored
        self._refuse_unknown_positions()
        counted = self._counted()
        rows = self.layout.position_rows
        return counted if rows == 1 else counted.expand(rows, *counted.shape)

    @property
    def max_position(self) -> int:
        """Greatest position of the batch; errors as :attr:`position_ids`."""
        stored = self._packed.extras.get("position_ids")
        if stored is None:
            self._refuse_unknown_positions()
            return self.max_seqlen - 1
        return int((stored if isinstance(self.layout, Packed) else stored[..., self.mask]).max())

    @property
    def extras(self) -> Mapping[str, torch.Tensor]:
        """Extras by name, ``token_ids`` and ``position_ids`` included where the dataset stores them."""
        return self._packed.extras

    def _refuse_unknown_positions(self) -> None:
        if not any(extra.name == "token_ids" for extra in self._plan.schema.extras):
            raise make_error("E082", "the dataset stores neither position_ids nor token_ids: positions are unknown")

    def _counted(self) -> torch.Tensor:
        import torch

        lengths = np.array(self.num_tokens, np.int64)
        if isinstance(self.layout, PaddedLayout):
            mask = self.mask
            return ((mask.cumsum(1) - 1) * mask).to(torch.int32)
        first = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        return torch.from_numpy((np.arange(lengths.sum()) - np.repeat(first, lengths)).astype(np.int32))

    # -- Hugging Face -----------------------------------------------------------------------------------------------

    def past_key_values(self) -> DynamicCache:
        """A fresh ``transformers.DynamicCache`` over the batch's memory; layout hf.

        Give the model ``attention_mask`` over the cache and the new tokens (:attr:`mask`, then ones), and
        ``position_ids`` of the new tokens, which go on at :attr:`num_tokens` of each record. What the model appends
        goes to new memory.

        Raises
        ------
        KVFormatError
            E088 for another layout; E205 where transformers is not installed.
        """
        if not isinstance(self.layout, HF):
            raise make_error("E088", "a cache is made of batches of layout hf")
        from kvformat.loader.hf import cache_of

        keys, values = ({self.role_of(name): name for name in self.components}[role] for role in ("key", "value"))
        return cache_of(self.components[keys], self.components[values])


def _cumulated(lengths: Sequence[int]) -> torch.Tensor:
    import torch

    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if ends[-1] > _MOST_TOKENS:
        raise make_error("E088", f"{ends[-1]:,} tokens in one batch are more than int32 holds: make batches smaller")
    return torch.from_numpy(ends.astype(np.int32))


def _rebuild(  # noqa: PLR0917 -- the state of a pickle
    origin: Origin,
    records: list[int],
    layout: BatchLayout,
    cursor: Cursor | None,
    slots: list[int] | None,
    padding: bool,  # noqa: FBT001 -- as above
    proofs: list[Proof] | None,
    error: KVFormatError | None,
) -> Batch:
    return Batch(
        origin,
        records,
        layout,
        cursor=cursor,
        slots=slots,
        padding=padding,
        proofs=proofs,
        error=error,
    )
