"""Small schemas and records for the writer's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvformat
from kvformat import Axis, Component, Extra, Quant, Schema

__all__ = ["TOKENS", "all_bytes", "component", "ids", "kv", "read", "scaled", "schema", "single", "tree", "writer"]

TOKENS = Axis(name="tokens", size="tokens")


def axes(*sizes: object) -> tuple[Axis, ...]:
    """Axes of these sizes with made-up names."""
    return tuple(Axis(name=f"axis{n}", size=size) for n, size in enumerate(sizes))


def component(name: str, *sizes: object, role: str = "other", dtype: str = "F32", layers=(0,), **options: object):
    """A component whose axes have made-up names; keys get a stage."""
    if role in ("key", "rope_key", "latent"):
        options.setdefault("stage", "attention")
    quant = options.pop("scale", None)
    return Component(
        name=name,
        role=role,
        layers=tuple(layers),
        axes=axes(*sizes),
        dtype=dtype,
        codec="raw",
        quant=None if quant is None else Quant(scale=quant),
        **options,
    )


def schema(*components: Component, extras=(), dims=("tokens",), shared=(), token_ids: bool = False) -> Schema:
    """A schema of these components."""
    ids_extra = (Extra(name="token_ids", axes=(TOKENS,), dtype="I32"),) if token_ids else ()
    return Schema(dims=tuple(dims), components=tuple(components), extras=(*ids_extra, *extras), shared=tuple(shared))


def single(dtype: str, *sizes: object, role: str = "other", layers=(0,)) -> Schema:
    """A schema of one component ``x``."""
    return schema(component("x", *(sizes or ("tokens",)), dtype=dtype, role=role, layers=layers))


def scaled() -> Schema:
    """Keys and values of 8 bits with a scale a head and token, or a head."""
    return schema(
        component("k", "tokens", 2, 4, role="key", dtype="I8", layers=(0, 1), scale="ks"),
        component("v", "tokens", 2, 4, role="value", dtype="F8_E4M3", layers=(0, 1), scale="vs"),
        component("ks", "tokens", 2, 1, role="key_scale", layers=(0, 1)),
        component("vs", 1, 2, 1, role="value_scale", layers=(0, 1)),
    )


UNIFORM = Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F16")


def writer(location: Path, *, of: Schema = UNIFORM, **options: object) -> kvformat.Writer:
    """A writer with an unknown context."""
    options.setdefault("context", kvformat.Context.unknown())
    return kvformat.create(location, schema=of, **options)


def ids(num_tokens: int = 3, first: int = 0) -> np.ndarray:
    """Token ids."""
    return np.arange(first, first + num_tokens, dtype=np.int32)


def kv(num_tokens: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """Components for :data:`UNIFORM`."""
    generator = np.random.default_rng([num_tokens, seed])
    return {name: generator.standard_normal((2, num_tokens, 2, 4)).astype(np.float16) for name in ("k", "v")}


def read(location: Path) -> kvformat.Dataset:
    """The dataset, verified at level 4 without any finding."""
    report = kvformat.verify(location)
    assert (report.ok, report.level, report.findings, report.warnings) == (True, 4, (), ())
    return kvformat.open(location, expected_id=report.id)


def all_bytes(value) -> bytes:
    """Bytes of a tensor or array, row-major."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tree(directory: Path) -> list[str]:
    """Everything below a directory."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))
