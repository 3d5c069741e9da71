"""The rules of a schema that its types do not express (SPEC.md, section 8)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise

from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical, limits
from kvformat.spec.document import MEDIA_ENTRY_NBYTES
from kvformat.spec.schema import (
    COMPONENT_DTYPES,
    ITEM_SIZES,
    QUANTISED_DTYPES,
    SHARED_ROLES,
    STAGED_ROLES,
    Axis,
    Component,
    Last,
    Schema,
)

__all__ = ["check_schema"]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_RESERVED = ("sums", "pad")
_SCALE_ROLES = {"key": "key_scale", "value": "value_scale"}


def check_schema(schema: Schema, *, requires: Collection[str] = (), path: str | None = None) -> None:
    """Check every rule, in the order of their codes.

    Raises
    ------
    FormatError
        E018 for a value of another type, form or range than the structs declare, which they do not check when they
        are made; E030 to E040. The message names the member.
    """
    del requires  # no feature of version 1.0 changes a rule
    for message in _forms(schema):
        raise make_error("E018", f"schema: {message}", path=path)
    for rule in (
        _names,
        _dtypes,
        _dims,
        _sizes,
        _layers,
        _overlap,
        _stages,
        _codecs,
        _quant,
        _shared,
        _reserved_extras,
    ):
        for code, message in rule(schema):
            raise make_error(code, f"schema: {message}", path=path)


Faults = Iterator[tuple[str, str]]


def _forms(schema: Schema) -> Iterator[str]:
    try:
        decoded = canonical.convert(canonical.plain(schema), Schema)
    except KVFormatError as error:
        yield error.message
    except (TypeError, ValueError, RecursionError) as error:  # of what no JSON value stands for
        yield f"{type(error).__name__}: {error}; use strings, integers, tuples and the structs of the schema"
    else:
        yield from _other_types(schema, decoded, "$")


def _other_types(given: object, decoded: object, where: str) -> Iterator[str]:
    """Where a value is only alike in JSON: a list for a tuple, a dict for a struct, bytes for a string."""
    if type(given) is not type(decoded):
        yield f"Expected `{type(decoded).__name__}`, got `{type(given).__name__}` - at `{where}`"
    elif isinstance(decoded, Struct):
        for name in decoded.__struct_fields__:
            yield from _other_types(getattr(given, name), getattr(decoded, name), f"{where}.{name}")
    elif isinstance(decoded, tuple) and isinstance(given, tuple):
        for index, (one, other) in enumerate(zip(given, decoded, strict=True)):
            yield from _other_types(one, other, f"{where}[{index}]")


def _tensors(schema: Schema) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    for component in schema.components:
        yield component.name, component.axes
    for extra in schema.extras:
        yield extra.name, extra.axes


def _names(schema: Schema) -> Faults:
    tensors = [name for name, _ in _tensors(schema)]
    groups = [("dims", list(schema.dims)), ("tensors", tensors)]
    groups += [(f"axes of {name!r}", [axis.name for axis in axes]) for name, axes in _tensors(schema)]
    for what, names in groups:
        for name, count in Counter(names).items():
            if not _NAME.fullmatch(name):
                yield "E030", f"{what}: {name!r} does not match [a-z][a-z0-9_]{{0,63}}"
            if count > 1:
                yield "E030", f"{what}: {name!r} stands twice"
    for name in tensors:
        if name in _RESERVED:
            yield "E030", f"tensors: {name!r} is reserved"


def _dtypes(schema: Schema) -> Faults:
    for component in schema.components:
        if component.dtype not in COMPONENT_DTYPES:
            yield (
                "E031",
                f"component {component.name!r}: dtype {component.dtype!r} is none of {_list(COMPONENT_DTYPES)}",
            )
    for extra in schema.extras:
        if extra.dtype not in ITEM_SIZES:
            yield "E031", f"extra {extra.name!r}: dtype {extra.dtype!r} is none of {_list(ITEM_SIZES)}"


def _dims(schema: Schema) -> Faults:
    if not 1 <= len(schema.dims) <= limits.MAX_DIMS or schema.dims[0] != "tokens":
        yield "E032", f"dims must be 1 to {limits.MAX_DIMS} names beginning with 'tokens', found {list(schema.dims)}"
    for name, axes in _tensors(schema):
        for axis in axes:
            if isinstance(axis.size, str) and axis.size not in schema.dims:
                yield "E032", f"{name!r}: axis {axis.name!r} has size {axis.size!r}, which is no dim"


def _sizes(schema: Schema) -> Faults:
    total = 0
    for component in schema.components:
        total += max(1, len(component.layers)) * _least(component.axes) * ITEM_SIZES[component.dtype]
    for extra in schema.extras:
        total += _least(extra.axes) * ITEM_SIZES[extra.dtype]
    for name, axes in _tensors(schema):
        for axis in axes:
            if (axis.size.last if isinstance(axis.size, Last) else axis.size) == 0:
                yield "E033", f"{name!r}: axis {axis.name!r} is zero"
    if total > limits.MAX_FILE_NBYTES:
        yield "E033", f"a record of one token has {total} bytes, more than {limits.MAX_FILE_NBYTES}"


def _least(axes: tuple[Axis, ...]) -> int:
    product = 1
    for axis in axes:
        product *= axis.size if isinstance(axis.size, int) else 1
    return product


def _layers(schema: Schema) -> Faults:
    for component in schema.components:
        layers = component.layers
        ascending = all(a < b for a, b in pairwise(layers))
        if not layers or not ascending or layers[-1] > limits.MAX_LAYER:
            yield (
                "E034",
                f"component {component.name!r}: layers must be non-empty, ascending, at most {limits.MAX_LAYER}",
            )


def _overlap(schema: Schema) -> Faults:
    seen: dict[tuple[str, int], str] = {}
    for component in schema.components:
        if component.role == "other":
            continue
        for layer in component.layers:
            other = seen.setdefault((component.role, layer), component.name)
            if other != component.name:
                yield "E035", f"role {component.role!r} covers layer {layer} in {other!r} and in {component.name!r}"


def _stages(schema: Schema) -> Faults:
    for component in schema.components:
        if (component.role in STAGED_ROLES) != (component.stage is not None):
            verb = "needs" if component.role in STAGED_ROLES else "has no"
            yield "E036", f"component {component.name!r} of role {component.role!r} {verb} stage"


def _codecs(schema: Schema) -> Faults:
    for component in schema.components:
        if component.codec != "raw":
            yield "E037", f"component {component.name!r}: codec {component.codec!r} is not 'raw'"


def _quant(schema: Schema) -> Faults:
    by_name = {component.name: component for component in schema.components}
    used = set()
    for component in schema.components:
        needs = component.dtype in QUANTISED_DTYPES and component.role != "other"
        if needs and component.quant is None:
            yield "E038", f"component {component.name!r} of dtype {component.dtype} names no scale"
        if component.quant is None:
            continue
        if not needs:
            yield "E038", f"component {component.name!r} of dtype {component.dtype} takes no scale"
        scale = by_name.get(component.quant.scale)
        if scale is None or not _fits(component, scale):
            yield "E038", f"component {component.name!r}: {component.quant.scale!r} is no scale that fits it"
        used.add(component.quant.scale)
    for component in schema.components:
        if component.role in ("key_scale", "value_scale") and component.name not in used:
            yield "E038", f"component {component.name!r} is the scale of nothing"


def _fits(component: Component, scale: Component) -> bool:
    return (
        scale.dtype == "F32"
        and scale.quant is None
        and scale.role == _SCALE_ROLES.get(component.role, "other")
        and scale.layers == component.layers
        and len(scale.axes) == len(component.axes)
        and all(s.size in (1, c.size) for s, c in zip(scale.axes, component.axes, strict=True))
    )


def _shared(schema: Schema) -> Faults:
    stored = {layer for c in schema.components if c.role in SHARED_ROLES for layer in c.layers}
    layers = [shared.layer for shared in schema.shared]
    if any(a >= b for a, b in pairwise(layers)):
        yield "E039", "shared: layers must ascend"
    for shared in schema.shared:
        if shared.layer in stored or shared.source not in stored or shared.layer > limits.MAX_LAYER:
            yield (
                "E039",
                f"shared: layer {shared.layer} must have no K/V of its own, and source {shared.source} must have",
            )


def _reserved_extras(schema: Schema) -> Faults:
    forms: dict[str, tuple[str, tuple[tuple[object, ...], ...]]] = {
        "token_ids": ("I32", (("tokens",),)),
        "position_ids": ("I32", ((1, "tokens"), (3, "tokens"))),
        "mask": ("U64", ((2,),)),
        "media": ("U8", (("media", MEDIA_ENTRY_NBYTES),)),
    }
    given = {extra.name for extra in schema.extras}
    for extra in schema.extras:
        if extra.name not in forms:
            continue
        dtype, shapes = forms[extra.name]
        if extra.dtype != dtype or tuple(axis.size for axis in extra.axes) not in shapes:
            yield "E040", f"extra {extra.name!r} must be {dtype} of shape {' or '.join(map(str, shapes))}"
        if "token_ids" not in given:
            yield "E040", f"extra {extra.name!r} needs 'token_ids' beside it"


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
