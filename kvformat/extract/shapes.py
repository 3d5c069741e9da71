"""From what a model's cache holds to a schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvformat.extract.probe import LayerForm
from kvformat.spec.schema import TOKEN_IDS, Axis, Component, Role, Schema, Stage

__all__ = ["Slot", "cached_schema", "slots"]

_TOKENS = Axis(name="tokens", size="tokens")


class Slot(NamedTuple):
    """Where a layer's K and V go: component names, and the row of their layer axis."""

    key: str
    value: str
    row: int


def cached_schema(forms: Mapping[int, LayerForm], *, dtype: str, key_stage: Stage = "attention") -> Schema:
    """Schema of records whose layers have these forms, ``token_ids`` beside them.

    Layers of one form share a pair of components: ``k`` and ``v`` where all layers agree, else ``k0``, ``v0``, ``k1``
    and so on in the order of their first layers. A compressed cache gives ``latent`` and ``rope_key`` instead.

    Parameters
    ----------
    forms
        By model layer, ascending.
    dtype
        Storage dtype: BF16, F16 or F32.
    key_stage
        Stage of the keys. What attention consumes of a latent is the normed one.
    """
    latent_stage: Stage = "raw" if key_stage == "raw" else "normed"
    components: list[Component] = []
    for number, (form, layers) in enumerate(_groups(forms)):
        first, second = _names(form, number if len(set(forms.values())) > 1 else None)
        if form.latent:
            components += [
                _component(first, "latent", layers, _width_axes("rank", form.key), dtype, latent_stage),
                _component(second, "rope_key", layers, _width_axes("rope_dim", form.value), dtype, key_stage),
            ]
        else:
            components += [
                _component(first, "key", layers, _head_axes(form.key), dtype, key_stage),
                _component(second, "value", layers, _head_axes(form.value), dtype, None),
            ]
    return Schema(dims=("tokens",), components=tuple(components), extras=(TOKEN_IDS,), shared=())


def slots(forms: Mapping[int, LayerForm]) -> dict[int, Slot]:
    """Where each layer's tensors stand in the schema :func:`cached_schema` makes."""
    found = {}
    for number, (form, layers) in enumerate(_groups(forms)):
        first, second = _names(form, number if len(set(forms.values())) > 1 else None)
        found.update({layer: Slot(first, second, row) for row, layer in enumerate(layers)})
    return found


def _groups(forms: Mapping[int, LayerForm]) -> list[tuple[LayerForm, tuple[int, ...]]]:
    groups: dict[LayerForm, list[int]] = {}
    for layer in sorted(forms):
        groups.setdefault(forms[layer], []).append(layer)
    return [(form, tuple(layers)) for form, layers in groups.items()]


def _names(form: LayerForm, number: int | None) -> tuple[str, str]:
    suffix = "" if number is None else str(number)
    return (f"latent{suffix}", f"rope_key{suffix}") if form.latent else (f"k{suffix}", f"v{suffix}")


def _head_axes(form: tuple[int, int]) -> tuple[Axis, ...]:
    return (Axis(name="heads", size=form[0]), Axis(name="head_dim", size=form[1]))


def _width_axes(name: str, form: tuple[int, int]) -> tuple[Axis, ...]:
    return (Axis(name=name, size=form[1]),)


def _component(
    name: str, role: Role, layers: Sequence[int], axes: tuple[Axis, ...], dtype: str, stage: Stage | None
) -> Component:
    return Component(
        name=name, role=role, layers=tuple(layers), axes=(_TOKENS, *axes), dtype=dtype, codec="raw", stage=stage
    )
