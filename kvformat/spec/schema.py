"""The schema of a dataset: which tensors a record has and what they are (SPEC.md, "Schema")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from kvformat.errors import make_error
from kvformat.spec import limits

__all__ = ["Axis", "Component", "Extra", "Last", "Quant", "Role", "Schema", "Shared", "Stage"]

Role = Literal[
    "key",
    "value",
    "latent",
    "rope_key",
    "key_scale",
    "value_scale",
    "hidden",
    "state",
    "other",
]
Stage = Literal["raw", "normed", "attention"]
Layer = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]

ITEM_SIZES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "I32": 4,
    "U8": 1,
    "U64": 8,
}
COMPONENT_DTYPES = frozenset({"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8"})
_MOST = {
    "num_layers": limits.MAX_LAYER + 1,
    "num_kv_heads": limits.MAX_DIM,
    "head_dim": limits.MAX_DIM,
    "v_head_dim": limits.MAX_DIM,
}
UNIFORM_DTYPES = ("BF16", "F16", "F32")
QUANTISED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
STAGED_ROLES = frozenset({"key", "rope_key", "latent"})
SHARED_ROLES = frozenset({"key", "value", "latent", "rope_key", "key_scale", "value_scale"})


class _Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Last(_Base, frozen=True, kw_only=True):
    """Size of an axis that holds the last ``min(tokens, last)`` rows of a record, in order."""

    last: Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]


class Axis(_Base, frozen=True, kw_only=True):
    """One axis of a tensor: its name and its size (an integer, the name of a dim, or a :class:`Last`)."""

    name: str
    size: Size | str | Last


class Quant(_Base, frozen=True, kw_only=True):
    """Names the component that holds the scales; dequantised = float32(stored) x scale."""

    scale: str


class Component(_Base, frozen=True, kw_only=True):
    """One tensor family of a record: ``[len(layers), *axes]``, one slab a layer.

    Parameters
    ----------
    name
        Name in the shard, ``[a-z][a-z0-9_]{0,63}``.
    role
        What it is for the model.
    layers
        Model layer indices, strictly ascending; row ``i`` of axis 0 is model layer ``layers[i]``.
    axes
        Axes after the layer axis.
    dtype
        safetensors dtype name.
    stage
        For keys: ``raw`` (projection output), ``normed`` (after its norm), ``attention`` (as the attention product
        consumes it, after norm and rotary embedding).
    quant
        Scale component of an 8-bit component.
    codec
        ``raw`` in version 1.0.
    """

    name: str
    role: Role
    layers: tuple[Layer, ...]
    axes: Annotated[tuple[Axis, ...], Meta(min_length=1, max_length=7)]
    dtype: str
    codec: str
    stage: Stage | None = None
    quant: Quant | None = None


class Shared(_Base, frozen=True, kw_only=True):
    """Model layer ``layer`` attends over the K/V of layer ``source``."""

    layer: Layer
    source: Layer


class Extra(_Base, frozen=True, kw_only=True):
    """A tensor stored with each record that belongs to no layer."""

    name: str
    axes: Annotated[tuple[Axis, ...], Meta(min_length=1, max_length=8)]
    dtype: str


class Schema(_Base, frozen=True, kw_only=True):
    """Which tensors every record of a dataset has.

    Parameters
    ----------
    dims
        Names of the sizes that vary from record to record; ``tokens`` comes first.
    components, extras, shared
        See :class:`Component`, :class:`Extra`, :class:`Shared`.
    """

    dims: tuple[str, ...]
    components: Annotated[tuple[Component, ...], Meta(min_length=1)]
    extras: tuple[Extra, ...]
    shared: tuple[Shared, ...]

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "BF16",
        key_stage: Stage = "attention",
        v_head_dim: int | None = None,
        layers: Sequence[int] | None = None,
        token_ids: bool = True,
    ) -> Schema:
        """Schema of a model whose layers all have K and V of one shape: components ``k`` and ``v``.

        Parameters
        ----------
        num_layers
            Number of stored layers.
        num_kv_heads, head_dim
            Axes of ``k`` and ``v``: ``[num_layers, tokens, num_kv_heads, head_dim]``.
        dtype
            safetensors dtype name: BF16, F16 or F32.
        key_stage
            Stage of the keys.
        v_head_dim
            Width of V where it differs from that of K.
        layers
            Model layer indices; ``0..num_layers-1`` when absent.
        token_ids
            Store the token ids beside each record, so that its document digest can be recomputed.

        Raises
        ------
        UsageError
            E081 for sizes below 1, and for a dtype or stage that does not exist.
        """
        sizes: dict[str, object] = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        if v_head_dim is not None:
            sizes["v_head_dim"] = v_head_dim
        for what, size in sizes.items():
            if not isinstance(size, int) or not 1 <= size <= _MOST[what]:
                raise make_error("E081", f"{what} must be an integer of 1 to {_MOST[what]}, found {size!r}")
        for what, value, allowed in (("dtype", dtype, UNIFORM_DTYPES), ("key_stage", key_stage, get_args(Stage))):
            if value not in allowed:
                raise make_error("E081", f"{what} must be one of {', '.join(allowed)}, found {value!r}")
        stored = tuple(range(num_layers)) if layers is None else tuple(layers)
        if len(stored) != num_layers:
            message = f"num_layers is the number of layers stored: found {num_layers}, and {len(stored)} in layers"
            raise make_error("E081", message)

        def component(name: str, role: Role, width: int, stage: Stage | None) -> Component:
            return Component(
                name=name,
                role=role,
                layers=stored,
                axes=(
                    Axis(name="tokens", size="tokens"),
                    Axis(name="heads", size=num_kv_heads),
                    Axis(name="head_dim", size=width),
                ),
                dtype=dtype,
                codec="raw",
                stage=stage,
            )

        return cls(
            dims=("tokens",),
            components=(
                component("k", "key", head_dim, key_stage),
                component("v", "value", head_dim if v_head_dim is None else v_head_dim, None),
            ),
            extras=(TOKEN_IDS,) if token_ids else (),
            shared=(),
        )


TOKEN_IDS = Extra(name="token_ids", axes=(Axis(name="tokens", size="tokens"),), dtype="I32")
