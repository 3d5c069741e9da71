"""The covered file ``inv_freq``, compared by value: its last bits differ between processors (SPEC.md, section 9)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvformat.errors import KVFormatError
from kvformat.spec import canonical, limits

__all__ = ["TOLERANCE", "InverseFrequencies", "frequencies_agree", "largest_difference"]

TOLERANCE = 1e-6
"""Relative difference up to which frequencies are the same."""

Real = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Integer = Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]


class FrequencyGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inverse frequencies of some layers."""

    layers: tuple[Integer, ...]
    values: tuple[Real, ...]


class InverseFrequencies(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``inv_freq``."""

    groups: tuple[FrequencyGroup, ...]


def largest_difference(one: InverseFrequencies | None, other: InverseFrequencies | None) -> float | None:
    """Largest relative difference; None where layers or numbers of frequencies do not correspond."""
    sides = []
    for content in (one, other):
        groups = () if content is None else content.groups
        sides.append({group.layers: [canonical.decode_real(value) for value in group.values] for group in groups})
    if {k: len(v) for k, v in sides[0].items()} != {k: len(v) for k, v in sides[1].items()}:
        return None
    largest = 0.0
    for layers, values in sides[0].items():
        for a, b in zip(values, sides[1][layers], strict=True):
            if a != b:
                largest = max(largest, abs(a - b) / max(abs(a), abs(b)))
    return largest


def frequencies_agree(one: bytes, other: bytes) -> bool:
    """Whether two contents mean the same, within the tolerance; False where one is not of the form."""
    try:
        sides = [canonical.convert(canonical.decode(data), InverseFrequencies) for data in (one, other)]
    except KVFormatError:
        return False
    largest = largest_difference(*sides)
    return largest is not None and largest <= TOLERANCE
