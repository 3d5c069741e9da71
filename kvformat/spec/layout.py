"""Where the tensors of a record stand, compiled once for a schema (SPEC.md, section 12)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from kvformat.errors import make_error
from kvformat.spec import limits
from kvformat.spec.digests import schema_digest
from kvformat.spec.schema import ITEM_SIZES, Axis, Last, Schema

__all__ = ["Layout", "Placed", "Placement", "align", "header_size"]

_CACHED_PLACEMENTS = 4096
_WIDEST_OFFSET = 2**48 - 1


def align(number: int, to: int) -> int:
    """The least multiple of ``to`` that is not below ``number``."""
    return -(-number // to) * to


class Placed(NamedTuple):
    """A tensor of a record of given dims. ``offset`` is from the start of the record, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    item: int
    first_item: int
    slab_nbytes: int
    bit: int
    """Number of the tensor among components, then extras; -1 for ``sums``."""


class Placement:
    """All tensors of a record of given dims, in stored order.

    Attributes
    ----------
    dims
        The dims, ``tokens`` first.
    tensors
        By name, ``sums`` included, ``pad`` not.
    end
        Bytes up to the end of the last tensor.
    nbytes
        Bytes of the whole record, a multiple of 4096.
    body, body_nbytes
        Start and bytes of the body: everything from the first component to the last one, in stored order.
    body_bounds
        See :meth:`Layout.body_slabs`.
    body_bits
        One bit for each tensor of the body but ``sums``, as :attr:`Placed.bit` numbers them.
    """

    __slots__ = ("body", "body_bits", "body_bounds", "body_nbytes", "dims", "end", "nbytes", "sums", "tensors")

    def __init__(self, dims: tuple[int, ...], tensors: dict[str, Placed], body: Sequence[str]) -> None:
        self.dims = dims
        self.tensors = tensors
        self.sums = tensors["sums"]
        self.body_bounds: list[slice] = []
        first, last = tensors[body[0]], tensors[body[-1]]
        self.body = first.offset
        self.body_nbytes = last.offset + last.nbytes - first.offset
        self.body_bits = sum(1 << tensors[name].bit for name in body if tensors[name].bit >= 0)
        self.end = max(placed.offset + placed.nbytes for placed in tensors.values())
        self.nbytes = align(self.end, limits.ALIGNMENT)


class _Shape(NamedTuple):
    name: str
    dtype: str
    item: int
    axes: tuple[int | tuple[str, int], ...]
    """An integer, or (``dim``, index) or (``last``, n)."""
    bit: int
    slabs: int


class Layout:
    """The layout of every record of a schema.

    Attributes
    ----------
    num_sums
        Entries of the ``sums`` table: slabs of all components, then extras.
    first_sum
        Index in ``sums`` of a component's first slab, or of an extra, by name.
    body
        Names of the tensors from the first component to the last one, in stored order.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.first_sum: dict[str, int] = {}
        self._cache: dict[tuple[int, ...], Placement] = {}
        components = []
        at = 0
        for bit, component in enumerate(schema.components):
            self.first_sum[component.name] = at
            at += len(component.layers)
            axes = (len(component.layers), *self._axes(component.axes))
            components.append(self._shape(component.name, component.dtype, axes, bit, len(component.layers)))
        extras = []
        for bit, extra in enumerate(schema.extras, len(components)):
            self.first_sum[extra.name] = at
            at += 1
            extras.append(self._shape(extra.name, extra.dtype, self._axes(extra.axes), bit, 1))
        self.num_sums = at
        shapes = [*components, _Shape("sums", "U64", 8, (at,), -1, 1), *extras]
        self._shapes = sorted(shapes, key=lambda shape: -shape.item)  # a stable sort keeps schema order
        components_at = [at for at, shape in enumerate(self._shapes) if 0 <= shape.bit < len(components)]
        stored = self._shapes[components_at[0] : components_at[-1] + 1] if components_at else []
        self.body = tuple(shape.name for shape in stored)
        summed = sorted((shape for shape in stored if shape.bit >= 0), key=lambda shape: shape.bit)
        self._body_sums = [self.first_sum[shape.name] + slab for shape in summed for slab in range(shape.slabs)]
        self._body_slabs = [(shape.name, slab) for shape in summed for slab in range(shape.slabs)]

    def place(self, dims: tuple[int, ...]) -> Placement:
        """Layout of a record with these dims; E111 beyond the limits."""
        found = self._cache.get(dims)
        if found is None:
            found = self._place(dims)
            if len(self._cache) >= _CACHED_PLACEMENTS:
                self._cache.clear()
            self._cache[dims] = found
        return found

    def body_slabs(self, placement: Placement) -> tuple[list[int], list[slice]]:
        """Of every slab and extra in the body, its index in ``sums``, and what of the body it is."""
        if not placement.body_bounds:
            bounds = []
            for name, slab in self._body_slabs:
                placed = placement.tensors[name]
                begin = placed.offset - placement.body + slab * placed.slab_nbytes
                bounds.append(slice(begin, begin + placed.slab_nbytes))
            placement.body_bounds = bounds
        return self._body_sums, placement.body_bounds

    def header(self, version: str, ordinal: int, placements: Sequence[Placement]) -> bytes:
        """Header JSON of a shard of these records, without length and padding spaces."""
        parts = [self._head(version, str(ordinal))]
        start = 0
        known: dict[Placement, list[tuple[str, int, int]]] = {}
        for slot, placement in enumerate(placements):
            entries = known.get(placement)
            if entries is None:
                entries = known[placement] = self._entries(placement)
            number = f"{slot:04d}"
            parts += [f',"{number}{words}{start + first},{start + end}]}}' for words, first, end in entries]
            start += placement.nbytes
        parts.append("}")
        return "".join(parts).encode("ascii")

    def header_size(self, version: str, slots: int) -> int:
        """Start of the data in every shard of the dataset (SPEC.md, section 12.3)."""
        dims = tuple(limits.MAX_TOKENS if d == "tokens" else limits.MAX_DIM for d in self.schema.dims)
        entries = 0
        for shape in self._shapes:
            sizes = self._sizes(shape, dims)
            entries += len(_entry(0, shape.name, shape.dtype, sizes, _WIDEST_OFFSET, _WIDEST_OFFSET))
        entries += len(_entry(0, "pad", "U8", (limits.ALIGNMENT - 1,), _WIDEST_OFFSET, _WIDEST_OFFSET))
        widest = len(self._head(version, str(limits.MAX_SHARDS - 1))) + slots * entries + 1
        return align(8 + widest, limits.ALIGNMENT)

    def _head(self, version: str, ordinal: str) -> str:
        digest = schema_digest(self.schema).hex()
        return f'{{"__metadata__":{{"kvformat":"{version}","ordinal":"{ordinal}","schema":"{digest}"}}'

    @staticmethod
    def _entries(placement: Placement) -> list[tuple[str, int, int]]:
        """Of each tensor, what stands between slot and offsets; offsets from the start of the record."""
        found = [(_words(t.name, t.dtype, t.shape), t.offset, t.offset + t.nbytes) for t in placement.tensors.values()]
        pad = placement.nbytes - placement.end
        if pad:
            found.append((_words("pad", "U8", (pad,)), placement.end, placement.nbytes))
        return found

    def _axes(self, axes: tuple[Axis, ...]) -> tuple[int | tuple[str, int], ...]:
        found: list[int | tuple[str, int]] = []
        for axis in axes:
            if isinstance(axis.size, Last):
                found.append(("last", axis.size.last))
            elif isinstance(axis.size, str):
                found.append(("dim", self.schema.dims.index(axis.size)))
            else:
                found.append(axis.size)
        return tuple(found)

    @staticmethod
    def _shape(name: str, dtype: str, axes: tuple[int | tuple[str, int], ...], bit: int, slabs: int) -> _Shape:
        return _Shape(name, dtype, ITEM_SIZES[dtype], axes, bit, slabs)

    @staticmethod
    def _sizes(shape: _Shape, dims: tuple[int, ...]) -> tuple[int, ...]:
        sizes = []
        for axis in shape.axes:
            if isinstance(axis, int):
                sizes.append(axis)
            elif axis[0] == "last":
                sizes.append(min(dims[0], axis[1]))
            else:
                sizes.append(dims[axis[1]])
        return tuple(sizes)

    def _place(self, dims: tuple[int, ...]) -> Placement:
        if not 1 <= dims[0] <= limits.MAX_TOKENS or not all(0 <= dim <= limits.MAX_DIM for dim in dims):
            raise make_error("E111", f"dims {dims}: tokens must be 1 to {limits.MAX_TOKENS}, others below 2^32")
        tensors: dict[str, Placed] = {}
        offset = 0
        for shape in self._shapes:
            sizes = self._sizes(shape, dims)
            nbytes = prod(sizes) * shape.item
            tensors[shape.name] = Placed(
                shape.name,
                shape.dtype,
                sizes,
                _strides(sizes),
                offset,
                nbytes,
                shape.item,
                offset // shape.item,
                nbytes // shape.slabs,
                shape.bit,
            )
            offset += nbytes
        placement = Placement(dims, tensors, self.body)
        if placement.nbytes > limits.MAX_FILE_NBYTES:
            raise make_error(
                "E111", f"a record of dims {dims} has {placement.nbytes} bytes, at most 2^48-1 are allowed"
            )
        return placement


def header_size(schema: Schema, version: str, slots: int) -> int:
    """``header_size`` of a dataset."""
    return Layout(schema).header_size(version, slots)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _words(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f'/{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":['


def _entry(slot: int, name: str, dtype: str, shape: tuple[int, ...], first: int, end: int) -> str:
    return f',"{slot:04d}{_words(name, dtype, shape)}{first},{end}]}}'
