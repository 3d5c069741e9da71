"""What becomes of a schema."""

from __future__ import annotations

import pytest

from kvformat.errors import KVFormatError
from kvformat.extract.options import ModelOptions
from kvformat.extract.schemes import SCHEMES, quantised_components, quantised_schema, scheme_named
from kvformat.spec.rules import check_schema
from kvformat.spec.schema import Axis, Extra, Last, Schema
from tests.write.make import component, scaled, schema

UNIFORM = Schema.uniform(num_layers=3, num_kv_heads=2, head_dim=8, layers=(0, 4, 7))


def sizes(of: Schema) -> dict[str, tuple[object, ...]]:
    return {c.name: (c.dtype, c.role, *(axis.size for axis in c.axes)) for c in of.components}


def test_int8_has_a_scale_for_each_channel_of_keys_and_each_token_of_values():
    found = quantised_schema(UNIFORM, scheme_named("int8"))
    check_schema(found)
    assert sizes(found) == {
        "k": ("I8", "key", "tokens", 2, 8),
        "v": ("I8", "value", "tokens", 2, 8),
        "k_scale": ("F32", "key_scale", 1, 2, 8),
        "v_scale": ("F32", "value_scale", "tokens", 2, 1),
    }
    assert {c.layers for c in found.components} == {(0, 4, 7)}
    assert [c.stage for c in found.components] == ["attention", None, None, None]
    assert (found.extras, found.dims, found.shared) == (UNIFORM.extras, UNIFORM.dims, UNIFORM.shared)


@pytest.mark.parametrize("name", ["INT8", "Int8", "int8"])
def test_upper_and_lower_case_are_one(name):
    assert scheme_named(name).name == ModelOptions(model="m", quantise=name).quantise == "int8"


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "F8_E4M3"), ("fp8-e5m2", "F8_E5M2")])
def test_floats_have_a_scale_for_each_head(name, dtype):
    found = quantised_schema(UNIFORM, scheme_named(name))
    check_schema(found)
    assert sizes(found) == {
        "k": (dtype, "key", "tokens", 2, 8),
        "v": (dtype, "value", "tokens", 2, 8),
        "k_scale": ("F32", "key_scale", 1, 2, 1),
        "v_scale": ("F32", "value_scale", 1, 2, 1),
    }


@pytest.mark.parametrize("name", list(SCHEMES))
def test_latents_and_their_rope_keys_are_quantised_and_the_rest_is_left(name):
    """Roles that are not keys or values in any form stay as they are."""
    given = schema(
        component("latent", "tokens", 6, role="latent", dtype="BF16", layers=(0, 1)),
        component("rope_key", "tokens", 4, role="rope_key", dtype="BF16", layers=(0, 1)),
        component("h", "tokens", 5, role="hidden", dtype="BF16"),
        component("s", 3, 3, role="state", dtype="F32", layers=(2,)),
        component("x", "tokens", dtype="I8"),
    )
    found = quantised_schema(given, scheme_named(name))
    check_schema(found)
    assert found.components[2:5] == given.components[2:5]
    last = (6, 4) if name == "int8" else (1, 1)
    scales = found.components[5:]
    assert [(c.name, c.role, *(axis.size for axis in c.axes)) for c in scales] == [
        ("latent_scale", "other", 1, last[0]),
        ("rope_key_scale", "other", 1, last[1]),
    ]


def test_tokens_may_stand_in_any_place_or_be_the_last_ones_only():
    given = schema(
        component("k", 2, 8, "tokens", role="key", dtype="BF16"),
        component("v", Last(last=5), 2, 8, role="value", dtype="BF16"),
    )
    found = {one.source.name: one for one in quantised_components(given, scheme_named("int8"))}
    assert [axis.size for axis in found["k"].scale.axes] == [2, 8, 1]
    assert [axis.size for axis in found["v"].scale.axes] == [Last(last=5), 2, 1]
    assert (found["k"].shared, found["v"].shared) == ((3,), (3,))
    heads = {one.source.name: one.shared for one in quantised_components(given, scheme_named("fp8"))}
    assert heads == {"k": (2, 3), "v": (1, 3)}
    check_schema(quantised_schema(given, scheme_named("int8")))


@pytest.mark.parametrize("name", ["int4", "", None, 8])
def test_no_such_scheme(name):
    with pytest.raises(KVFormatError, match="there are int8, fp8, fp8-e5m2") as caught:
        scheme_named(name)
    assert caught.value.code == "E081"


@pytest.mark.parametrize(
    ("code", "message", "given"),
    [
        ("E081", "is I8 already", scaled()),
        ("E081", "the schema has none", schema(component("x", "tokens"))),
        (
            "E081",
            "'x_scale' is taken",
            schema(component("x", "tokens", 2, role="key"), component("x_scale", "tokens")),
        ),
        (
            "E081",
            "'x_scale' is taken",
            schema(
                component("x", "tokens", 2, role="key"),
                extras=(Extra(name="x_scale", axes=(Axis(name="n", size=1),), dtype="I32"),),
            ),
        ),
        ("E302", "one axis of tokens", schema(component("x", "tokens", role="key"))),
        ("E302", "one axis of tokens", schema(component("x", 2, 3, role="value"))),
        ("E302", "one axis of tokens", schema(component("x", "tokens", "tokens", 3, role="value"))),
        ("E302", "one axis of tokens", schema(component("x", "boxes", 3, role="value"), dims=("tokens", "boxes"))),
    ],
)
@pytest.mark.parametrize("name", list(SCHEMES))
def test_refused(code, message, given, name):
    with pytest.raises(KVFormatError, match=message) as caught:
        quantised_schema(given, scheme_named(name))
    assert caught.value.code == code


def test_keys_and_values_stay_neighbours():
    """A loader that takes them as they are stored copies both in one go."""
    names = [c.name for c in quantised_schema(UNIFORM, scheme_named("int8")).components]
    assert names == ["k", "v", "k_scale", "v_scale"]
