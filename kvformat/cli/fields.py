"""Schema, context and text as named fields, the way people read and compare them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvformat.cli.output import layers_text
from kvformat.spec import canonical
from kvformat.spec.context import Context, Text
from kvformat.spec.schema import Axis, Component, Extra, Last, Schema

__all__ = ["axes_text", "context_fields", "schema_fields", "text_document", "text_fields"]

# Members of the context that are reals: 16 digits in the file, a number for people.
_REALS = frozenset(
    {
        "attention_factor",
        "attention_scale",
        "attention_softcap",
        "beta_fast",
        "beta_slow",
        "embedding_scale",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "norm_eps",
        "residual_scale",
        "routed_scale",
        "scale",
        "short_factor",
        "theta",
    }
)


def context_fields(context: Context) -> dict[str, str]:
    """Dotted member of ``context.model`` -> value; only ``kind`` for an unknown context."""
    if context.model is None:
        return {"kind": context.kind}
    flat = canonical.flatten(msgspec.to_builtins(context.model))
    return {"kind": context.kind} | {field: _value(field, value) for field, value in flat}


def text_fields(text: Text) -> dict[str, str]:
    """Member of the text section -> value. Of the canary's token ids only the number is shown."""
    found = {}
    for field, value in canonical.flatten(msgspec.to_builtins(text)):
        found[field] = f"{len(value)} ids" if field == "canary.token_ids" else _value(field, value)
    return found


def text_document(text: Text) -> dict[str, Any]:
    """The text section for JSON; of the canary's token ids only the number."""
    found: dict[str, Any] = msgspec.to_builtins(text)
    if text.canary is not None:
        found["canary"] = {"text": text.canary.text, "num_token_ids": len(text.canary.token_ids)}
    return found


def schema_fields(schema: Schema) -> dict[str, str]:
    """Field -> value, with components and extras by name, so that one more does not make all others differ."""
    found = {"dims": ", ".join(schema.dims)}
    found["components"] = ", ".join(component.name for component in schema.components)
    for component in schema.components:
        found |= _tensor_fields(f"components.{component.name}", component)
    found["extras"] = ", ".join(extra.name for extra in schema.extras)
    for extra in schema.extras:
        found |= _tensor_fields(f"extras.{extra.name}", extra)
    found["shared"] = ", ".join(f"{shared.layer} from {shared.source}" for shared in schema.shared)
    return found


def axes_text(axes: tuple[Axis, ...]) -> str:
    """Axes with their sizes: ``tokens, heads 8, head_dim 128``."""
    return ", ".join(axis.name if axis.size == axis.name else f"{axis.name} {_size_text(axis)}" for axis in axes)


def _tensor_fields(prefix: str, tensor: Component | Extra) -> dict[str, str]:
    found = {f"{prefix}.axes": axes_text(tensor.axes), f"{prefix}.dtype": tensor.dtype}
    if isinstance(tensor, Component):
        found |= {
            f"{prefix}.codec": tensor.codec,
            f"{prefix}.layers": layers_text(tensor.layers),
            f"{prefix}.role": tensor.role,
        }
        if tensor.stage is not None:
            found[f"{prefix}.stage"] = tensor.stage
        if tensor.quant is not None:
            found[f"{prefix}.quant.scale"] = tensor.quant.scale
    return found


def _size_text(axis: Axis) -> str:
    return f"last {axis.size.last}" if isinstance(axis.size, Last) else str(axis.size)


def _value(field: str, value: Any) -> str:
    name = field.rpartition(".")[2]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _REALS:
        digits = value if isinstance(value, list | tuple) else (value,)
        return ", ".join(repr(canonical.decode_real(one)) for one in digits)
    if name == "layers":
        return layers_text(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
