"""Mutations of the schema (E030 to E040)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Mutation, Step, drop, edit_schema, put

__all__ = ["MUTATIONS"]

Change = Callable[[Any], None]
_K: tuple[Step, ...] = ("components", 0)
_V: tuple[Step, ...] = ("components", 1)
_IDS: tuple[Step, ...] = ("extras", 0)


def _append(value: Any, *steps: Step) -> Change:
    def apply(schema: Any) -> None:
        found = schema
        for step in steps:
            found = found[step]
        found.append(value)

    return apply


def _renamed(name: str) -> tuple[Change, ...]:
    return (put(name, *_K, "name"),)


def _extra(name: str, dtype: str, *sizes: int | str) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "axes": [{"name": f"a{n}", "size": size} for n, size in enumerate(sizes)]}


def _many_extras(count: int) -> Edit:
    """So many tensors that the header of a shard of 10,000 records would be beyond the limit."""

    def apply(files: DatasetFiles) -> None:
        files.manifest["schema"]["extras"] += [_extra(f"{'x' * 56}{n:03d}", "U8", 1) for n in range(count)]
        files.manifest["shard_slots"] = 10_000
        files.reseal("manifest")

    return apply


def _schemas() -> Iterator[tuple[str, str, str, tuple[Change, ...], bool]]:
    """Code, name, base, changes, and whether it becomes a vector."""
    uniform = "one-record"
    for name, value in (
        ("upper-case", "K"),
        ("empty", ""),
        ("begins-with-digit", "0k"),
        ("of-65", "k" * 65),
        ("not-ascii", "k\u0131"),
        ("with-newline", "k\n"),
        ("with-slash", "a/b"),
    ):
        yield "E030", f"name-{name}", uniform, _renamed(value), name in ("upper-case", "with-slash")
    for reserved in ("sums", "pad"):
        yield "E030", f"reserved-{reserved}", uniform, _renamed(reserved), True
    yield "E030", "component-twice", uniform, (put("v", *_K, "name"),), True
    yield "E030", "component-and-extra", uniform, (put("token_ids", *_K, "name"),), False
    yield "E030", "extra-reserved", uniform, (put("pad", *_IDS, "name"),), False
    yield "E030", "dim-twice", uniform, (_append("tokens", "dims"),), True
    yield "E030", "dim-upper-case", uniform, (_append("Media", "dims"),), False
    yield "E030", "axis-twice", uniform, (put("heads", *_K, "axes", 2, "name"),), False
    yield "E030", "axis-upper-case", uniform, (put("Heads", *_K, "axes", 1, "name"),), False

    for dtype in ("F64", "bf16", "BOOL", "I32", "U8", "U64", "F8_E8M0", ""):
        yield "E031", f"component-{dtype or 'empty'}", uniform, (put(dtype, *_K, "dtype"),), dtype in ("bf16", "I32")
    for dtype in ("I64", "U32", "i32"):
        yield "E031", f"extra-{dtype}", uniform, (put(dtype, *_IDS, "dtype"),), dtype == "I64"

    yield "E032", "no-dims", uniform, (put([], "dims"),), True
    yield "E032", "first-is-another", "dims-of-zero", (put(["media", "tokens", "boxes"], "dims"),), True
    yield "E032", "17-dims", uniform, (put(["tokens", *(f"d{n}" for n in range(16))], "dims"),), True
    yield "E032", "axis-of-no-dim", uniform, (put("frames", *_K, "axes", 0, "size"),), True
    yield "E032", "extra-of-no-dim", uniform, (put("frames", *_IDS, "axes", 0, "size"),), False

    yield "E033", "axis-of-zero", uniform, (put(0, *_K, "axes", 2, "size"),), True
    yield "E033", "extra-of-zero", uniform, (_append(_extra("x", "U8", 0), "extras"),), False
    yield "E033", "last-of-zero", "sliding-window", (put({"last": 0}, *_K, "axes", 0, "size"),), True
    yield "E033", "record-too-large", uniform, (put(2**45, *_K, "axes", 2, "size"),), True
    yield "E033", "sizes-overflow", uniform, tuple(put(2**53 - 1, *_K, "axes", n, "size") for n in (1, 2)), False

    yield "E034", "no-layers", uniform, (put([], *_K, "layers"),), True
    yield "E034", "descending", uniform, (put([1, 0], *_K, "layers"),), True
    yield "E034", "layer-twice", uniform, (put([1, 1], *_K, "layers"),), False
    yield "E034", "layer-65536", uniform, (put([0, 65_536], *_K, "layers"),), True

    yield "E035", "layer-in-two-keys", "sliding-window", (put([1], "components", 2, "layers"),), True
    yield "E035", "layer-in-two-states", "hidden-and-state", (put("state", "components", 5, "role"),), False

    yield "E036", "key-without-stage", uniform, (drop(*_K, "stage"),), True
    yield "E036", "value-with-stage", uniform, (put("raw", *_V, "stage"),), True
    yield "E036", "latent-without-stage", "latent-attention", (drop(*_K, "stage"),), False
    yield "E036", "rope-key-without-stage", "latent-attention", (drop(*_V, "stage"),), False
    yield "E036", "hidden-with-stage", "hidden-and-state", (put("normed", "components", 2, "stage"),), False

    for codec in ("byteplane-zstd", "zstd", "RAW", ""):
        yield "E037", f"codec-{codec or 'empty'}", uniform, (put(codec, *_K, "codec"),), codec == "byteplane-zstd"


def _quant() -> Iterator[tuple[str, str, str, tuple[Change, ...], bool]]:
    int8, fp8 = "int8-with-scales", "fp8-with-scales"
    scale: tuple[Step, ...] = ("components", 2)
    yield "E038", "without-quant", int8, (drop(*_K, "quant"), put("other", *scale, "role")), True
    yield "E038", "fp8-without-quant", fp8, (drop(*_V, "quant"), put("other", "components", 3, "role")), False
    yield "E038", "quant-of-bf16", "one-record", (put({"scale": "v"}, *_K, "quant"),), True
    yield "E038", "no-such-scale", int8, (put("s_scale", *scale, "name"),), True
    yield "E038", "scale-is-an-extra", int8, (put("token_ids", *_K, "quant", "scale"),), False
    yield "E038", "scale-is-itself", int8, (put("k", *_K, "quant", "scale"),), False
    yield "E038", "scale-of-other-role", int8, (put("v_scale", *_K, "quant", "scale"),), False
    yield "E038", "scale-of-no-role", int8, (put("other", *scale, "role"),), False
    yield "E038", "scale-of-other-layers", int8, (put([0, 2], *scale, "layers"),), True
    yield "E038", "scale-of-other-size", int8, (put(3, *scale, "axes", 2, "size"),), False
    yield "E038", "scale-of-fewer-axes", int8, (drop(*scale, "axes", 0),), True
    yield "E038", "scale-of-nothing", int8, (put("value_scale", *scale, "role"), put([5, 6], *scale, "layers")), False
    yield "E038", "scale-is-bf16", int8, (put("BF16", *scale, "dtype"),), False
    yield "E038", "scale-has-a-scale", int8, (put({"scale": "v_scale"}, *scale, "quant"),), False
    yield "E038", "latent-with-key-scale", fp8, (put("key_scale", "components", 5, "role"),), False
    lonely: dict[str, Any] = {
        "name": "q_scale", "role": "key_scale", "layers": [9], "dtype": "F32", "codec": "raw",
        "axes": [{"name": "a", "size": 1}],
    }  # fmt: skip
    yield "E038", "scale-left-over", "one-record", (_append(lonely, "components"),), False


def _shared_and_extras() -> Iterator[tuple[str, str, str, tuple[Change, ...], bool]]:
    shared, uniform = "shared-layers", "one-record"
    yield "E039", "layer-is-stored", shared, (put(0, "shared", 0, "layer"),), True
    yield "E039", "source-is-not-stored", shared, (put(1, "shared", 1, "source"),), True
    yield "E039", "layer-twice", shared, (put(1, "shared", 1, "layer"),), False
    yield "E039", "out-of-order", shared, (put(40, "shared", 0, "layer"),), True
    moved = (put([2, 5], *_K, "layers"), put([2, 5], *_V, "layers"))
    hidden = put([{"layer": 1, "source": 7}], "shared")
    yield "E039", "source-is-hidden-only", "hidden-and-state", (*moved, hidden), False

    yield "E040", "token-ids-u64", uniform, (put("U64", *_IDS, "dtype"),), True
    yield "E040", "token-ids-2-axes", uniform, (_append({"name": "one", "size": 1}, *_IDS, "axes"),), False
    yield "E040", "token-ids-of-last", uniform, (put({"last": 16}, *_IDS, "axes", 0, "size"),), False
    yield "E040", "positions-2-rows", "positions-3-rows", (put(2, "extras", 1, "axes", 0, "size"),), True
    yield "E040", "positions-u64", "positions-1-row", (put("U64", "extras", 1, "dtype"),), False
    yield "E040", "mask-of-3", "masks", (put(3, "extras", 1, "axes", 0, "size"),), False
    yield "E040", "mask-u8", "masks", (put("U8", "extras", 1, "dtype"),), False
    yield "E040", "media-of-48", "dims-of-zero", (put(48, "extras", 1, "axes", 1, "size"),), False
    yield "E040", "media-of-other-dim", "dims-of-zero", (put("boxes", "extras", 1, "axes", 0, "size"),), False
    yield "E040", "mask-without-token-ids", "masks", (put("ids", *_IDS, "name"),), True
    yield "E040", "positions-without-token-ids", "positions-1-row", (drop(*_IDS),), False


MUTATIONS = (
    *(
        Mutation(code=code, name=name.lower(), base=base, apply=edit_schema(*changes), vector=vector)
        for cases in (_schemas, _quant, _shared_and_extras)
        for code, name, base, changes, vector in cases()
    ),
    Mutation(code="E033", name="header-too-large", apply=_many_extras(120), vector=False),
)
