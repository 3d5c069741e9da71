"""What a layout means for a schema, worked out once: parts of the batch, and what of a record goes into them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.loader.layouts import CASTS, HF, BatchLayout, PaddedLayout
from kvformat.spec.layout import Placed
from kvformat.spec.schema import ITEM_SIZES, SHARED_ROLES, Component, Extra, Last, Schema

__all__ = ["Group", "Part", "Plan"]


class Part(NamedTuple):
    """A component, or an extra, of the batch.

    Attributes
    ----------
    runs
        (First slab in the record, first row in the batch, number of rows) of consecutive slabs.
    rows
        Rows in the batch, one a layer; of an extra 1.
    layers
        Model layer of each row; empty for an extra.
    ragged
        Whether the first axis behind the rows varies from record to record.
    axis
        What that axis is, for parts whose axes are of equal length; None where it is not ragged.
    inner
        The axes behind it, or all of them.
    item
        Bytes of an item in the batch.
    scale
        Component that holds the scales, where values are dequantised on the way.
    """

    name: str
    role: str
    bit: int
    stored: str
    dtype: str
    runs: tuple[tuple[int, int, int], ...]
    rows: int
    layers: tuple[int, ...]
    ragged: bool
    axis: str | int | None
    inner: tuple[int, ...]
    item: int
    scale: str | None = None

    @property
    def unit(self) -> int:
        """Bytes of one entry of the ragged axis, or of a record's whole row where it has none."""
        return prod(self.inner) * self.item

    def length(self, placed: Placed) -> int:
        """Entries a record has of the ragged axis."""
        return placed.shape[-1 - len(self.inner)] if self.ragged else 1


class Group(NamedTuple):
    """Parts that lie one behind the other in a record and in the batch, so that they are copied as one.

    Attributes
    ----------
    runs
        As of a part, counted from the first one.
    cast
        Whether items change their type on the way.
    """

    parts: tuple[Part, ...]
    runs: tuple[tuple[int, int, int], ...]
    rows: int
    cast: bool

    @property
    def first(self) -> Part:
        """The part that lies first."""
        return self.parts[0]


class Plan:
    """A layout, compiled for a schema.

    Raises
    ------
    KVFormatError
        E082 for a component, layer or extra the schema has not; E088 where the layout cannot hold a tensor; E089 where
        the positions have another number of rows than the consumer takes.

    Attributes
    ----------
    parts
        The components.
    groups
        All of them, as they are copied.
    extras
        The extras, ``token_ids`` and ``position_ids`` first where the schema has them.
    wanted
        What :meth:`CopyableRecord.prove` takes.
    bits
        A bit for each of these tensors.
    """

    def __init__(self, schema: Schema, layout: BatchLayout) -> None:
        self.schema = schema
        self.layout = layout
        known = {component.name: (bit, component) for bit, component in enumerate(schema.components)}
        self._scales = {c.quant.scale for c in schema.components if c.quant is not None}
        left_out = self._scales if layout.dtype is not None else set()
        names = [name for name in known if name not in left_out]
        if layout.components is not None:
            names = list(layout.components)
        for name in names:
            if name not in known:
                raise make_error("E082", f"no component {name!r}; the schema has {', '.join(known)}")
        shares = _Shares(schema)
        chosen = [(*known[name], shares.layers(known[name][1], layout)) for name in names]
        self.parts = [self._component(bit, component, layers) for bit, component, layers in chosen if layers]
        shares.check(layout, [known[name][1] for name in names])
        self.extras = list(self._extras())
        everything = [*self.parts, *self.extras]
        self.groups = _groups(everything, schema)
        self.wanted = [(part.name, [(row, count) for row, _, count in part.runs]) for part in everything]
        self.bits = sum(1 << part.bit for part in everything)
        for part in everything:
            if part.scale is not None:
                self._want(part.scale, known[part.scale][0], part)
        self.rows_of = shares.rows_of(self.parts)
        if isinstance(layout, HF):
            _check_cache(schema, self.parts)

    def estimate(self, tokens: NDArray[np.int64]) -> int:
        """Bytes of a batch of records of so many tokens; where axes vary by other dims too, as if those were 1."""
        total = 0
        for part in [*self.parts, *self.extras]:
            entries = len(tokens)
            if part.axis == "tokens":
                entries = _padded(tokens, self.layout)
            elif isinstance(part.axis, int):
                entries = _padded(np.minimum(tokens, part.axis), self.layout)
            total += part.rows * entries * part.unit
        return total

    def _want(self, scale: str, bit: int, part: Part) -> None:
        """Have scales read that go into no part of the batch, or into another one."""
        rows = {at for row, _, count in part.runs for at in range(row, row + count)}
        for name, runs in self.wanted:
            if name == scale:
                rows.update(at for row, count in runs for at in range(row, row + count))
        runs = [(row, count) for row, _, count in _runs(sorted(rows))]
        self.wanted = [*((name, other) for name, other in self.wanted if name != scale), (scale, runs)]
        self.bits |= 1 << bit

    def _component(self, bit: int, component: Component, layers: Sequence[int]) -> Part:
        rows = [component.layers.index(layer) for layer in layers]
        dtype, scale = component.dtype, None
        if self.layout.dtype is not None and component.name not in self._scales:
            if component.quant is not None:
                dtype, scale = str(self.layout.dtype), component.quant.scale
            elif dtype in CASTS:
                dtype = str(self.layout.dtype)
        return Part(
            component.name,
            component.role,
            bit,
            component.dtype,
            dtype,
            _runs(rows),
            len(rows),
            tuple(layers),
            *_axes(component),
            ITEM_SIZES[dtype],
            scale,
        )

    def _extras(self) -> list[Part]:
        known = {extra.name: (bit, extra) for bit, extra in enumerate(self.schema.extras, len(self.schema.components))}
        for name in self.layout.extras:
            if name not in known:
                raise make_error("E082", f"no extra {name!r}; the schema has {', '.join(known) or 'none'}")
        names = dict.fromkeys([name for name in ("token_ids", "position_ids") if name in known])
        parts = []
        for name in [*names, *(name for name in self.layout.extras if name not in names)]:
            bit, extra = known[name]
            parts.append(self._extra(bit, extra))
        return parts

    def _extra(self, bit: int, extra: Extra) -> Part:
        rows, axes = 1, extra.axes
        if extra.name == "position_ids":
            rows = int(extra.axes[0].size) if isinstance(extra.axes[0].size, int) else 0
            if rows != self.layout.position_rows:
                raise make_error(
                    "E089",
                    f"the dataset has {rows} rows of positions, the consumer takes {self.layout.position_rows}: give "
                    f"the layout position_rows={rows} if it takes them",
                )
            axes = extra.axes[1:]
        ragged, axis, inner = _axes(Extra(name=extra.name, axes=axes, dtype=extra.dtype))
        item = ITEM_SIZES[extra.dtype]
        runs = ((0, 0, 1),)  # an extra is one slab, whatever its rows
        return Part(extra.name, "extra", bit, extra.dtype, extra.dtype, runs, rows, (), ragged, axis, inner, item)


def _groups(parts: Sequence[Part], schema: Schema) -> list[Group]:
    counts = {component.name: len(component.layers) for component in schema.components}
    groups: list[Group] = []
    for part in parts:
        cast = part.dtype != part.stored
        whole = part.runs == ((0, 0, counts.get(part.name, -1)),)
        before = groups[-1] if groups else None
        if before is not None and whole and not cast and _follows(part, before):
            rows = before.rows + part.rows
            groups[-1] = Group((*before.parts, part), ((0, 0, rows),), rows, cast=False)
        else:
            groups.append(Group((part,), part.runs, part.rows, cast))
    return groups


def _follows(part: Part, group: Group) -> bool:
    """Whether a whole component has the shape of those before it, all whole, and is stored right behind them."""
    last = group.parts[-1]
    return (
        bool(last.layers)
        and not group.cast
        and group.runs == ((0, 0, group.rows),)
        and part.bit == last.bit + 1
        and (part.stored, part.ragged, part.axis, part.inner) == (last.stored, last.ragged, last.axis, last.inner)
    )


def _padded(lengths: NDArray[np.int64], layout: BatchLayout) -> int:
    """Entries of a ragged axis in the batch, padding included."""
    if isinstance(layout, PaddedLayout):
        return len(lengths) * layout.padded(int(lengths.max()))
    return int(lengths.sum())


def _axes(tensor: Component | Extra) -> tuple[bool, str | int | None, tuple[int, ...]]:
    """Whether the first axis varies, what it is, and the sizes of the others."""
    first = tensor.axes[0].size if tensor.axes else 1
    ragged = not isinstance(first, int)
    inner = []
    for axis in tensor.axes[1:] if ragged else tensor.axes:
        if not isinstance(axis.size, int):
            raise make_error(
                "E088",
                f"axis {axis.name!r} of {tensor.name!r} varies, and is not the first one: leave it out by naming the "
                "others in components=, or read records one by one",
            )
        inner.append(axis.size)
    kind = first.last if isinstance(first, Last) else first if ragged else None
    return ragged, kind, tuple(inner)


def _runs(rows: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    found = []
    for _, group in groupby(enumerate(rows), key=lambda entry: entry[1] - entry[0]):
        entries = list(group)
        found.append((entries[0][1], entries[0][0], len(entries)))
    return tuple(found)


class _Shares:
    """Which layers have the keys and values of others, with their scales; nothing else of a layer is shared."""

    def __init__(self, schema: Schema) -> None:
        self._source_of = {shared.layer: shared.source for shared in schema.shared}
        kept = [component for component in schema.components if component.role in SHARED_ROLES]
        scales = {component.quant.scale for component in kept if component.quant is not None}
        self._names = {component.name for component in kept} | scales

    def layers(self, component: Component, layout: BatchLayout) -> list[int]:
        """Layers of a component that are wanted, in the order of the batch."""
        if layout.layers is None:
            return list(component.layers)
        sources = self._source_of if component.name in self._names else {}
        wanted = dict.fromkeys(sources.get(layer, layer) for layer in layout.layers)
        return [layer for layer in wanted if layer in component.layers]

    def check(self, layout: BatchLayout, components: Sequence[Component]) -> None:
        """E082 for a layer wanted that no component holds."""
        held = {layer for component in components for layer in component.layers}
        stored = {layer for component in components if component.name in self._names for layer in component.layers}
        held |= {layer for layer, source in self._source_of.items() if source in stored}
        for layer in layout.layers or ():
            if layer not in held:
                message = f"no component wanted has layer {layer}; they have {sorted(held)}"
                raise make_error("E082", message, layer=layer)

    def rows_of(self, parts: Sequence[Part]) -> dict[int, dict[str, int]]:
        """By model layer, the row of each part that holds it; a layer that shares another's has the other's rows."""
        found: dict[int, dict[str, int]] = {}
        for part in parts:
            for row, layer in enumerate(part.layers):
                found.setdefault(layer, {})[part.name] = row
        for layer, source in self._source_of.items():
            rows = {name: row for name, row in found.get(source, {}).items() if name in self._names}
            if rows:
                found[layer] = {**found.get(layer, {}), **rows}
        return dict(sorted(found.items()))


def _check_cache(schema: Schema, parts: Sequence[Part]) -> None:
    """E088 where K and V are not what a cache of every layer from 0 on is made of."""
    try:
        keys, values = ({part.role: part for part in parts}[role] for role in ("key", "value"))
    except KeyError:
        raise _no_cache("it needs a component of keys and one of values") from None
    if len(parts) != 2:
        raise _no_cache(f"components {', '.join(p.name for p in parts)}; choose keys and values by components=")
    if schema.shared:
        raise _no_cache("layers share keys and values")
    if keys.layers != values.layers or keys.layers != tuple(range(len(keys.layers))):
        raise _no_cache("keys and values of every layer from 0 on are needed")
    for part in (keys, values):
        if part.axis != "tokens" or len(part.inner) != 2:
            raise _no_cache(f"{part.name!r} is not [layers, tokens, heads, head_dim] of all tokens")
    stored = {component.name: component for component in schema.components}
    if stored[keys.name].stage != "attention":
        raise _no_cache("keys must be stored as attention consumes them")
    if any(stored[part.name].quant is not None and part.scale is None for part in (keys, values)):
        raise _no_cache("keys and values are quantised: give dtype= to have them dequantised")


def _no_cache(why: str) -> KVFormatError:
    return make_error("E088", f"layout hf: {why}; or take layout packed or padded")
