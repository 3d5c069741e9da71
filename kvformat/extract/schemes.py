"""Ways to store keys and values in 8 bits, by name, and what becomes of a schema. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.spec.schema import QUANTISED_DTYPES, Axis, Component, Last, Quant, Role, Schema

__all__ = ["SCHEMES", "Grain", "Quantised", "Scheme", "quantised_components", "quantised_schema", "scheme_named"]

Grain = Literal["channel", "head", "token"]
"""What one scale is for: a channel of a head over all tokens, a head over all tokens, or a head at one token."""


class Scheme(NamedTuple):
    """A way to store keys and values in 8 bits.

    Attributes
    ----------
    name
        As users give it.
    dtype
        safetensors dtype of the stored values.
    grains
        By role of a component, what one of its scales is for. Components of other roles stay as they are.
    relative_rms
        RMS error of a layer of one record over the RMS of that layer, at most: what is above is refused.
    """

    name: str
    dtype: str
    grains: Mapping[Role, Grain]
    relative_rms: float


class Quantised(NamedTuple):
    """A component that is quantised.

    Attributes
    ----------
    source
        As it is extracted.
    stored, scale
        As it is stored, and the component of its scales.
    shared
        Axes of the record's tensor, the layer axis being 0, that one scale extends over.
    """

    source: Component
    stored: Component
    scale: Component
    shared: tuple[int, ...]


_CHANNELS: Mapping[Role, Grain] = {"key": "channel", "value": "token", "latent": "channel", "rope_key": "channel"}
_HEADS: Mapping[Role, Grain] = {"key": "head", "value": "head", "latent": "head", "rope_key": "head"}
SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "I8", _CHANNELS, 0.05),
        Scheme("fp8", "F8_E4M3", _HEADS, 2.0**-4),
        Scheme("fp8-e5m2", "F8_E5M2", _HEADS, 2.0**-3),
    )
}
"""By name. ``spec/design/015-quantised-storage.md`` says why these, and what each loses."""
_SCALE_ROLES: Mapping[Role, Role] = {"key": "key_scale", "value": "value_scale"}


def scheme_named(name: str) -> Scheme:
    """A scheme; upper and lower case are one. E081 for a name there is none of."""
    found = SCHEMES.get(str(name).lower())
    if found is None:
        raise make_error("E081", f"no quantisation {name!r}; there are {', '.join(SCHEMES)}")
    return found


def quantised_components(schema: Schema, scheme: Scheme) -> tuple[Quantised, ...]:
    """What of a schema a scheme quantises, in the order of the schema.

    Raises
    ------
    UsageError
        E081 where nothing is left to quantise, or a component of the scale's name is there already.
    InputError
        E302 for a component whose axes give scales no place.
    """
    taken = {component.name for component in schema.components} | {extra.name for extra in schema.extras}
    found = []
    for component in schema.components:
        grain = scheme.grains.get(component.role)
        if grain is None:
            continue
        if component.dtype in QUANTISED_DTYPES:
            raise make_error(
                "E081", f"component {component.name!r} is {component.dtype} already; quantise what a model computed"
            )
        name = f"{component.name}_scale"
        if name in taken:
            raise make_error("E081", f"{name!r} is taken, and the scales of {component.name!r} need it: rename it")
        shared = _shared(component, grain)
        axes = tuple(
            Axis(name=axis.name, size=1) if number in shared else axis for number, axis in enumerate(component.axes, 1)
        )
        scale = Component(
            name=name,
            role=_SCALE_ROLES.get(component.role, "other"),
            layers=component.layers,
            axes=axes,
            dtype="F32",
            codec="raw",
        )
        stored = replace(component, dtype=scheme.dtype, quant=Quant(scale=name))
        found.append(Quantised(component, stored, scale, shared))
    if not found:
        roles = ", ".join(scheme.grains)
        raise make_error("E081", f"{scheme.name} quantises components of the roles {roles}; the schema has none")
    return tuple(found)


def quantised_schema(schema: Schema, scheme: Scheme) -> Schema:
    """The schema of a dataset whose keys and values are stored by a scheme; errors as :func:`quantised_components`.

    Scales come behind all other components, in the order of what they scale: keys and values stay neighbours, which
    are copied in one go.
    """
    found = {quantised.source.name: quantised for quantised in quantised_components(schema, scheme)}
    kept = tuple(found[c.name].stored if c.name in found else c for c in schema.components)
    return replace(schema, components=(*kept, *(quantised.scale for quantised in found.values())))


def _shared(component: Component, grain: Grain) -> tuple[int, ...]:
    """Axes that one scale extends over; E302 where they are not tokens and channels, and perhaps heads between."""
    tokens = [n for n, axis in enumerate(component.axes, 1) if not isinstance(axis.size, int)]
    channels = [n for n, axis in enumerate(component.axes, 1) if isinstance(axis.size, int)]
    known = all(axis.size == "tokens" or isinstance(axis.size, int | Last) for axis in component.axes)
    if len(tokens) != 1 or not channels or not known:
        axes = ", ".join(f"{axis.name}: {axis.size}" for axis in component.axes)
        raise make_error(
            "E302",
            f"component {component.name!r} has axes [{axes}]; scales need one axis of tokens and one or more of fixed "
            "sizes, the last of them channels: leave it as it is, without quantisation",
        )
    by_grain = {"channel": tokens, "token": channels[-1:], "head": sorted([*tokens, channels[-1]])}
    return tuple(by_grain[grain])
