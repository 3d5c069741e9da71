"""What an audit found, and how it adds up over records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.extract.bounds import ROW_FACTOR, Bounds
from kvformat.read.verify import Finding

if TYPE_CHECKING:
    from kvformat.extract.deviation import ComponentPair, Slab

__all__ = ["AuditReport", "ComponentDeviation", "Findings", "LayerDeviation", "Tally", "beyond"]

_SHOWN = 20  # findings of one code that are told


class LayerDeviation(Struct, frozen=True, kw_only=True):
    """How one layer of a component differs, over all records that were computed again.

    Attributes
    ----------
    layer
        Model layer.
    equal_records
        Records whose bits are the same.
    max_abs, rms
        Largest and RMS difference.
    relative_max, relative_rms
        Both over the layer's RMS, the first in the record where that is most.
    worst_rms, worst_record
        The largest RMS difference of a single record over its RMS, and that record's number: what the bound is for.
    """

    layer: int
    equal_records: int
    max_abs: float
    rms: float
    relative_max: float
    relative_rms: float
    worst_rms: float
    worst_record: int


class ComponentDeviation(Struct, frozen=True, kw_only=True):
    """How a component differs.

    Attributes
    ----------
    bound
        Largest relative RMS difference of a layer of a record that is taken for rounding.
    bound_recorded
        Whether the dataset says so; otherwise it is the default of its compute dtype.
    quantisation
        How it was quantised, where it was; ``unknown`` where nobody recorded it. It is compared after dequantisation.
    """

    name: str
    role: str
    bound: float
    bound_recorded: bool
    quantisation: str | None
    layers: tuple[LayerDeviation, ...]


class AuditReport(Struct, frozen=True, kw_only=True):
    """What computing a sample again found.

    Attributes
    ----------
    ok
        Whether there is no finding.
    id, seed
        Dataset id and seed of the sample.
    records
        Records of the dataset; ``sampled`` of them were chosen, ``computed`` computed again, ``equal`` bit by bit.
    beyond
        Records that differ by more than the bound.
    tokens
        Tokens that were computed again.
    context_known
        Whether contexts were compared; an unknown one equals nothing, and only the values tell.
    components
        By component that was compared, in the order of the schema.
    findings, num_findings
        The first of each code, and how many there are in all. E083: another context; E312: other text or documents;
        E305: a start added twice; E311: other values; and whatever was in the way of computing a record again.
    notes
        What could not be looked at, and why.
    """

    ok: bool
    id: str
    seed: int
    records: int
    sampled: int
    computed: int
    equal: int
    beyond: int
    tokens: int
    context_known: bool
    components: tuple[ComponentDeviation, ...]
    findings: tuple[Finding, ...]
    num_findings: int
    notes: tuple[str, ...]

    def raise_for_findings(self) -> None:
        """Raise the first finding, with the number of the others.

        Raises
        ------
        KVFormatError
            Of the finding's code: usually IdentityError with E083, E311 or E312.
        """
        if not self.findings:
            return
        first, others = self.findings[0], self.num_findings - 1
        more = f"; and {others:,} more findings" if others else ""
        raise make_error(first.code, f"{first.message}{more}", path=first.path, record=first.record, layer=first.layer)


class Findings:
    """Gathers findings: the first few of each code, and the number of all."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._told: list[Finding] = []
        self._counts: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Number of all findings."""
        return sum(self._counts.values())

    def add(
        self,
        code: str,
        message: str,
        *,
        path: str | None = None,
        record: str | int | None = None,
        layer: int | None = None,
    ) -> None:
        """One more; it is about the dataset where no other path is given."""
        self._counts[code] = self._counts.get(code, 0) + 1
        if self._counts[code] <= _SHOWN:
            where = self._location if path is None else path
            self._told.append(Finding(code=code, message=message, path=where, record=record, layer=layer))

    def told(self) -> tuple[Finding, ...]:
        """Those that are told, in the order they were found."""
        return tuple(self._told)


def beyond(pair: ComponentPair, slabs: Sequence[Slab], bounds: Bounds) -> list[int]:
    """Which layers of a component of one record, by their index, differ by more than is allowed.

    A whole layer may by its bound, and the row of a single token by :data:`ROW_FACTOR` times that.
    """
    bound = bounds.relative_rms[pair.stored.name]
    return [
        index
        for index, slab in enumerate(slabs)
        if not (slab.relative(slab.rms) <= bound and slab.relative(slab.row_rms) <= ROW_FACTOR * bound)
    ]


class Tally:
    """Adds up the differences of one component."""

    def __init__(self, pair: ComponentPair, bounds: Bounds) -> None:
        self._pair = pair
        self._bounds = bounds
        self._layers = [_Layer(layer) for layer in pair.stored.layers]

    def add(self, record: int, slabs: Iterable[Slab]) -> None:
        """Count one record."""
        for layer, slab in zip(self._layers, slabs, strict=True):
            layer.add(record, slab)

    def deviation(self) -> ComponentDeviation:
        """What was found so far."""
        component = self._pair.stored
        return ComponentDeviation(
            name=component.name,
            role=component.role,
            bound=self._bounds.relative_rms[component.name],
            bound_recorded=component.name in self._bounds.recorded,
            quantisation=self._bounds.quantisation.get(component.name, None if component.quant is None else "unknown"),
            layers=tuple(layer.deviation() for layer in self._layers),
        )


class _Layer:
    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._equal = self._values = 0
        self._square = self._scale = 0.0
        self._max_abs = self._relative_max = self._worst = 0.0
        self._worst_record = -1

    def add(self, record: int, slab: Slab) -> None:
        self._equal += slab.equal
        self._values += slab.num_values
        self._square += slab.rms * slab.rms * slab.num_values
        self._scale += slab.scale * slab.scale * slab.num_values
        self._max_abs = max(self._max_abs, slab.max_abs)
        self._relative_max = max(self._relative_max, slab.relative(slab.max_abs))
        worst = slab.relative(slab.rms)
        if self._worst_record < 0 or worst > self._worst:
            self._worst, self._worst_record = worst, record

    def deviation(self) -> LayerDeviation:
        count = max(self._values, 1)
        return LayerDeviation(
            layer=self._layer,
            equal_records=self._equal,
            max_abs=self._max_abs,
            rms=math.sqrt(self._square / count),
            relative_max=self._relative_max,
            relative_rms=math.sqrt(self._square / self._scale) if self._scale else (math.inf if self._square else 0.0),
            worst_rms=self._worst,
            worst_record=self._worst_record,
        )
