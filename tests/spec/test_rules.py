"""Schemas built of the structs themselves, which check nothing when they are made: refused with the format's codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs

import kvformat
from kvformat import Axis, Component, Extra, Last, Quant, Schema, Shared
from kvformat.errors import KVFormatError
from kvformat.spec import canonical, limits
from kvformat.spec.layout import Layout
from kvformat.spec.rules import check_schema
from kvformat.testing.strategies import schemas

CODES = {"E018", *(f"E{number:03}" for number in range(30, 41))}
TOKENS = Axis(name="tokens", size="tokens")


def component(**changed: Any) -> Component:
    usual = {"name": "k", "role": "key", "layers": (0,), "axes": (TOKENS,), "dtype": "F32", "codec": "raw"}
    return Component(**{**usual, "stage": "attention", **changed})


def of(*components: Any, **changed: Any) -> Schema:
    return Schema(**{"dims": ("tokens",), "components": components, "extras": (), "shared": (), **changed})


def axis(size: Any, name: Any = "heads") -> Schema:
    return of(component(axes=(TOKENS, Axis(name=name, size=size))))


OUTSIDE: dict[str, tuple[Any, str]] = {
    "no components": (of(), "E018"),
    "no dims": (of(component(), dims=()), "E032"),
    "too many dims": (of(component(), dims=("tokens", *(f"d{n}" for n in range(limits.MAX_DIMS)))), "E032"),
    "no axes": (of(component(axes=())), "E018"),
    "too many axes": (of(component(axes=tuple(Axis(name=f"a{n}", size=1) for n in range(8)))), "E018"),
    "axis of zero": (axis(0), "E033"),
    "axis below zero": (axis(-1), "E018"),
    "axis beyond a record": (axis(2**48), "E033"),
    "axis beyond integers": (axis(2**53), "E018"),
    "axis beyond words": (axis(2**64), "E018"),
    "axis of a fraction": (axis(1.5), "E018"),
    "axis of a whole fraction": (axis(2.0), "E018"),
    "axis of a truth value": (axis(True), "E018"),
    "axis of nothing": (axis(None), "E018"),
    "axis of an unknown dim": (axis("boxes"), "E032"),
    "window of zero": (axis(Last(last=0)), "E033"),
    "window below zero": (axis(Last(last=-1)), "E018"),
    "window of text": (axis(Last(last="5")), "E018"),
    "axis without a name": (axis(1, ""), "E030"),
    "axis with a number for a name": (axis(1, 7), "E018"),
    "overlong name": (of(component(name="k" * 65)), "E030"),
    "surrogate in a name": (of(component(name="\ud800")), "E030"),
    "bytes for a name": (of(component(name=b"k")), "E018"),
    "overlong dim": (of(component(), dims=("tokens", "d" * 65)), "E030"),
    "no layers": (of(component(layers=())), "E034"),
    "layer below zero": (of(component(layers=(-1,))), "E018"),
    "layer beyond": (of(component(layers=(limits.MAX_LAYER + 1,))), "E034"),
    "layers of text": (of(component(layers=("0",))), "E018"),
    "list of layers": (of(component(layers=[0])), "E018"),
    "range of layers": (of(component(layers=range(2))), "E018"),
    "set of components": (of(components={component()}), "E018"),
    "nothing for a component": (of(None), "E018"),
    "dict for a component": (of(structs.asdict(component(axes=(), role="other"))), "E018"),
    "object for a component": (of(object()), "E018"),
    "unknown role": (of(component(role="keys")), "E018"),
    "unknown stage": (of(component(stage="late")), "E018"),
    "unknown codec": (of(component(codec="zip")), "E037"),
    "unknown dtype": (of(component(dtype="F64")), "E031"),
    "list for a dtype": (of(component(dtype=["F32"])), "E018"),
    "text for a quant": (of(component(quant="scale")), "E018"),
    "quant of nothing": (of(component(quant=Quant(scale=None))), "E018"),
    "extra without axes": (of(component(), extras=(Extra(name="x", axes=(), dtype="I32"),)), "E018"),
    "extra named pad": (of(component(), extras=(Extra(name="pad", axes=(TOKENS,), dtype="I32"),)), "E030"),
    "shared below zero": (of(component(), shared=(Shared(layer=1, source=-1),)), "E018"),
    "text for dims": (of(component(), dims="tokens"), "E018"),
}


@pytest.mark.parametrize("case", list(OUTSIDE))
def test_what_is_out_of_bounds_is_refused_before_anything_is_made(case: str, tmp_path: Path) -> None:
    schema, code = OUTSIDE[case]
    with pytest.raises(kvformat.FormatError) as refused:
        kvformat.create(tmp_path / "ds", schema=schema, context=kvformat.Context.unknown())
    assert refused.value.code == code
    assert "schema" in refused.value.message
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize("schema", [None, {}])
def test_what_is_no_schema_at_all_is_an_argument_of_another_type(schema: object, tmp_path: Path) -> None:
    with pytest.raises(kvformat.UsageError, match=r"E081.*schema must be a Schema"):
        kvformat.create(tmp_path / "ds", schema=schema, context=kvformat.Context.unknown())
    with pytest.raises(kvformat.FormatError, match="E018"):
        check_schema(schema)


def test_the_message_says_where() -> None:
    with pytest.raises(KVFormatError, match=r"Expected `tuple`, got `list` - at `\$\.components\[1\]\.layers`"):
        check_schema(of(component(), component(name="v", role="value", stage=None, layers=[0])))


def places(value: object, steps: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Ways to everything in a schema but the whole."""
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, Struct):
        inner = [(name, getattr(value, name)) for name in value.__struct_fields__]
    elif isinstance(value, tuple):
        inner = list(enumerate(value))
    for step, item in inner:
        yield (*steps, step)
        yield from places(item, (*steps, step))


def replaced(value: Any, steps: tuple[str | int, ...], by: object) -> Any:
    if not steps:
        return by
    step, *rest = steps
    if isinstance(step, str):
        return structs.replace(value, **{step: replaced(getattr(value, step), tuple(rest), by)})
    return (*value[:step], replaced(value[step], tuple(rest), by), *value[step + 1 :])


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([2**16, 2**31, 2**32, 2**48, 2**53 - 1, 2**53, 2**64, 2**70])
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["k" * 64, "k" * 65, "sums", "tokens", "token_ids", "raw", "key", "F32", "I8", "U64", "\udfff"])
    | st.binary(max_size=2)
    | st.lists(st.integers(0, 3), max_size=3)
    | st.lists(st.integers(0, 3), max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
    | st.sampled_from([(), set(), object, object(), TOKENS, Last(last=3), Quant(scale="k"), component(), range(3)])
)


def refusal(schema: Schema) -> str | None:
    try:
        check_schema(schema)
    except KVFormatError as error:
        return error.code
    return None


@given(schema=schemas(), data=st.data())
def test_an_odd_schema_is_refused_with_its_own_codes_or_is_one(schema: Schema, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 2))):
        known = list(places(schema))
        if known:
            schema = replaced(schema, data.draw(st.sampled_from(known)), data.draw(ODD))
    if refusal(schema) is not None:
        assert refusal(schema) in CODES
        return
    encoded = canonical.encode(schema)
    assert canonical.convert(canonical.decode(encoded), Schema) == schema
    assert Layout(schema).header_size(limits.VERSION, 1) % limits.ALIGNMENT == 0
