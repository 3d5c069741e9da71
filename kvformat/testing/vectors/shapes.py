"""Heterogeneous models: windows, latent attention, shared layers, states, scales, error bounds."""

from __future__ import annotations

from kvformat.spec import canonical
from kvformat.spec.context import real
from kvformat.spec.schema import Last, Schema, Shared
from kvformat.testing.vectors.case import HEADS, TOKEN_IDS, TOKENS, Case, kv, schema_of, usual_entries
from kvformat.testing.vectors.values import component

__all__ = ["CASES"]


def _sliding_case() -> Case:
    width = ("head_dim", 4)
    local = ("tokens", Last(last=4))
    schema = schema_of(
        component("k_local", "key", (0, 1, 3), local, HEADS, width, stage="attention"),
        component("v_local", "value", (0, 1, 3), local, HEADS, width),
        component("k_global", "key", (2,), TOKENS, HEADS, width, stage="attention"),
        component("v_global", "value", (2,), TOKENS, HEADS, width),
    )
    return Case(name="sliding-window", schema=schema, entries=usual_entries(9, 4, 3, 1))


def _mla_case() -> Case:
    schema = schema_of(
        component("latent", "latent", (0, 1, 2), TOKENS, ("rank", 12), stage="normed"),
        component("rope_key", "rope_key", (0, 1, 2), TOKENS, ("width", 4), stage="attention"),
    )
    return Case(name="latent-attention", schema=schema, entries=usual_entries(5, 2))


def _shared_case() -> Case:
    schema = Schema(
        dims=("tokens",),
        components=kv((0, 3)),
        extras=(TOKEN_IDS,),
        shared=(Shared(layer=1, source=0), Shared(layer=2, source=0), Shared(layer=65_535, source=3)),
    )
    return Case(name="shared-layers", schema=schema, entries=usual_entries(3, 6))


def _hidden_case() -> Case:
    schema = schema_of(
        *kv((2, 7)),
        component("h", "hidden", (7,), TOKENS, ("width", 6), dtype="F32"),
        component("s", "state", (2,), HEADS, ("rows", 3), ("columns", 3), dtype="F32"),
        component("gate", "other", (2, 7), TOKENS, dtype="I8"),
        component("route", "other", (2,), TOKENS, ("choices", 2), dtype="F16"),
    )
    return Case(name="hidden-and-state", schema=schema, entries=usual_entries(2, 4))


def _bounds_case() -> Case:
    """Components in 8 bits, whose error bounds are recorded."""
    width = ("head_dim", 4)
    schema = schema_of(
        component("k", "key", (0, 1), TOKENS, HEADS, width, dtype="I8", stage="attention", scale="k_scale"),
        component("v", "value", (0, 1), TOKENS, HEADS, width),
        component("k_scale", "key_scale", (0, 1), ("tokens", 1), HEADS, width, dtype="F32"),
    )
    bounds = [
        {"name": "k", "quantisation": "int8", "relative_rms": real(0.125)},
        {"name": "v", "relative_rms": real(0.0)},
    ]
    return Case(
        name="error-bounds",
        schema=schema,
        entries=usual_entries(3, 5),
        options={"files": {"bounds": canonical.encode({"components": bounds})}},
    )


def _int8_case() -> Case:
    width, one = ("head_dim", 4), ("head_dim", 1)
    schema = schema_of(
        component("k", "key", (0, 1), TOKENS, HEADS, width, dtype="I8", stage="raw", scale="k_scale"),
        component("v", "value", (0, 1), TOKENS, HEADS, width, dtype="I8", scale="v_scale"),
        component("k_scale", "key_scale", (0, 1), ("tokens", 1), HEADS, width, dtype="F32"),
        component("v_scale", "value_scale", (0, 1), TOKENS, HEADS, one, dtype="F32"),
    )
    return Case(name="int8-with-scales", schema=schema, entries=usual_entries(3, 5))


def _fp8_case() -> Case:
    width = ("head_dim", 4)
    schema = schema_of(
        component("k", "key", (0,), TOKENS, HEADS, width, dtype="F8_E4M3", stage="attention", scale="k_scale"),
        component("v", "value", (0,), TOKENS, HEADS, width, dtype="F8_E5M2", scale="v_scale"),
        component("k_scale", "key_scale", (0,), ("t", 1), ("h", 1), ("d", 1), dtype="F32"),
        component("v_scale", "value_scale", (0,), TOKENS, HEADS, ("d", 4), dtype="F32"),
        component("latent", "latent", (1,), TOKENS, ("rank", 6), dtype="I8", stage="raw", scale="latent_scale"),
        component("latent_scale", "other", (1,), TOKENS, ("rank", 1), dtype="F32"),
    )
    return Case(name="fp8-with-scales", schema=schema, entries=usual_entries(3, 5))


CASES = (
    _sliding_case(),
    _mla_case(),
    _shared_case(),
    _hidden_case(),
    _int8_case(),
    _fp8_case(),
    _bounds_case(),
)
