"""Records into the memory of a batch: one copy from where they are stored to where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.loader.buffers import BufferPool, Lease
from kvformat.loader.layouts import HF, PaddedLayout
from kvformat.loader.plan import Group, Part, Plan
from kvformat.read.dequantise import dequantise_into
from kvformat.tensors import from_buffer, torch_dtype

if TYPE_CHECKING:
    import torch

    from kvformat.loader.source import Source
    from kvformat.read.dataset import Place

__all__ = ["Content", "pack"]

_ALIGN = 4096
_U8 = np.dtype(np.uint8)
_FEW_NBYTES = 1 << 18
Bytes = NDArray[np.uint8]


class Content(NamedTuple):
    """The tensors of a batch.

    Attributes
    ----------
    components
        By name, in the form of the layout.
    extras
        By name: packed ``[sum of tokens, ...]``, padded ``[records, longest, ...]``.
    lengths
        Of each part, its entries in each record.
    tokens
        Tokens of each record.
    nbytes
        Bytes of components and extras, padding included.
    copied
        Bytes that were copied to get there.
    """

    components: dict[str, torch.Tensor]
    extras: dict[str, torch.Tensor]
    lengths: dict[str, list[int]]
    tokens: list[int]
    nbytes: int
    copied: int


class Tensors(dict[str, "torch.Tensor"]):
    """Tensors by name; E082 for a name there is none of."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise make_error("E082", f"no {name!r} here; there are {', '.join(self) or 'none'}")


class _Target:
    """Where one group of parts of all records goes.

    Parameters
    ----------
    lengths
        Entries of each record.
    """

    def __init__(self, plan: Plan, group: Group, lengths: list[int]) -> None:
        self.group = group
        self.lengths = lengths
        part = self.part = group.first
        layout = plan.layout
        self.side = layout.side if isinstance(layout, PaddedLayout) and part.ragged else None
        self.heads = isinstance(layout, HF) and bool(part.layers)
        # Packed bytes are joined: one call for all records that need no second look.
        self.joined = part.ragged and self.side is None and not group.cast
        records, inner = len(lengths), part.inner
        self.longest = 0
        if not part.ragged:
            shape: tuple[int, ...] = (records, *inner)
        elif isinstance(layout, PaddedLayout):
            self.longest = layout.padded(max(lengths))
            shape = (records, inner[0], self.longest, *inner[1:]) if self.heads else (records, self.longest, *inner)
        else:
            shape = (sum(lengths), *inner)
        self.shape = (group.rows, *shape)
        self.ends = list(accumulate(lengths, initial=0))
        self.nbytes = prod(self.shape) * part.item
        self.tensors: list[torch.Tensor]
        self._view: Any

    def place(self, lease: Lease, start: int) -> None:
        """Take the memory from ``start`` on."""
        part = self.part
        array = lease.array[start : start + self.nbytes]
        self.tensors = []
        of_row, at = self.nbytes // self.group.rows, start
        for one in self.group.parts:
            # Each of its own, not a view of the group's: what is saved of it is its bytes alone, and autograd does not
            # take a write into values for one into keys.
            nbytes = one.rows * of_row
            self.tensors.append(lease.tensor(at, nbytes, torch_dtype(one.dtype), (one.rows, *self.shape[1:])))
            at += nbytes
        if self.group.cast:
            (self._view,) = self.tensors  # what is cast is a group of its own
        elif self.heads:
            *outer, last = self.shape
            self._view = array.reshape(*outer, last * part.item)
        elif part.ragged and self.side is None:
            self._view = array.reshape(self.group.rows, -1)
        else:
            self._view = array.reshape(self.group.rows, len(self.lengths), -1)

    @property
    def bytes(self) -> memoryview:
        """The bytes of a single row, packed."""
        return memoryview(self._view).cast("B")

    def rows(self, number: int) -> Any:
        """Where a record goes: bytes ``[rows, bytes of a slab]``; items in the form of the layout where it is cast."""
        view, part, length = self._view, self.part, self.lengths[number]
        if not part.ragged:
            return view[:, number]
        unit = 1 if self.group.cast or self.heads else part.unit
        if self.side is None:
            return view[:, self.ends[number] * unit : self.ends[number + 1] * unit]
        first = 0 if self.side == "right" else self.longest - length
        if self.heads:
            return view[:, number, :, first : first + length]
        return view[:, number, first * unit : (first + length) * unit]

    def put(self, rows: Any, piece: Bytes, scale: torch.Tensor | None = None) -> None:
        """Copy slabs, ``[slabs, bytes of a slab]``, to as many rows of where a record goes, by their scales if any."""
        part = self.part
        if self.group.cast:
            source = from_buffer(piece.reshape(-1).data, part.stored)
            source = source.view((len(piece), -1, *part.inner) if part.ragged else (len(piece), *part.inner))
            source = source.transpose(1, 2) if self.heads else source
            if scale is None:
                rows.copy_(source)
            else:
                dequantise_into(rows, source, scale.transpose(1, 2) if self.heads else scale)
        elif self.heads:
            heads, dim = part.inner
            np.copyto(rows, piece.reshape(len(piece), -1, heads, dim * part.item).transpose(0, 2, 1, 3))
        else:
            np.copyto(rows, piece)

    def join(self, pieces: Sequence[Sequence[Bytes]]) -> None:
        """Copy all records, of each run of rows the slabs of each record, side by side."""
        for (_, into, count), of_run in zip(self.group.runs, pieces, strict=True):
            whole = count == self.group.rows or not self.part.layers
            np.concatenate(of_run, axis=1, out=self._view if whole else self._view[into : into + count])

    def clear(self, number: int) -> None:
        """Zeros where a record does not reach."""
        length = self.lengths[number]
        if self.side is None or length == self.longest:
            return
        begin, end = (length, self.longest) if self.side == "right" else (0, self.longest - length)
        if self.heads:
            self._view[:, number, :, begin:end] = 0
        elif self.group.cast:
            self._view[:, number, begin:end] = 0
        else:
            self._view[:, number, begin * self.part.unit : end * self.part.unit] = 0


def pack(plan: Plan, source: Source, numbers: Sequence[int], pool: BufferPool) -> Content:
    """Copy records into one piece of memory.

    Raises
    ------
    DamageError
        E053, E054, E070 to E074 where the bytes of a record are not those that were written.
    """
    places = source.places(numbers, plan.bits, plan.wanted)
    tokens = [place[0].dims[0] for place in places]
    targets = _targets(plan, places, tokens)
    starts = list(accumulate((-(-target.nbytes // _ALIGN) * _ALIGN for target in targets), initial=0))
    lease = pool.lease(starts[-1])
    for target, start in zip(targets, starts, strict=False):
        target.place(lease, start)
    proved = all(place[1] is not None for place in places)
    joined = [target for target in targets if proved and target.joined]
    copied = sum(_join(target, places) for target in joined)
    rest = [target for target in targets if target not in joined]
    for number, place in enumerate(places):
        for target in rest:
            rows = target.rows(number)
            copied += _pieces(target, place, rows) if place[1] is None else _whole(target, place, rows)
            target.clear(number)
    return _content(targets, tokens, copied)


def _targets(plan: Plan, places: Sequence[Place], tokens: list[int]) -> list[_Target]:
    known: dict[str | int | None, list[int]] = {None: [1] * len(places), "tokens": tokens}
    targets = []
    for group in plan.groups:
        part = group.first
        lengths = known.get(part.axis)
        if lengths is None:
            lengths = known[part.axis] = [part.length(place[0].tensors[part.name]) for place in places]
        targets.append(_Target(plan, group, lengths))
    return targets


def _join(target: _Target, places: Sequence[Place]) -> int:
    """Copy a group of all records, none of which needs to be verified; the bytes copied."""
    part = target.part
    name = part.name
    if target.group.rows == 1 and 0 < target.nbytes < _FEW_NBYTES:
        return _join_few(target, places)
    pieces = []
    for row, _, count in target.group.runs:
        rows = count if part.layers else part.rows  # an extra is one slab, whatever its rows
        of_run = []
        for placement, array, start, _ in places:
            where = placement.tensors[name]
            nbytes = where.slab_nbytes
            shape = (rows, count * nbytes // rows)
            # In half the time of a slice and its reshape, and this is done for each small record.
            of_run.append(np.ndarray(shape, _U8, array, start + where.offset + row * nbytes))
        pieces.append(of_run)
    target.join(pieces)
    return target.nbytes


def _join_few(target: _Target, places: Sequence[Place]) -> int:
    """As above for one row of a few bytes a record, token ids say, where an array each costs more than its bytes."""
    name, ((row, _, _),) = target.part.name, target.group.runs
    joined = target.bytes
    at = 0
    for placement, array, start, _ in places:
        where = placement.tensors[name]
        nbytes = where.slab_nbytes
        begin = start + where.offset + row * nbytes
        joined[at : at + nbytes] = array[begin : begin + nbytes]  # type: ignore[index,assignment]  # bytes of a map
        at += nbytes
    return at


def _whole(target: _Target, place: Place, rows: Any) -> int:
    """Copy a group of a record that needs not to be verified; the bytes copied."""
    placement, array, start, _ = place
    where = placement.tensors[target.part.name]
    copied = 0
    for row, into, count in target.group.runs:
        begin = start + where.offset + row * where.slab_nbytes
        piece = array[begin : begin + count * where.slab_nbytes]  # type: ignore[index]  # there is one
        of_run = rows if count == target.group.rows or not target.part.layers else rows[into : into + count]
        target.put(of_run, piece.reshape(len(of_run), -1), _scales(target.part, place, row, count))
        copied += piece.nbytes
    return copied


def _pieces(target: _Target, place: Place, rows: Any) -> int:
    """Copy a group of a record piece by piece, each verified before; the bytes copied."""
    record = place[3]
    assert record is not None
    copied = first = 0
    for part in target.group.parts:
        where = record.placement.tensors[part.name]
        if not part.layers:  # one slab, whatever its rows
            for _, _, piece in record.pieces(where, 0, 1):
                target.put(rows, piece.reshape(part.rows, -1))
                copied += piece.nbytes
        for row, into, count in part.runs if part.layers else ():
            for at, slabs, piece in record.pieces(where, row, count):
                begin = first + into + at - row
                target.put(rows[begin : begin + slabs], piece, _scales(part, place, at, slabs))
                copied += piece.nbytes
        first += part.rows
    return copied


def _scales(part: Part, place: Place, row: int, count: int) -> torch.Tensor | None:
    """Scales of so many slabs of a record, ``[slabs, *axes]``, verified; None where nothing is dequantised."""
    if part.scale is None:
        return None
    placement, array, start, record = place
    where = placement.tensors[part.scale]
    nbytes = where.slab_nbytes
    if array is not None:
        begin = start + where.offset + row * nbytes
        data: Any = array[begin : begin + count * nbytes].data
    else:
        assert record is not None
        # Each piece is overwritten by the next.
        data = bytearray(b"".join(piece.tobytes() for _, _, piece in record.pieces(where, row, count)))
    return from_buffer(data, "F32").view(count, *where.shape[1:])


def _content(targets: Sequence[_Target], tokens: list[int], copied: int) -> Content:
    components, extras, lengths = Tensors(), Tensors(), {}
    for target in targets:
        for part, tensor in zip(target.group.parts, target.tensors, strict=True):
            lengths[part.name] = target.lengths
            if part.layers:
                components[part.name] = tensor
            else:
                extras[part.name] = tensor if part.rows > 1 else tensor[0]
    return Content(components, extras, lengths, tokens, sum(target.nbytes for target in targets), copied)
