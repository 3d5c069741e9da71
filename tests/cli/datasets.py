"""Writes the small datasets the tests of the command line look at."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import kvformat
from kvformat.spec import canonical
from kvformat.spec.context import Context, Model, RopeGroup, Scalars, Sizes, Text, WeightsDigest, real
from kvformat.write.writer import Writer

SECRET = 1_234_567  # a token id that must not be shown unless asked for
LENGTHS = (3, 5, 8, 300)
TENSORS = {"embed": "e", "layers.0.k": "k0", "layers.0.v": "v0"}
SCHEMA = kvformat.Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="F32")


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output as the one JSON object it must be."""
        found: dict[str, Any] = json.loads(self.stdout, parse_constant=pytest.fail)
        return found


def weights(tensors: Mapping[str, str] = TENSORS) -> bytes:
    """The covered file of a model whose tensors have these contents."""
    listed = [
        {"dtype": "F32", "name": name, "sha256": hashlib.sha256(value.encode()).hexdigest(), "shape": [4, 4]}
        for name, value in sorted(tensors.items())
    ]
    return canonical.encode({"tensors": listed})


def context(listed: bytes, *, theta: float = 10_000.0) -> Context:
    rope = RopeGroup(interleaved=False, kind="default", layers=(0, 1), rotary_dim=4, theta=real(theta))
    return Context.of(
        Model(
            adapters=(),
            compute_dtype="F32",
            family="llama",
            norm_eps=real(1e-5),
            qk_norm="none",
            rope=(rope,),
            scalars=Scalars(),
            sizes=Sizes(head_dim=4, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=1),
            weights=WeightsDigest(scheme="kvf-tensors-1", sha256=hashlib.sha256(listed).hexdigest()),
            windows=(),
        )
    )


def components(schema: kvformat.Schema, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {c.name: torch.randn(len(c.layers), tokens, 1, 4, generator=random) for c in schema.components}


def add(writer: Writer, name: str, *, tokens: int, seed: int, schema: kvformat.Schema = SCHEMA, **more: Any) -> None:
    ids = np.arange(tokens) + SECRET + 10_000 * seed
    writer.add(name, components(schema, tokens, more.pop("values", seed)), token_ids=ids, **more)


def write(
    path: Path,
    *,
    names: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    first: int = 0,
    values: int = 0,
    tensors: Mapping[str, str] = TENSORS,
    theta: float = 10_000.0,
    unknown: bool = False,
    schema: kvformat.Schema = SCHEMA,
    text: Text | None = None,
    provenance: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    shard_nbytes: int = 8192,
    alias: str | None = None,
) -> Path:
    """Publish records of these lengths; documents differ by ``first`` + position, values also by ``values``."""
    listed = weights(tensors)
    covered = {"weights": listed, **(files or {})}
    names = names or [f"clip-{first + number}" for number in range(len(lengths))]
    with kvformat.create(
        path,
        schema=schema,
        context=Context.unknown() if unknown else context(listed, theta=theta),
        text=text,
        provenance=provenance or {"torch": "1.2.3"},
        files={} if unknown else covered,
        shard_nbytes=shard_nbytes,
        shard_slots=4,
    ) as writer:
        for number, (name, tokens) in enumerate(zip(names, lengths, strict=True), start=first):
            add(writer, name, tokens=tokens, seed=number, schema=schema, values=number + values)
        if alias is not None:
            writer.alias(alias, names[0])
    return path


def resumable(path: Path) -> Writer:
    """A writer that leaves finished shards staged when it fails: one record a shard."""
    return kvformat.create(
        path, schema=SCHEMA, context=Context.unknown(), shard_nbytes=4096, shard_slots=4, resume=True, tag="[bold]tag"
    )


class StopError(Exception):
    pass


def interrupted(path: Path, *, records: int = 3) -> Path:
    """A location where a writer stopped after ``records`` records; the last one's shard is unfinished."""
    with pytest.raises(StopError), resumable(path) as writer:
        for number in range(records):
            add(writer, f"clip-{number}", tokens=8, seed=number)
        raise StopError
    return path


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
