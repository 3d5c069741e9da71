"""Hypothesis strategies: names, canonical values, documents, schemas, and datasets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvformat.spec.document import MASKS, MEDIA_SCHEMES, Document, Media
from kvformat.spec.schema import ITEM_SIZES, Axis, Component, Extra, Last, Quant, Role, Schema, Shared, Stage
from kvformat.testing.vectors import Case, Entry

__all__ = ["canonical_objects", "cases", "documents", "names", "schemas"]

_COMPONENT_DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8")
_QUANTISED = ("F8_E4M3", "F8_E5M2", "I8")
_ROLES: tuple[Role, ...] = ("key", "value", "latent", "rope_key", "hidden", "state", "other")
_STAGED = ("key", "latent", "rope_key")
_SCALE_ROLES: dict[str, Role] = {"key": "key_scale", "value": "value_scale"}
_KV_ROLES = ("key", "value", "latent", "rope_key", "key_scale", "value_scale")
_IDS = Extra(name="token_ids", axes=(Axis(name="tokens", size="tokens"),), dtype="I32")


def names() -> SearchStrategy[str]:
    """Names a record may have: 1 to 512 bytes of UTF-8, any characters but surrogates."""
    return st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(
        lambda text: len(text.encode()) <= 512
    )


def canonical_objects(*, max_leaves: int = 20) -> SearchStrategy[dict[str, Any]]:
    """Objects that have a canonical JSON text."""
    strings = st.text(st.characters(codec="utf-8"), max_size=12)
    leaves = st.booleans() | st.integers(0, 2**53 - 1) | strings
    members = st.text(st.characters(max_codepoint=127), max_size=8)
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(members, inner, max_size=4),
        max_leaves=max_leaves,
    )
    return st.dictionaries(members, values, max_size=5)


@st.composite
def documents(
    draw: DrawFn,
    *,
    first_token: int | None = None,
    position_rows: Sequence[int] = (1, 3),
    masks: bool = True,
    media: bool = True,
    max_tokens: int = 8,
) -> Document:
    """Documents.

    Parameters
    ----------
    first_token
        Token that distinguishes the document from others.
    position_rows
        How many rows of positions it may have, besides none.
    masks, media
        Whether it may have another mask than the causal one, and media.
    """
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=max_tokens))
    if first_token is not None:
        ids[0] = first_token
    tokens = len(ids)
    rows = draw(st.sampled_from((0, *position_rows)))
    positions = None
    if rows:
        row = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=tokens, max_size=tokens)
        plain = st.just(list(range(tokens)))
        positions = np.array(draw(st.lists(plain | row, min_size=rows, max_size=rows)), dtype=np.int64)
    mask = draw(st.sampled_from(MASKS if masks and tokens > 1 else ("causal",)))
    spans = draw(st.lists(st.integers(0, tokens), max_size=3 if media else 0))
    entries = [
        Media(
            scheme=draw(st.sampled_from(MEDIA_SCHEMES)),
            first=first,
            count=draw(st.integers(0, tokens - first)),
            digest=draw(st.binary(min_size=32, max_size=32)),
        )
        for first in sorted(spans)
    ]
    return Document.of(
        ids,
        position_ids=positions,
        mask=mask,
        prefix_length=draw(st.integers(1, tokens - 1)) if mask == "prefix" else 0,
        media=entries,
    )


@st.composite
def schemas(draw: DrawFn) -> Schema:
    """Schemas of any roles, dims, dtypes, windows, scales, shared layers and extras."""
    token_ids = draw(st.booleans())
    with_media = token_ids and draw(st.booleans())
    dims = ("tokens", *(("media",) if with_media else ()), *draw(st.sampled_from(((), ("boxes",)))))
    axes = _axes(dims)
    layers = sorted(draw(st.sets(st.integers(0, 12) | st.just(65_535), min_size=1, max_size=4)))
    components: list[Component] = []
    for role in draw(st.lists(st.sampled_from(_ROLES), min_size=1, max_size=4)):
        taken = {layer for c in components if c.role == role and role != "other" for layer in c.layers}
        free = [layer for layer in layers if layer not in taken]
        if free:
            chosen = tuple(sorted(draw(st.sets(st.sampled_from(free), min_size=1, max_size=len(free)))))
            components += _component(draw, f"c{len(components)}", role, chosen, axes)
    stored = sorted({layer for c in components if c.role in _KV_ROLES for layer in c.layers})
    others = (
        draw(st.sets(st.integers(0, 70).filter(lambda layer: layer not in stored), max_size=2)) if stored else set()
    )
    extras = [_IDS] if token_ids else []
    if token_ids:
        extras += draw(st.lists(st.sampled_from(_INPUTS), unique_by=lambda extra: extra.name, max_size=2))
    if with_media:
        extras.append(_extra("media", "U8", ("media", "media"), ("entry", 49)))
    for number in range(draw(st.integers(0, 2))):
        dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
        extras.append(Extra(name=f"x{number}", axes=draw(axes), dtype=dtype))
    every: list[Component | Extra] = [*components, *extras]
    if "boxes" in dims and not any(axis.size == "boxes" for tensor in every for axis in tensor.axes):
        extras.append(_extra("boxes_of", "F32", ("boxes", "boxes"), ("corner", 2)))
    return Schema(
        dims=dims,
        components=tuple(components),
        extras=tuple(draw(st.permutations(extras))),
        shared=tuple(Shared(layer=layer, source=draw(st.sampled_from(stored))) for layer in sorted(others)),
    )


@st.composite
def cases(draw: DrawFn, *, max_records: int = 4, max_names: int = 3) -> Case:
    """Datasets: a schema, and records with documents and names that fit it."""
    schema = draw(schemas())
    extras = {extra.name: extra for extra in schema.extras}
    any_document = "token_ids" not in extras
    positions = extras.get("position_ids")
    rows: tuple[int, ...] = () if positions is None else (1,) if positions.axes[0].size == 1 else (1, 3)
    entries = []
    taken: set[str] = set()
    for number in range(draw(st.integers(1, max_records))):
        document = draw(
            documents(
                first_token=number,
                position_rows=(1, 3) if any_document else rows,
                masks=any_document or "mask" in extras,
                media=any_document or "media" in extras,
            )
        )
        unused = names().filter(lambda name: name not in taken)
        given = tuple(draw(st.lists(unused, min_size=1, max_size=max_names, unique=True)))
        taken.update(given)
        dims = {"boxes": draw(st.integers(0, 3))} if "boxes" in schema.dims else {}
        entries.append(Entry(names=given, document=document, dims=dims))
    options = {"shard_slots": draw(st.integers(1, 3)), "shard_nbytes": draw(st.sampled_from((1, 8192, 1 << 30)))}
    return Case(name="drawn", schema=schema, entries=tuple(entries), options=options)


def _extra(name: str, dtype: str, *sizes: tuple[str, int | str]) -> Extra:
    return Extra(name=name, dtype=dtype, axes=tuple(Axis(name=axis, size=size) for axis, size in sizes))


_INPUTS = (
    _extra("position_ids", "I32", ("rows", 1), ("tokens", "tokens")),
    _extra("position_ids", "I32", ("rows", 3), ("tokens", "tokens")),
    _extra("mask", "U64", ("kind_and_length", 2)),
)


def _axes(dims: tuple[str, ...]) -> SearchStrategy[tuple[Axis, ...]]:
    sizes: SearchStrategy[int | str | Last] = (
        st.integers(1, 4) | st.sampled_from(dims) | st.integers(1, 6).map(lambda n: Last(last=n))
    )
    return st.lists(sizes, min_size=1, max_size=3).map(
        lambda drawn: tuple(Axis(name=f"a{number}", size=size) for number, size in enumerate(drawn))
    )


def _component(
    draw: DrawFn, name: str, role: Role, layers: tuple[int, ...], axes: SearchStrategy[tuple[Axis, ...]]
) -> list[Component]:
    """A component, and the one that holds its scales where it is of 8 bits."""
    dtype = draw(st.sampled_from(_COMPONENT_DTYPES))
    chosen = draw(axes)
    stage: Stage | None = draw(st.sampled_from(("raw", "normed", "attention"))) if role in _STAGED else None
    quantised = dtype in _QUANTISED and role != "other"
    found = Component(
        name=name,
        role=role,
        layers=layers,
        axes=chosen,
        dtype=dtype,
        codec="raw",
        stage=stage,
        quant=Quant(scale=f"{name}_scale") if quantised else None,
    )
    if not quantised:
        return [found]
    one: Callable[[Axis], SearchStrategy[Axis]] = lambda axis: st.sampled_from((axis, Axis(name=axis.name, size=1)))  # noqa: E731
    scale = Component(
        name=f"{name}_scale",
        role=_SCALE_ROLES.get(role, "other"),
        layers=layers,
        axes=draw(st.tuples(*map(one, chosen))),
        dtype="F32",
        codec="raw",
    )
    return draw(st.permutations([found, scale]))
