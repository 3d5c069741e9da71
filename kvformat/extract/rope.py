"""Rotary embedding as parameters: from a model's settings to RoPE groups, and from a group to its frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.context import RopeGroup, real, to_float

__all__ = ["attention_factor", "inverse_frequencies", "refuse_history", "rope_group", "tolerance"]

_T = TypeVar("_T")
Settings = Mapping[str, Any]  # one flat `rope_parameters` mapping of a model's configuration

_EVERYWHERE = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)
_MEMBERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}
_HISTORY = {
    "dynamic": "recomputes its frequencies from the longest sequence seen so far",
    "longrope": "switches its frequencies with the length of the sequence",
}


def rope_group(
    settings: Settings, *, layers: Sequence[int], head_dim: int, interleaved: bool, max_positions: int | None
) -> RopeGroup:
    """Group of the layers that share these settings.

    Parameters
    ----------
    settings
        As a configuration of transformers 5 holds them for one kind of layer.
    head_dim
        Width that ``partial_rotary_factor`` is a fraction of.
    max_positions
        Positions of the model: stands in for a missing ``factor`` of yarn, as the ratio to the original ones.

    Raises
    ------
    InputError
        E302 for a kind whose frequencies depend on history, for an unknown kind, an unknown member, or a missing one.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    kind = given.get("rope_type", given.get("type"))
    refuse_history(str(kind))
    if kind not in _MEMBERS:
        raise make_error("E302", f"rope_type {kind!r} is unknown here; expected one of {', '.join(sorted(_MEMBERS))}")
    unknown = sorted(given.keys() - _EVERYWHERE - _MEMBERS[kind])
    if unknown:
        raise make_error("E302", f"rope of type {kind!r} has members unknown here: {', '.join(unknown)}")
    rotary_dim = int(head_dim * given.get("partial_rotary_factor", 1.0))
    common: dict[str, Any] = {
        "interleaved": interleaved,
        "kind": kind,
        "layers": tuple(layers),
        "rotary_dim": rotary_dim,
        "theta": _real(given, "rope_theta", kind),
    }
    if "mrope_section" in given:
        common["sections"] = tuple(int(size) for size in given["mrope_section"])
    if kind == "linear":
        common["factor"] = _real(given, "factor", kind)
    elif kind == "llama3":
        for name in ("factor", "high_freq_factor", "low_freq_factor"):
            common[name] = _real(given, name, kind)
        common["original_max_position"] = _integer(given, "original_max_position_embeddings", kind)
    elif kind == "yarn":
        common |= _yarn(given, max_positions)
    return RopeGroup(**common)


def refuse_history(kind: str) -> None:
    """Refuse a RoPE kind whose frequencies depend on more than a token's position; E302."""
    for name, reason in _HISTORY.items():
        if name in kind:
            raise make_error(
                "E302",
                f"rope_type {kind!r} {reason}, so equal documents can have other keys; models with it are refused",
            )


def inverse_frequencies(group: RopeGroup) -> NDArray[np.float64]:
    """Inverse frequencies ``[rotary_dim / 2]`` the parameters of a group stand for.

    Kinds: ``default`` (Su et al. 2021), ``linear`` (Chen et al. 2023), ``llama3`` (Llama 3.1), ``yarn`` (Peng et al.
    2023).
    """
    theta = to_float(group.theta)
    plain = theta ** (-np.arange(0, group.rotary_dim, 2, dtype=np.float64) / group.rotary_dim)
    if group.kind == "default":
        return plain
    factor = to_float(_present(group.factor))
    if group.kind == "linear":
        return plain / factor
    original = _present(group.original_max_position)
    if group.kind == "llama3":
        low, high = to_float(_present(group.low_freq_factor)), to_float(_present(group.high_freq_factor))
        turns = original * plain / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return np.asarray((1 - smooth) * plain / factor + smooth * plain)
    if group.kind == "yarn":
        bounds = [
            group.rotary_dim * math.log(original / (to_float(_present(turns)) * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (group.beta_fast, group.beta_slow)
        ]
        if group.truncate is not False:
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        first, last = max(bounds[0], 0), min(bounds[1], group.rotary_dim - 1)
        if first == last:
            last += 0.001  # the published implementation avoids the division by zero so
        ramp = np.clip((np.arange(group.rotary_dim // 2) - first) / (last - first), 0.0, 1.0)
        return np.asarray(plain / factor * ramp + plain * (1 - ramp))
    raise make_error("E302", f"frequencies of rope kind {group.kind!r} are not known here")


def tolerance(group: RopeGroup) -> float:
    """Relative difference within which frequencies computed in float32 agree with :func:`inverse_frequencies`.

    Where a kind blends two frequencies, rounding of the blend counts relative to the lower one, ``factor`` times less:
    beyond 1e-6 from a factor of 16 on (measured, spec/design/006).
    """
    if group.kind not in ("llama3", "yarn"):
        return 1e-6
    return 1e-6 * max(1.0, to_float(_present(group.factor)))


def attention_factor(group: RopeGroup) -> float:
    """Factor the rotated halves are multiplied with."""
    return 1.0 if group.attention_factor is None else to_float(group.attention_factor)


def _yarn(given: Settings, max_positions: int | None) -> dict[str, Any]:
    original = _integer(given, "original_max_position_embeddings", "yarn")
    if "factor" in given:
        factor = float(given["factor"])
    elif max_positions is not None:
        factor = max_positions / original
    else:
        raise make_error("E302", "rope of type 'yarn' has no factor, and the model states no number of positions")
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if "attention_factor" in given:
        scale = float(given["attention_factor"])
    elif mscale and mscale_all:
        # Rounded to float32: the logarithm's last bit differs between C libraries, and this enters an identity.
        scale = float(np.float32(_yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)))
    else:
        scale = float(np.float32(_yarn_scale(factor, 1.0)))
    found: dict[str, Any] = {
        "attention_factor": real(scale),
        "beta_fast": real(given.get("beta_fast") or 32),
        "beta_slow": real(given.get("beta_slow") or 1),
        "factor": real(factor),
        "original_max_position": original,
        "truncate": bool(given.get("truncate", True)),
    }
    found |= {name: real(given[name]) for name in ("mscale", "mscale_all_dim") if name in given}
    return found


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _real(given: Settings, name: str, kind: str) -> str:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise make_error("E302", f"rope of type {kind!r} needs a number `{name}`, found {value!r}")
    try:
        return real(value)
    except KVFormatError as error:
        raise make_error("E302", f"rope of type {kind!r}: `{name}`: {error.message}") from error


def _integer(given: Settings, name: str, kind: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise make_error("E302", f"rope of type {kind!r} needs a positive integer `{name}`, found {value!r}")
    return value


def _present(value: _T | None) -> _T:
    assert value is not None, "the group was built with every member its kind needs"
    return value
