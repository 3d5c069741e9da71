"""Mutations of the context and of covered files (E042 to E044)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from kvformat.spec import limits
from kvformat.testing.dataset_files import DatasetFiles, dump
from kvformat.testing.mutations.edits import Edit, Mutation, drop, manifest, put

__all__ = ["MUTATIONS"]

_NAN, _INFINITY, _MINUS_ZERO, _ONE = "7ff8000000000000", "fff0000000000000", "8000000000000000", "3ff0000000000000"


def _model(*changes: Callable[[Any], None]) -> Edit:
    def apply(decoded: Any) -> None:
        for change in changes:
            change(decoded["context"]["model"])

    return manifest(apply)


def _move(item: int, to: int, member: str) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        model[member].insert(to, model[member].pop(item))

    return apply


def _context() -> Iterator[tuple[str, str, Edit, bool]]:
    """Name, base, edit, and whether it becomes a vector."""
    model, rope = "model-context", "rope-kinds"
    yield "model-in-unknown", model, manifest(put("unknown", "context", "kind")), True
    yield "no-model", "one-record", manifest(put("model", "context", "kind")), False
    yield "rope-without-layers", model, _model(put([], "rope", 0, "layers")), True
    yield "rope-layers-descending", model, _model(put([1, 0], "rope", 0, "layers")), False
    yield "rope-layer-twice", model, _model(put([0, 0], "rope", 0, "layers")), False
    yield "rope-layer-65536", model, _model(put([0, 65_536], "rope", 0, "layers")), False
    yield "rope-groups-overlap", rope, _model(put([0, 5], "rope", 0, "layers")), True
    yield "rope-groups-out-of-order", rope, _model(_move(0, 1, "rope")), True
    yield "windows-overlap", rope, _model(put([1, 2], "windows", 1, "layers")), False
    yield "windows-out-of-order", rope, _model(_move(0, 1, "windows")), False
    yield "window-without-layers", rope, _model(put([], "windows", 1, "layers")), False
    yield "window-layer-65536", rope, _model(put([1, 65_536], "windows", 1, "layers")), False
    kinds = ("linear", "llama3", "longrope", "yarn")
    for number, (kind, needed) in enumerate(
        zip(kinds, ("factor", "low_freq_factor", "short_factor", "attention_factor"), strict=True)
    ):
        yield f"{kind}-without-{needed}".replace("_", "-"), rope, _model(drop("rope", number, needed)), kind == "yarn"
    yield "default-with-factor", model, _model(put(_ONE, "rope", 0, "factor")), True
    yield "linear-with-beta", rope, _model(put(_ONE, "rope", 0, "beta_slow")), False
    yield "proportional-with-mscale", rope, _model(put(_ONE, "rope", 4, "mscale")), False
    yield "longrope-with-beta", rope, _model(put(_ONE, "rope", 2, "beta_fast")), False
    for name, value in (("nan", _NAN), ("infinity", _INFINITY), ("minus-zero", _MINUS_ZERO)):
        yield f"norm-eps-{name}", model, _model(put(value, "norm_eps")), name == "minus-zero"
        yield f"theta-{name}", model, _model(put(value, "rope", 0, "theta")), False
        yield f"factor-{name}", rope, _model(put(value, "rope", 0, "factor")), False
        yield f"long-factor-{name}", rope, _model(put([_ONE, value], "rope", 2, "long_factor")), False
        yield f"mscale-{name}", rope, _model(put(value, "rope", 3, "mscale")), False
        yield f"scalar-{name}", rope, _model(put(value, "scalars", "attention_scale")), False
        yield f"adapter-{name}", rope, _model(put(value, "adapters", 0, "scale")), False


def _without(label: str) -> Edit:
    def apply(files: DatasetFiles) -> None:
        at = [entry["name"] for entry in files.manifest["files"]].index(label)
        del files.manifest["files"][at]
        del files.covered[at]
        files.reseal("parts")

    return apply


def _reversed(files: DatasetFiles) -> None:
    files.manifest["files"].reverse()
    files.covered.reverse()
    files.reseal("parts")


def _label_twice(files: DatasetFiles) -> None:
    files.manifest["files"].insert(0, dict(files.manifest["files"][0]))
    files.covered.insert(0, bytearray(b"other"))
    files.reseal("parts")


def _content(label: str, change: Callable[[bytes], bytes]) -> Edit:
    """Change a covered file; the context refers to the new content."""

    def apply(files: DatasetFiles) -> None:
        at = [entry["name"] for entry in files.manifest["files"]].index(label)
        data = change(bytes(files.covered[at]))
        files.covered[at] = bytearray(data)
        if label == "weights":
            files.manifest["context"]["model"]["weights"]["sha256"] = hashlib.sha256(data).hexdigest()
        files.reseal("parts")

    return apply


def _decoded(*changes: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        decoded = json.loads(data)
        for change in changes:
            change(decoded)
        return dump(decoded)

    return apply


def _groups_descend(value: Any) -> None:
    group = value["groups"][0]
    value["groups"] = [{**group, "layers": [1]}, {**group, "layers": [0]}]


def _contents() -> Iterator[tuple[str, str, Callable[[bytes], bytes], bool]]:
    """Name, label, change, and whether it becomes a vector."""
    yield "not-json", "weights", lambda _: b"weights", True
    yield "empty", "weights", lambda _: b"", False
    yield "an-array", "weights", lambda _: b"[]", False
    yield "not-canonical", "weights", lambda data: data + b"\n", True
    yield "too-deep", "weights", lambda _: b'{"tensors":' + b"[" * 32 + b"]" * 32 + b"}", False
    yield "unknown-member", "weights", _decoded(put(1, "count")), True
    yield "no-tensors", "weights", _decoded(drop("tensors")), False
    yield "tensor-without-shape", "weights", _decoded(drop("tensors", 0, "shape")), False
    yield "digest-upper-case", "weights", _decoded(put("A" * 64, "tensors", 0, "sha256")), False
    yield "negative-size", "weights", _decoded(put([-1], "tensors", 0, "shape")), False
    yield "tensors-out-of-order", "weights", _decoded(lambda value: value["tensors"].reverse()), True
    yield "tensor-twice", "weights", _decoded(lambda value: value["tensors"].insert(0, value["tensors"][0])), False
    yield "other-dtype", "weights", _decoded(put("F32", "tensors", 1, "dtype")), True
    yield "unknown-dtype", "weights", _decoded(put("bf16", "tensors", 1, "dtype")), False
    for name, value in (("nan", _NAN), ("infinity", _INFINITY), ("minus-zero", _MINUS_ZERO)):
        yield f"frequency-{name}", "inv_freq", _decoded(put(value, "groups", 0, "values", 0)), name == "nan"
    yield "frequency-a-number", "inv_freq", _decoded(put(1, "groups", 0, "values", 0)), False
    yield "frequencies-without-layers", "inv_freq", _decoded(drop("groups", 0, "layers")), False
    first = ("groups", 0, "layers")
    yield "frequencies-of-no-layer", "inv_freq", _decoded(put([], *first)), True
    yield "frequencies-none", "inv_freq", _decoded(put([], "groups", 0, "values")), False
    yield "frequency-layer-twice", "inv_freq", _decoded(lambda value: value["groups"].append(value["groups"][0])), True
    yield "frequency-layer-beyond", "inv_freq", _decoded(put([65_536], *first)), False
    yield "frequency-layers-descend", "inv_freq", _decoded(put([1, 0], *first)), False
    yield "frequency-groups-descend", "inv_freq", _decoded(_groups_descend), False
    yield "weights-too-large", "weights", lambda data: data.ljust(limits.MAX_CONTENT_NBYTES + 1), False
    bound = ("components", 0, "relative_rms")
    yield "not-json", "bounds", lambda _: b"bounds", False
    yield "not-canonical", "bounds", lambda data: data + b"\n", True
    yield "an-array", "bounds", lambda _: b"[]", False
    yield "unknown-member", "bounds", _decoded(put([0], "components", 0, "layers")), True
    yield "no-components", "bounds", _decoded(drop("components")), False
    yield "without-value", "bounds", _decoded(drop(*bound)), False
    yield "of-no-component", "bounds", _decoded(put("w", "components", 1, "name")), True
    yield "of-a-scale", "bounds", _decoded(put("k_scale", "components", 1, "name")), True
    yield "out-of-order", "bounds", _decoded(lambda value: value["components"].reverse()), True
    yield "component-twice", "bounds", _decoded(put("k", "components", 1, "name")), True
    for name, digits in (("nan", _NAN), ("infinity", _INFINITY), ("minus-zero", _MINUS_ZERO)):
        yield f"value-{name}", "bounds", _decoded(put(digits, *bound)), name == "nan"
    yield "value-negative", "bounds", _decoded(put("bff0000000000000", *bound)), True
    yield "value-a-number", "bounds", _decoded(put(1, *bound)), False
    yield "quantisation-no-label", "bounds", _decoded(put("Int 8", "components", 0, "quantisation")), True
    yield "too-large", "bounds", lambda data: data.ljust(limits.MAX_CONTENT_NBYTES + 1), False


MUTATIONS = (
    *(
        Mutation(code="E042", name=name, base=base, apply=edit, vector=vector)
        for name, base, edit, vector in _context()
    ),
    Mutation(code="E043", name="without-weights", base="model-context", apply=_without("weights")),
    Mutation(
        code="E043",
        name="other-weights",
        base="model-context",
        apply=manifest(put("0" * 64, "context", "model", "weights", "sha256")),
    ),
    Mutation(code="E043", name="out-of-order", base="model-context", apply=_reversed),
    Mutation(code="E043", name="label-twice", base="model-context", apply=_label_twice),
    *(
        Mutation(
            code="E044",
            name=f"{label}-{name}".replace("_", "-"),
            base="error-bounds" if label == "bounds" else "model-context",
            found="verify",
            apply=_content(label, change),
            vector=vector,
        )
        for name, label, change, vector in _contents()
    ),
)
