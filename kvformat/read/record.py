"""One record: views of its tensors, verified as they are touched."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvformat.errors import KVFormatError, make_error
from kvformat.read.shards import ROW_CHECKED, SUMS_CHECKED, OpenShard
from kvformat.spec import digests, limits
from kvformat.spec.layout import Placed, Placement
from kvformat.spec.values import all_positive
from kvformat.tensors import flat_bytes, from_buffer

if TYPE_CHECKING:
    import torch

    from kvformat.read.dataset import Dataset

__all__ = ["Record"]

_PAGE = mmap.PAGESIZE


class Record:
    """One record of a dataset; cheap to make, and valid as long as it is referred to.

    Views of one shard share its mapping: treat them as read-only. The file is never written to.

    Attributes
    ----------
    index
        Number of the record in the dataset.
    """

    __slots__ = ("_dataset", "_offset", "_placement", "_shard", "_slot", "index")

    def __init__(self, dataset: Dataset, index: int, shard: OpenShard) -> None:
        self._dataset = dataset
        self.index = index
        self._shard = shard
        row = shard.row
        slot = self._slot = index - row.first
        flat = row.rows.flat
        at = row.row + slot
        offset = flat["offset"][at]
        num_dims = dataset.num_dims
        if num_dims == 1:
            dims: tuple[int, ...] = (flat["dims"][at],)
        else:
            dims = tuple(flat["dims"][at * num_dims : (at + 1) * num_dims])
        if shard.checks.flags[slot] & ROW_CHECKED:
            self._placement = dataset.layout.place(dims)
        else:
            self._placement = self._check_row(dims, offset)
        self._offset = dataset.manifest.header_size + offset

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
        name, row = self._dataset.slab_of(role, layer)
        placed = self._placement.tensors[name]
        dataset = self._dataset
        if dataset.level and (dataset.level == 2 or not self._shard.checks.flags[self._slot] >> placed.bit & 1):
            self._verify_slab(placed, row)
        shape, strides = placed.shape[1:], placed.strides[1:]
        start = self._offset + placed.offset + row * placed.slab_nbytes
        return self._view(placed, start, placed.slab_nbytes, shape, strides, copy, out)

    # -- views ---------------------------------------------------------------------------------------------------

    def _tensor(self, placed: Placed, copy: bool, out: torch.Tensor | None) -> torch.Tensor:  # noqa: FBT001 -- hot path
        level = self._dataset.level
        if level and (level == 2 or not self._shard.checks.flags[self._slot] >> placed.bit & 1):
            if out is not None and self._shard.file.mapped is not None:
                return self._copy_verified(placed, out)
            self._verify(placed)
        return self._view(placed, self._offset + placed.offset, placed.nbytes, placed.shape, placed.strides, copy, out)

    def _view(
        self,
        placed: Placed,
        start: int,
        nbytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        copy: bool,  # noqa: FBT001 -- hot path: keywords cost
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        file = self._shard.file
        if out is not None:
            target = self._target(out, placed, shape)
            file.read_into(target, start)
            return out
        if file.mapped is None:
            return from_buffer(file.read(start, nbytes), placed.dtype).reshape(shape)
        view = self._shard.view(placed.dtype).as_strided(shape, strides, start // placed.item)
        return view.clone() if copy else view

    def _target(self, out: torch.Tensor, placed: Placed, shape: tuple[int, ...]) -> memoryview:
        if tuple(out.shape) != shape:
            raise make_error("E081", f"out has shape {list(out.shape)}, expected {list(shape)}", record=self.index)
        return flat_bytes(out, placed.dtype).data

    # -- verification --------------------------------------------------------------------------------------------

    def _check_row(self, dims: tuple[int, ...], offset: int) -> Placement:
        path = self._shard.file.path
        row = self._shard.row
        if not 1 <= dims[0] <= limits.MAX_TOKENS:
            raise make_error(
                "E053", f"{dims[0]} tokens: 1 to {limits.MAX_TOKENS} are allowed", path=path, record=self.index
            )
        try:
            placement = self._dataset.layout.place(dims)
        except KVFormatError as error:
            raise make_error("E053", error.message, path=path, record=self.index) from None
        if self.index + 1 < row.end:
            end = row.rows.flat["offset"][row.row + self._slot + 1]
        else:
            end = row.size - self._dataset.manifest.header_size
        if offset % limits.ALIGNMENT or offset + placement.nbytes != end or (self._slot == 0 and offset != 0):
            raise make_error(
                "E054",
                f"the record lies at {offset}, its dims {dims} make it {placement.nbytes} bytes, the next is at {end}",
                path=path,
                record=self.index,
            )
        mapped = self._shard.file.mapped
        if mapped is not None:
            begin = (self._dataset.manifest.header_size + offset) // _PAGE * _PAGE
            mapped.madvise(mmap.MADV_WILLNEED, begin, placement.nbytes)
        self._shard.checks.flags[self._slot] |= ROW_CHECKED
        return placement

    def _sums(self) -> memoryview:
        """The table of sums, proved by ``record_sum``."""
        placed = self._placement.sums
        raw = self._shard.file.read(self._offset + placed.offset, placed.nbytes)
        checks = self._shard.checks
        if self._dataset.level == 2 or not checks.flags[self._slot] & SUMS_CHECKED:
            row = self._shard.row
            at = row.row + self._slot
            stated = row.rows.flat["record_sum"][at * 16 : at * 16 + 16]
            if digests.record_sum(self._placement.dims, raw) != stated:
                raise make_error(
                    "E070",
                    "the record's sums do not match its row: restore the shard, or extract it again",
                    path=self._shard.file.path,
                    record=self.index,
                )
            checks.flags[self._slot] |= SUMS_CHECKED
        return raw.cast("Q")

    def check_sums(self) -> None:
        """Prove the table of sums; E070."""
        self._sums()

    def faults(self) -> Iterator[KVFormatError]:
        """Every slab and extra that is not what its sum states; the table of sums must be proved."""
        for placed in self._placement.tensors.values():
            if placed.bit < 0:
                continue
            for row in range(self._dataset.slabs[placed.name]):
                try:
                    self._verify_slab(placed, row)
                except KVFormatError as error:
                    yield error

    def stored(self, name: str) -> memoryview:
        """Bytes of a tensor as stored, not verified."""
        placed = self._placement.tensors[name]
        return self._shard.file.read(self._offset + placed.offset, placed.nbytes)

    def padding(self) -> memoryview:
        """Bytes after the last tensor, not verified."""
        end = self._placement.end
        return self._shard.file.read(self._offset + end, self._placement.nbytes - end)

    def _verify(self, placed: Placed) -> None:
        sums = self._sums()
        data = self._shard.file.read(self._offset + placed.offset, placed.nbytes)
        first = self._dataset.layout.first_sum[placed.name]
        slab = placed.slab_nbytes
        for row in range(self._dataset.slabs[placed.name]):
            part = data[row * slab : (row + 1) * slab]
            self._compare(placed, row, part, sums[first + row])
        self._shard.checks.flags[self._slot] |= 1 << placed.bit

    def _copy_verified(self, placed: Placed, out: torch.Tensor) -> torch.Tensor:
        """Verify and copy slab by slab, while a slab is in the processor's cache."""
        target = self._target(out, placed, placed.shape)
        sums = self._sums()
        file = self._shard.file
        start = self._offset + placed.offset
        first = self._dataset.layout.first_sum[placed.name]
        slab = placed.slab_nbytes
        for row in range(self._dataset.slabs[placed.name]):
            into = target[row * slab : (row + 1) * slab]
            file.read_into(into, start + row * slab)
            self._compare(placed, row, into, sums[first + row])
        self._shard.checks.flags[self._slot] |= 1 << placed.bit
        return out

    def _verify_slab(self, placed: Placed, row: int) -> None:
        checks = self._shard.checks
        key = (self._slot, placed.bit)
        done = checks.slabs.get(key, 0)
        if done >> row & 1 and self._dataset.level != 2:
            return
        sums = self._sums()
        data = self._shard.file.read(self._offset + placed.offset + row * placed.slab_nbytes, placed.slab_nbytes)
        self._compare(placed, row, data, sums[self._dataset.layout.first_sum[placed.name] + row])
        done |= 1 << row
        if done == (1 << self._dataset.slabs[placed.name]) - 1:
            checks.slabs.pop(key, None)
            checks.flags[self._slot] |= 1 << placed.bit
        else:
            checks.slabs[key] = done

    def _compare(self, placed: Placed, row: int, data: memoryview, stated: int) -> None:
        if digests.slab_sum(data) != stated:
            raise self._slab_error(placed, row, digests.slab_sum(data), stated)
        if placed.name in self._dataset.scales and not all_positive(data):
            raise make_error(
                "E074",
                f"{placed.name!r}: a scale is not finite and positive: extract again",
                path=self._shard.file.path,
                record=self.index,
                layer=self._dataset.layer_of(placed.name, row),
            )

    def _slab_error(self, placed: Placed, row: int, found: int, stated: int) -> KVFormatError:
        dataset = self._dataset
        path, layer = self._shard.file.path, dataset.layer_of(placed.name, row)
        if placed.bit >= dataset.num_components:
            return make_error(
                "E073",
                f"extra {placed.name!r}: XXH3 {found:016x}, expected {stated:016x}: restore the shard",
                path=path,
                record=self.index,
            )
        twin = dataset.twin_of(placed.name, layer)
        if twin is not None:
            other, other_row = self._placement.tensors[twin[0]], twin[1]
            data = self._shard.file.read(
                self._offset + other.offset + other_row * other.slab_nbytes, other.slab_nbytes
            )
            sums = self._sums()
            if digests.slab_sum(data) == stated and found == sums[dataset.layout.first_sum[other.name] + other_row]:
                return make_error(
                    "E071",
                    f"{placed.name!r} and {other.name!r} stand exchanged: extract again",
                    path=path,
                    record=self.index,
                    layer=layer,
                )
        return make_error(
            "E072",
            f"{placed.name!r}: XXH3 {found:016x}, expected {stated:016x}: restore the shard, or extract it again",
            path=path,
            record=self.index,
            layer=layer,
        )


def _reopen(dataset: Dataset, index: int) -> Record:
    return dataset[index]
