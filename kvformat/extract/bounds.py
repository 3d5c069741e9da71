"""The covered file ``bounds``: how far K and V that are computed again may be from the stored ones.

The same model on other hardware, in another batch or with another attention implementation gives other last bits, and
each layer works on what the one below rounded. The bounds are measured (``spec/design/016-audit-bounds.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kvformat.errors import make_error
from kvformat.extract.schemes import SCHEMES
from kvformat.read.check_covered import read_covered
from kvformat.read.error_bounds import LABEL, ComponentBound, ErrorBounds, compared, parse_bounds
from kvformat.spec import canonical
from kvformat.spec.context import ComputeDtype
from kvformat.spec.paths import covered_path
from kvformat.spec.schema import Component, Schema

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["ROW_FACTOR", "Bounds", "Quantisation", "bounds_file", "read_bounds"]

ROW_FACTOR = 4.0
"""The row of one token may differ by so many times the bound of its layer."""

# Relative RMS error of a layer of one record, by the dtype the model computes in.
_RECOMPUTED: Mapping[str, float] = {"BF16": 0.1, "F16": 0.0125, "F32": 1e-4}
# Twice the unit roundoff: both sides are rounded to the stored dtype, perhaps to neighbouring values.
_ROUNDED: Mapping[str, float] = {"BF16": 2**-7, "F16": 2**-10, "F32": 2**-23}


class Quantisation(NamedTuple):
    """How a component was quantised, and the relative RMS error that this alone makes in a layer of a record."""

    scheme: str
    relative_rms: float


class Bounds(NamedTuple):
    """Bounds of a dataset's components.

    Attributes
    ----------
    relative_rms
        By component, scales left out.
    quantisation
        By component, the scheme of those whose scheme is recorded.
    recorded
        Components whose bound is the dataset's own; of the others it is the default.
    """

    relative_rms: Mapping[str, float]
    quantisation: Mapping[str, str]
    recorded: frozenset[str]


def bounds_file(
    schema: Schema,
    compute_dtype: ComputeDtype,
    *,
    quantised: Mapping[str, Quantisation] = MappingProxyType({}),
) -> bytes:
    """The covered file ``bounds`` of a dataset: what computing again may change, and quantisation besides.

    Parameters
    ----------
    schema
        Of the records as they are stored.
    compute_dtype
        What the model computes in.
    quantised
        By name, how 8-bit components were quantised; those that are not named get the default of their dtype. Both
        errors are added: the RMS of a sum is at most the sum of both.

    Raises
    ------
    UsageError
        E081 where ``quantised`` names another component, or a scheme that bounds nothing.
    """
    components = {component.name: component for component in compared(schema)}
    unknown = sorted(name for name in quantised if name not in components or components[name].quant is None)
    if unknown:
        raise make_error("E081", f"quantised names {', '.join(unknown)}, which the schema has not as 8-bit components")
    found = []
    for name in sorted(components, key=str.encode):
        bound, scheme = _default(components[name], compute_dtype), None
        if name in quantised:
            scheme, lost = quantised[name]
            if not 0 <= lost < 1:
                raise make_error("E081", f"quantising {name!r} may lose 0 to 1 of its RMS, found {lost}")
            bound = _RECOMPUTED[compute_dtype] + lost
        found.append(ComponentBound(name=name, relative_rms=canonical.encode_real(bound), quantisation=scheme))
    return canonical.encode(ErrorBounds(components=tuple(found)))


def read_bounds(dataset: Dataset, *, compute_dtype: ComputeDtype | None = None) -> Bounds:
    """Bounds of a dataset: those it records, else the default of its compute dtype.

    Parameters
    ----------
    compute_dtype
        Taken where the dataset's context is unknown. Without it, values are taken to be computed in the stored dtype.

    Raises
    ------
    FormatError
        E044 where the covered file is not as specified.
    DamageError
        E002, E005, E006.
    """
    model = dataset.context.model
    compute = compute_dtype if model is None else model.compute_dtype
    components = {component.name: component for component in compared(dataset.schema)}
    recorded = _recorded(dataset)
    usual = {name: _default(component, compute) for name, component in components.items()}
    return Bounds(
        usual | {name: canonical.decode_real(bound.relative_rms) for name, bound in recorded.items()},
        {name: bound.quantisation for name, bound in recorded.items() if bound.quantisation is not None},
        frozenset(recorded),
    )


def _recorded(dataset: Dataset) -> dict[str, ComponentBound]:
    """By component, what the dataset's covered file says; empty without one."""
    file = dataset.manifest.file(LABEL)
    if file is None:
        return {}
    found = parse_bounds(
        read_covered(dataset.reader, file), dataset.schema, path=dataset.reader.path(covered_path(file.sha256))
    )
    return {bound.name: bound for bound in found}


def _default(component: Component, compute_dtype: ComputeDtype | None) -> float:
    if component.quant is not None:
        lost = max(scheme.relative_rms for scheme in SCHEMES.values() if scheme.dtype == component.dtype)
        return _RECOMPUTED[compute_dtype or "BF16"] + lost
    if compute_dtype is None:
        return _RECOMPUTED[component.dtype]
    # Where less is stored than was computed, rounding may be the larger error.
    return max(_RECOMPUTED[compute_dtype], _ROUNDED[component.dtype])
