"""How far computed K and V are from stored ones, layer by layer. Importing this loads torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kvformat.errors import make_error
from kvformat.read.error_bounds import compared
from kvformat.spec.schema import Component, Last, Schema

__all__ = ["ComponentPair", "Slab", "compare", "exchanged", "pairs"]


class Slab(NamedTuple):
    """How one layer of one component of one record differs.

    Attributes
    ----------
    equal
        Whether the bits are the same; never where one side is quantised and the other is not.
    max_abs, rms
        Largest and RMS difference; infinite where a value that is not finite stands against another.
    scale
        RMS of the layer: that of the larger side, so that no ratio to it depends on which is which.
    row, row_rms
        Token whose row differs most, and the RMS difference of that row.
    num_values
        Values of the slab.
    """

    equal: bool
    max_abs: float
    rms: float
    scale: float
    row: int
    row_rms: float
    num_values: int

    def relative(self, error: float) -> float:
        """An error over the RMS of the layer; infinite against nothing."""
        if self.scale:
            return error / self.scale
        return math.inf if error else 0.0


class ComponentPair(NamedTuple):
    """A stored component, and where an extractor gives the same role and layers.

    Attributes
    ----------
    computed
        Component of the extractor for each stored layer, and its row there.
    """

    stored: Component
    computed: tuple[tuple[Component, int], ...]

    @property
    def rows(self) -> int | None:
        """Axis of a slab along which tokens stand; None where they have none of their own."""
        return next((n for n, axis in enumerate(self.stored.axes) if _counts_tokens(axis.size)), None)


def pairs(stored: Schema, computed: Schema) -> tuple[list[ComponentPair], list[tuple[Component, int | None, str]]]:
    """Which component of an extractor's schema belongs to which stored one, and what has no counterpart.

    Returns
    -------
    tuple
        Pairs, by the order of the stored schema; and for each component that cannot be compared the component, the
        layer and the reason.
    """
    found: list[ComponentPair] = []
    without: list[tuple[Component, int | None, str]] = []
    offered = {
        (component.name if component.role == "other" else component.role, layer): (component, row)
        for component in compared(computed)
        for row, layer in enumerate(component.layers)
    }
    for component in compared(stored):
        kind = component.name if component.role == "other" else component.role
        partners = [offered.get((kind, layer)) for layer in component.layers]
        missing = next((n for n, partner in enumerate(partners) if partner is None), None)
        if missing is not None:
            without.append((component, component.layers[missing], f"the model gives no {kind} of this layer"))
            continue
        chosen = tuple(partner for partner in partners if partner is not None)
        reason = next((why for partner, _ in chosen if (why := _differs(component, partner))), None)
        if reason is not None:
            without.append((component, None, reason))
        else:
            found.append(ComponentPair(component, chosen))
    return found, without


def compare(
    pair: ComponentPair, stored: Mapping[str, torch.Tensor], computed: Mapping[str, torch.Tensor]
) -> list[Slab]:
    """Differences of each layer of a component of one record.

    Parameters
    ----------
    stored, computed
        By component name, ``[layers, *axes]`` on any device, scales among them where values are quantised.

    Raises
    ------
    InputError
        E101 where an extractor gives another shape than its schema says.
    """
    rows = pair.rows
    found = []
    for index, (partner, row) in enumerate(pair.computed):
        ours, theirs = _raw(stored, pair.stored, index), _raw(computed, partner, row)
        if ours[0].shape != theirs[0].shape:
            shapes = f"{list(theirs[0].shape)}, stored is {list(ours[0].shape)}"
            raise make_error("E101", f"{partner.name!r}: computed is {shapes}", layer=pair.stored.layers[index])
        equal = len(ours) == len(theirs) and all(_same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        found.append(_slab(_values(ours), _values(theirs), rows=rows, equal=equal))
    return found


def exchanged(
    pair: ComponentPair,
    stored: Mapping[str, torch.Tensor],
    computed: Mapping[str, torch.Tensor],
    *,
    index: int,
    bound: float,
) -> int | None:
    """The neighbouring layer whose computed values are what is stored at ``index``; None where it is none of them."""
    ours = _values(_raw(stored, pair.stored, index))
    for neighbour in (index - 1, index + 1):
        if 0 <= neighbour < len(pair.computed):
            partner, row = pair.computed[neighbour]
            theirs = _values(_raw(computed, partner, row))
            slab = _slab(ours, theirs, rows=None, equal=False)
            if slab.relative(slab.rms) <= bound:
                return pair.stored.layers[neighbour]
    return None


def _raw(tensors: Mapping[str, torch.Tensor], component: Component, row: int) -> list[torch.Tensor]:
    """Slab of a component and, of a quantised one, its scales, on the CPU."""
    names = [component.name] if component.quant is None else [component.name, component.quant.scale]
    return [tensors[name][row].detach().to("cpu") for name in names]


def _values(raw: list[torch.Tensor]) -> torch.Tensor:
    values = raw[0].float()
    return values * raw[1] if len(raw) == 2 else values


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _slab(ours: torch.Tensor, theirs: torch.Tensor, *, rows: int | None, equal: bool) -> Slab:
    scale = max(_scale(ours), 0.0 if equal else _scale(theirs))
    if equal or not ours.numel():
        return Slab(equal, 0.0, 0.0, scale, 0, 0.0, ours.numel())
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    off = torch.where(same, 0.0, ours - theirs).nan_to_num(nan=math.inf)
    row, row_rms = 0, 0.0
    if rows is not None:
        by_row = off.movedim(rows, 0).reshape(off.shape[rows], -1)
        norms = torch.linalg.vector_norm(by_row, dim=1, dtype=torch.float64)
        row = int(norms.argmax())
        row_rms = float(norms[row]) / math.sqrt(by_row.shape[1])
    return Slab(equal, float(off.abs().max()), _rms(off), scale, row, row_rms, off.numel())


def _scale(values: torch.Tensor) -> float:
    """RMS of the values that are finite."""
    whole = _rms(values)
    return whole if math.isfinite(whole) else _rms(values.nan_to_num(0.0, 0.0, 0.0))


def _rms(values: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm / math.sqrt(values.numel())


def _differs(stored: Component, computed: Component) -> str | None:
    """Why two components of one role and layer are not to be compared; None where they are."""
    axes = [[f"{axis.name} {_size(axis.size)}" for axis in one.axes] for one in (stored, computed)]
    if axes[0] != axes[1]:
        return f"its axes are [{', '.join(axes[0])}], those of the model [{', '.join(axes[1])}]"
    if stored.stage != computed.stage:
        return f"it holds the stage {stored.stage}, the model gives {computed.stage}"
    return None


def _size(size: int | str | Last) -> str:
    return f"last {size.last}" if isinstance(size, Last) else str(size)


def _counts_tokens(size: int | str | Last) -> bool:
    return size == "tokens" or isinstance(size, Last)
