"""Context, text and provenance: what determined the stored values (SPEC.md, "Context")."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvformat.errors import make_error
from kvformat.spec import canonical, limits

__all__ = [
    "Adapter",
    "Canary",
    "Context",
    "Model",
    "RopeGroup",
    "Scalars",
    "Sizes",
    "TensorDigest",
    "Text",
    "WeightsDigest",
    "Window",
    "differences",
    "layer_groups_problem",
    "real",
    "to_float",
]

Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Real = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=limits.MAX_INTEGER)]
Label = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.+-]{0,63}\Z")]
Layers = tuple[Count, ...]
ComputeDtype = Literal["BF16", "F16", "F32"]
RopeKind = Literal["default", "linear", "llama3", "longrope", "yarn", "proportional"]
QKNorm = Literal["none", "rms_head", "rms_full", "layer_head", "l2"]

# Members a RoPE kind needs besides those every kind has, and members it may have.
_ROPE_NEEDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position"}),
    "longrope": frozenset({"long_factor", "short_factor", "original_max_position", "attention_factor"}),
    "yarn": frozenset({"factor", "beta_fast", "beta_slow", "original_max_position", "attention_factor"}),
    "proportional": frozenset(),
}
_ROPE_MAY: dict[str, frozenset[str]] = {
    "default": frozenset({"sections"}),
    "linear": frozenset({"sections"}),
    "llama3": frozenset({"sections"}),
    "longrope": frozenset({"sections", "factor"}),
    "yarn": frozenset({"sections", "truncate", "mscale", "mscale_all_dim"}),
    "proportional": frozenset({"factor", "sections"}),
}


class _Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class WeightsDigest(_Base, frozen=True, kw_only=True):
    """Digest over the values of a set of tensors; the list it was made of is a covered file."""

    scheme: Literal["kvf-tensors-1"]
    sha256: Hex64


class TensorDigest(_Base, frozen=True, kw_only=True):
    """One line of a ``weights`` covered file: a tensor as it is after the cast to the compute dtype."""

    dtype: ComputeDtype
    name: str
    sha256: Hex64
    shape: tuple[Count, ...]


class Adapter(_Base, frozen=True, kw_only=True):
    """A low-rank adapter that is applied, not merged. ``scale`` is a real."""

    scale: Real
    sha256: Hex64
    scheme: Literal["kvf-tensors-1"]


class RopeGroup(_Base, frozen=True, kw_only=True):
    """Rotary embedding of some layers, as parameters; which are present depends on ``kind``."""

    interleaved: bool
    kind: RopeKind
    layers: Layers
    rotary_dim: Positive
    theta: Real
    attention_factor: Real | None = None
    beta_fast: Real | None = None
    beta_slow: Real | None = None
    factor: Real | None = None
    high_freq_factor: Real | None = None
    long_factor: tuple[Real, ...] | None = None
    low_freq_factor: Real | None = None
    mscale: Real | None = None
    mscale_all_dim: Real | None = None
    original_max_position: Positive | None = None
    sections: tuple[Count, ...] | None = None
    short_factor: tuple[Real, ...] | None = None
    truncate: bool | None = None


class Window(_Base, frozen=True, kw_only=True):
    """Layers whose queries see only the last ``size`` positions, their own included."""

    layers: Layers
    size: Positive


class Scalars(_Base, frozen=True, kw_only=True):
    """Real factors a family may have; absent where the family has none."""

    attention_scale: Real | None = None
    attention_softcap: Real | None = None
    embedding_scale: Real | None = None
    residual_scale: Real | None = None
    routed_scale: Real | None = None


class Sizes(_Base, frozen=True, kw_only=True):
    """Integer sizes; absent where the family has none."""

    head_dim: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_hidden_layers: Positive
    num_key_value_heads: Positive
    first_dense_layers: Count | None = None
    intermediate_size: Positive | None = None
    kv_lora_rank: Positive | None = None
    moe_intermediate_size: Positive | None = None
    num_experts: Positive | None = None
    num_experts_per_token: Positive | None = None
    num_expert_groups: Positive | None = None
    num_shared_experts: Count | None = None
    num_topk_groups: Positive | None = None
    q_lora_rank: Positive | None = None
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    vocab_size: Positive | None = None


class Model(_Base, frozen=True, kw_only=True):
    """What determines the values, model side. Every field must match."""

    adapters: tuple[Adapter, ...]
    compute_dtype: ComputeDtype
    family: Label
    norm_eps: Real
    qk_norm: QKNorm
    rope: tuple[RopeGroup, ...]
    scalars: Scalars
    sizes: Sizes
    weights: WeightsDigest
    windows: tuple[Window, ...]
    activation: Label | None = None


class Context(_Base, frozen=True, kw_only=True):
    """What determines the values of a dataset.

    ``kind="model"`` carries ``model``; ``kind="unknown"`` carries nothing and equals nothing, itself included.
    """

    kind: Literal["unknown", "model"]
    model: Model | None = None

    @classmethod
    def unknown(cls) -> Context:
        """Declare that nobody knows what made the values."""
        return cls(kind="unknown")

    @classmethod
    def of(cls, model: Model) -> Context:
        """Context of a known model."""
        return cls(kind="model", model=model)


class Canary(_Base, frozen=True, kw_only=True):
    """A fixed text and the ids the tokenizer gave for it."""

    text: str
    token_ids: tuple[Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)], ...]


class Text(_Base, frozen=True, kw_only=True):
    """How text became token ids. Empty where documents came as token ids."""

    add_generation_prompt: bool | None = None
    canary: Canary | None = None
    chat_template: Hex64 | None = None
    special_tokens: bool | None = None
    tokenizer: Hex64 | None = None
    truncate: Positive | None = None


def real(value: float) -> str:
    """Encode a finite real as 16 lower-case hex digits of its big-endian binary64.

    Raises
    ------
    UsageError
        E081 for NaN, infinities and negative zero.
    """
    return canonical.encode_real(value)


def to_float(value: str) -> float:
    """Decode what :func:`real` encodes."""
    return canonical.decode_real(value)


def layer_groups_problem(groups: Sequence[tuple[int, ...]]) -> str | None:
    """What is wrong with lists of layers of which no layer may stand in two; None where nothing is."""
    seen: set[int] = set()
    for layers in groups:
        if not layers or any(a >= b for a, b in pairwise(layers)) or layers[-1] > limits.MAX_LAYER:
            return f"layers must be non-empty, strictly ascending, at most {limits.MAX_LAYER}"
        if seen.intersection(layers):
            return "a layer stands in two groups"
        seen.update(layers)
    firsts = [layers[0] for layers in groups]
    return None if firsts == sorted(firsts) else "groups must be ordered by their first layer"


def check(context: Context, *, path: str | None = None) -> None:
    """Check the rules a context's types do not express.

    Raises
    ------
    FormatError
        E042 with the offending member.
    """
    if (context.kind == "model") != (context.model is not None):
        raise make_error("E042", "`model` stands exactly in a context of kind `model`", path=path)
    if context.model is None:
        return
    model = context.model
    for name, groups in (("rope", model.rope), ("windows", model.windows)):
        problem = layer_groups_problem([group.layers for group in groups])
        if problem is not None:
            raise make_error("E042", f"{name}: {problem}", path=path)
    for group in model.rope:
        given = {
            field
            for field in RopeGroup.__struct_fields__
            if field not in ("interleaved", "kind", "layers", "rotary_dim", "theta")
            and getattr(group, field) is not None
        }
        needs, may = _ROPE_NEEDS[group.kind], _ROPE_MAY[group.kind]
        if not needs <= given or given - needs - may:
            odd = sorted((needs - given) | (given - needs - may))
            raise make_error("E042", f"rope of kind {group.kind!r}: missing or unexpected {', '.join(odd)}", path=path)
    for name, value in _reals(model):
        if not canonical.is_real(value):
            raise make_error("E042", f"{name}: {value} is NaN, infinite or negative zero", path=path)


def differences(ours: Context, theirs: Context) -> list[str]:
    """Fields in which two contexts differ, as dotted paths with both values; empty when they match.

    An unknown context differs from everything, itself included.
    """
    if ours.model is None or theirs.model is None:
        return [f"kind: {ours.kind} against {theirs.kind} (an unknown context equals nothing)"]
    left, right = (dict(canonical.flatten(msgspec.to_builtins(c.model))) for c in (ours, theirs))
    return [
        f"{key}: {left.get(key, 'absent')} against {right.get(key, 'absent')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


def _reals(model: Model) -> list[tuple[str, str]]:
    found = [("norm_eps", model.norm_eps)]
    found += [(f"adapters[{i}].scale", a.scale) for i, a in enumerate(model.adapters)]
    for name in Scalars.__struct_fields__:
        value = getattr(model.scalars, name)
        if value is not None:
            found.append((f"scalars.{name}", value))
    for i, group in enumerate(model.rope):
        for name in (
            "theta",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "high_freq_factor",
            "low_freq_factor",
            "mscale",
            "mscale_all_dim",
        ):
            value = getattr(group, name)
            if value is not None:
                found.append((f"rope[{i}].{name}", value))
        for name in ("long_factor", "short_factor"):
            found += [(f"rope[{i}].{name}[{j}]", v) for j, v in enumerate(getattr(group, name) or ())]
    return found
