"""Datasets for audits: what an extractor gives, changed on its way to storage as a faulty tool would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import kvformat
from kvformat.extract import HuggingFaceExtractor
from kvformat.interfaces import Extracted, Extractor
from kvformat.read.dataset import Dataset
from kvformat.spec.context import Context, Text
from kvformat.spec.document import Document
from kvformat.spec.schema import Axis, Extra, Schema
from tests.models import tiny_model

Tensors = dict[str, torch.Tensor]
Change = Callable[[str, Tensors], Tensors]

# Of different lengths, and two of one length.
DOCUMENTS: Mapping[str, list[int]] = {
    "a": [3, 14, 15, 92, 65, 35, 89],
    "b": [27, 18, 28, 18, 28, 45, 90],
    "c": [1, 41, 42, 13, 56, 23, 73, 9, 50, 48, 80, 16],
    "d": [57, 72],
    "e": list(range(100, 140)),
}


class Altered:
    """An extractor that gives what ``change`` makes of another one's tensors."""

    def __init__(self, inner: Extractor, change: Callable[[Document, Tensors], Tensors]) -> None:
        self._inner = inner
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def extract(self, documents: Sequence[Document]) -> list[Extracted]:
        found = self._inner.extract(documents)
        return [
            Extracted(components=self._change(document, dict(one.components)), extras=one.extras)
            for document, one in zip(documents, found, strict=True)
        ]


def extractor_of(name: str = "llama", **options: Any) -> HuggingFaceExtractor:
    """Of a tiny model; ``dtype`` is what it computes in."""
    chosen = {key: options.pop(key) for key in ("layers", "context") if key in options}
    return HuggingFaceExtractor.of(tiny_model(name, **options), **chosen)


def publish(
    path: Path,
    extractor: Extractor,
    documents: Mapping[str, Any] = DOCUMENTS,
    *,
    change: Change = lambda _name, tensors: tensors,
    schema: Schema | None = None,
    context: Context | None = None,
    text: Text | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Dataset:
    """Publish what an extractor gives for documents, or sequences of token ids, after ``change``."""
    whole = {name: given if isinstance(given, Document) else Document.of(given) for name, given in documents.items()}
    tensors = {name: dict(extractor.extract([document])[0].components) for name, document in whole.items()}
    with kvformat.create(
        path,
        schema=schema or extractor.schema,
        context=context or extractor.context,
        text=text or extractor.text,
        files={**extractor.files, **(files or {})},
    ) as writer:
        for name, document in whole.items():
            writer.add(
                name,
                {key: value.contiguous() for key, value in change(name, tensors[name]).items()},
                document=document,
            )
    return kvformat.open(path)


def exchanged(one: str, other: str, extractor: Extractor, documents: Mapping[str, Any] = DOCUMENTS) -> Change:
    """A change that gives two documents each other's tensors."""
    instead = {one: other, other: one}

    def change(name: str, tensors: Tensors) -> Tensors:
        if name not in instead:
            return tensors
        return dict(extractor.extract([Document.of(documents[instead[name]])])[0].components)

    return change


def with_inputs(schema: Schema, *, rows: int) -> Schema:
    """A schema that stores positions and masks, too."""
    extras = (
        *schema.extras,
        Extra(
            name="position_ids", axes=(Axis(name="rows", size=rows), Axis(name="tokens", size="tokens")), dtype="I32"
        ),
        Extra(name="mask", axes=(Axis(name="mask", size=2),), dtype="U64"),
    )
    return Schema(dims=schema.dims, components=schema.components, extras=extras, shared=schema.shared)


def left_padded(model: Any, ids: Sequence[int], *, padding: int) -> Tensors:
    """K and V of a model over a padded input without position ids, the padding cut off: ``[layers, tokens, ...]``."""
    with torch.inference_mode():
        cache = model(
            input_ids=torch.tensor([[0] * padding + list(ids)]),
            attention_mask=torch.tensor([[0] * padding + [1] * len(ids)]),
            use_cache=True,
        ).past_key_values
    return {
        name: torch.stack([getattr(layer, kept)[0, :, padding:].transpose(0, 1) for layer in cache.layers])
        for name, kept in (("k", "keys"), ("v", "values"))
    }
