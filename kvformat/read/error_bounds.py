"""The covered file ``bounds``: how far K and V that are computed again may be off (SPEC.md, section 9)."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.read.frequencies import Real
from kvformat.spec import canonical
from kvformat.spec.context import Label
from kvformat.spec.schema import Component, Schema

__all__ = ["LABEL", "ComponentBound", "ErrorBounds", "compared", "parse_bounds"]

LABEL = "bounds"
"""Name of the covered file."""


class ComponentBound(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bound of one component.

    Parameters
    ----------
    name
        Component of the schema.
    relative_rms
        Largest RMS error of a layer of one record, over the RMS of that layer: a real. Of an 8-bit component it holds
        after dequantisation, and includes what quantisation took away.
    quantisation
        How an 8-bit component was quantised.
    """

    name: str
    relative_rms: Real
    quantisation: Label | None = None


class ErrorBounds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``bounds``."""

    components: tuple[ComponentBound, ...]


def compared(schema: Schema) -> tuple[Component, ...]:
    """Components that hold values; scales are part of those they belong to."""
    scales = {component.quant.scale for component in schema.components if component.quant is not None}
    return tuple(component for component in schema.components if component.name not in scales)


def parse_bounds(data: bytes, schema: Schema, *, path: object = None) -> tuple[ComponentBound, ...]:
    """Bounds in a covered file of a dataset of this schema, in ascending order of their names.

    Parameters
    ----------
    path
        Of the file, for messages.

    Raises
    ------
    FormatError
        E044 where it is not of the form: bytes that are no canonical JSON of these members, names that are no
        components of values or not in order, and numbers that are negative or not finite.
    """
    try:
        found = canonical.convert(canonical.decode(data), ErrorBounds).components
    except KVFormatError as error:
        raise make_error("E044", f"covered file {LABEL!r}: {error.message}", path=path) from None
    names = [bound.name for bound in found]
    known = {component.name for component in compared(schema)}
    odd = next((name for name in names if name not in known), None)
    if odd is not None:
        raise make_error(
            "E044",
            f"covered file {LABEL!r}: {odd!r:.80} is no component of values; there are {', '.join(sorted(known))}",
            path=path,
        )
    if any(a.encode() >= b.encode() for a, b in pairwise(names)):
        message = f"covered file {LABEL!r}: names must be in strictly ascending order, found {', '.join(names)}"
        raise make_error("E044", message, path=path)
    for bound in found:
        if not canonical.is_real(bound.relative_rms) or canonical.decode_real(bound.relative_rms) < 0:
            raise make_error(
                "E044",
                f"covered file {LABEL!r}: the bound of {bound.name!r} is a finite number from 0, found "
                f"{canonical.decode_real(bound.relative_rms)}",
                path=path,
            )
    return found
