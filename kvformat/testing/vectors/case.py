"""A dataset to be built, and what a reader must find in it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

import kvformat
from kvformat.spec.document import MASKS
from kvformat.spec.schema import Component, Extra, Schema
from kvformat.tensors import from_buffer
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.vectors.values import Stored, axes, component, fill, shape_of

__all__ = [
    "HEADS",
    "TOKENS",
    "TOKEN_IDS",
    "UNIFORM",
    "Case",
    "Entry",
    "document_ids",
    "kv",
    "schema_of",
    "usual_entries",
]


class Entry(Struct, frozen=True, kw_only=True):
    """One record: its names, its document, dims besides ``tokens``, and values that are not the usual ones."""

    names: tuple[str, ...]
    document: kvformat.Document
    dims: Mapping[str, int] = {}
    values: Mapping[str, bytes] = {}


class Case(Struct, frozen=True, kw_only=True):
    """A dataset to be built.

    Attributes
    ----------
    options
        Further arguments of :func:`kvformat.create`.
    skipped
        Names and reasons of documents that are listed as skipped.
    finish
        Changes to what the writer made that keep it valid.
    warnings
        Codes verification warns with.
    """

    name: str
    schema: Schema
    entries: tuple[Entry, ...]
    context: kvformat.Context = kvformat.Context.unknown()
    options: Mapping[str, Any] = {}
    skipped: tuple[tuple[str, str], ...] = ()
    finish: Callable[[DatasetFiles], None] | None = None
    warnings: tuple[str, ...] = ()

    def tensors(self, number: int) -> dict[str, Stored]:
        """Components and extras of a record, as they are to be stored."""
        entry = self.entries[number]
        dims = {"tokens": entry.document.num_tokens, "media": len(entry.document.media), **entry.dims}
        scales = {c.quant.scale for c in self.schema.components if c.quant is not None}
        found: dict[str, Stored] = {}
        stored: list[Component | Extra] = [*self.schema.components, *self.schema.extras]
        for position, tensor in enumerate(stored):
            shape = shape_of(tensor.axes, dims)
            if isinstance(tensor, Component):
                shape = (len(tensor.layers), *shape)
            data = entry.values.get(tensor.name)
            if data is None:
                data = _of_document(tensor.name, shape, entry.document)
            if data is None:
                data = fill(tensor.dtype, shape, 64 * number + position + 1, positive=tensor.name in scales)
            found[tensor.name] = (tensor.dtype, shape, data)
        return found

    def write(self, path: Path) -> None:
        """Write the dataset with the library's writer, without ``finish``."""
        components = {c.name for c in self.schema.components}
        owned = {"token_ids", "position_ids", "mask", "media"}
        with kvformat.create(
            path, schema=self.schema, context=self.context, **{"shard_slots": 4, **self.options}
        ) as writer:
            for name, reason in self.skipped:
                writer.skip(name, reason)
            for number, entry in enumerate(self.entries):
                given = {
                    name: from_buffer(bytearray(data), dtype).reshape(shape)
                    for name, (dtype, shape, data) in self.tensors(number).items()
                }
                writer.add(
                    entry.names[0],
                    {name: value for name, value in given.items() if name in components},
                    document=entry.document,
                    extras={name: value for name, value in given.items() if name not in components | owned},
                )
            for entry in self.entries:
                for name in entry.names[1:]:
                    writer.alias(name, entry.names[0])

    def build(self) -> DatasetFiles:
        """The dataset in memory."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "dataset"
            self.write(path)
            files = DatasetFiles.load(path)
        if self.finish is not None:
            self.finish(files)
        return files

    def expected(self, identity: str) -> dict[str, Any]:
        """What a reader must find: built from what was written, not from what was read."""
        records = []
        for number, entry in enumerate(self.entries):
            dims = {"tokens": entry.document.num_tokens, "media": len(entry.document.media), **entry.dims}
            records.append(
                {
                    "names": list(entry.names),
                    "document": hashlib.sha256(entry.document.to_bytes()).hexdigest(),
                    "dims": {dim: dims[dim] for dim in self.schema.dims},
                    "tensors": {
                        name: {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
                        for name, (dtype, shape, data) in self.tensors(number).items()
                    },
                }
            )
        found: dict[str, Any] = {"id": identity, "records": records}
        return {**found, "warnings": list(self.warnings)} if self.warnings else found


def _of_document(name: str, shape: tuple[int, ...], document: kvformat.Document) -> bytes | None:
    if name == "token_ids":
        return document.token_ids.astype("<i4").tobytes()
    if name == "position_ids":
        rows = document.position_ids
        if rows is None:
            rows = np.arange(document.num_tokens, dtype="<i4")[None]
        return np.broadcast_to(rows, shape).astype("<i4").tobytes()
    if name == "mask":
        return np.array([MASKS.index(document.mask), document.prefix_length], dtype="<u8").tobytes()
    if name == "media":
        return b"".join(entry.pack() for entry in document.media)
    return None


def document_ids(tokens: int, seed: int) -> NDArray[np.int32]:
    """Token ids that look random."""
    return np.frombuffer(fill("I32", (tokens,), 1000 + seed), dtype="<i4") % 32_000


def usual_entries(*tokens: int, **dims: tuple[int, ...]) -> tuple[Entry, ...]:
    """Records of so many tokens each, with one name and a causal document."""
    return tuple(
        Entry(
            names=(f"clip-{number:04d}",),
            document=kvformat.Document.of(document_ids(count, number)),
            dims={dim: sizes[number] for dim, sizes in dims.items()},
        )
        for number, count in enumerate(tokens)
    )


TOKENS, HEADS = ("tokens", "tokens"), ("heads", 2)
TOKEN_IDS = Extra(name="token_ids", axes=axes(TOKENS), dtype="I32")
UNIFORM = Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4)


def schema_of(*components: Component, extras: tuple[Extra, ...] = (TOKEN_IDS,), dims: tuple[str, ...] = ()) -> Schema:
    """A schema with token ids, unless other extras are given."""
    return Schema(dims=("tokens", *dims), components=components, extras=extras, shared=())


def kv(layers: tuple[int, ...] = (0, 1), dtype: str = "BF16") -> tuple[Component, Component]:
    """Keys and values of one shape."""
    width = ("head_dim", 4)
    return (
        component("k", "key", layers, TOKENS, HEADS, width, dtype=dtype, stage="attention"),
        component("v", "value", layers, TOKENS, HEADS, width, dtype=dtype),
    )
