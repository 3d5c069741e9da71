"""What the tests of the pipeline share: documents, extractors without a model, sinks that can be held up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvformat.interfaces import Extracted
from kvformat.spec.context import Context, Text
from kvformat.spec.document import Document
from kvformat.spec.layout import Layout
from kvformat.spec.schema import Schema
from kvformat.write.record import EncodedRecord, RecordEncoder

__all__ = [
    "SCHEMA",
    "TOKEN_NBYTES",
    "WAIT_S",
    "Gathered",
    "Plain",
    "Planned",
    "encoder",
    "groups_of",
    "planned",
    "stored",
    "values",
]

SCHEMA = Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=256, dtype="F32")
TOKEN_NBYTES = 2 * 2 * 256 * 4
WAIT_S = 60.0  # until a test that would wait for ever fails instead


class Planned(NamedTuple):
    """A planned record."""

    record: int
    name: str
    document: Document
    digest: bytes


def planned(record: int, *ids: int) -> Planned:
    document = Document.of(ids or [record + 1] * 4)
    return Planned(record, f"doc-{record}", document, document.digest)


def groups_of(*sizes: int, tokens: int = 4) -> list[list[Planned]]:
    """Groups of these sizes over consecutive records."""
    found, record = [], 0
    for size in sizes:
        found.append([planned(record + i, *[record + i + 1] * tokens) for i in range(size)])
        record += size
    return found


def values(document: Document) -> dict[str, torch.Tensor]:
    """K is the token ids, V their negatives."""
    key = torch.from_numpy(document.token_ids.astype(np.float32))[None, :, None, None].expand(2, -1, 1, 256)
    return {"k": key.contiguous(), "v": -key}


def encoder(**options: Any) -> RecordEncoder:
    return RecordEncoder(Layout(SCHEMA), **options)


class Plain:
    """An extractor without a model.

    Parameters
    ----------
    before
        Called with the documents of each forward, first; may raise.
    change
        Changes the tensors of a document.
    """

    schema = SCHEMA
    context = Context.unknown()
    text = Text()
    provenance: Mapping[str, str] = {}
    files: Mapping[str, bytes] = {}
    max_tokens = None

    def __init__(
        self,
        before: Callable[[Sequence[Document]], object] | None = None,
        change: Callable[[Document, dict[str, torch.Tensor]], object] | None = None,
    ) -> None:
        self.before = before
        self.change = change
        self.calls: list[list[int]] = []

    def extract(self, documents: Sequence[Document]) -> list[Extracted]:
        self.calls.append([int(document.token_ids[0]) - 1 for document in documents])
        if self.before is not None:
            self.before(documents)
        found = []
        for document in documents:
            tensors = values(document)
            if self.change is not None:
                self.change(document, tensors)
            found.append(Extracted(components=tensors, extras={}))
        return found


class Gathered:
    """A sink that keeps copies of what it is given.

    Parameters
    ----------
    before
        Called with each record before it is kept; may raise, or wait for :attr:`stopped`.
    """

    def __init__(self, before: Callable[[Planned], object] | None = None) -> None:
        self.before = before
        self.records: dict[str, bytes] = {}
        self.skipped: list[tuple[str, str]] = []
        self.order: list[str] = []
        self.threads: set[str] = set()
        self.stopped = threading.Event()

    def add(self, planned: Planned, record: EncodedRecord) -> None:
        self.threads.add(threading.current_thread().name)
        if self.before is not None:
            self.before(planned)
        self.order.append(planned.name)
        self.records[planned.name] = b"".join(bytes(buffer) for buffer in record.buffers)

    def skip(self, planned: Planned, reason: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.order.append(planned.name)
        self.skipped.append((planned.name, reason))

    def stop(self) -> None:
        self.stopped.set()


def stored(one: Planned) -> bytes:
    """What a sink should be given for a record of :class:`Plain`."""
    record = encoder().encode(one.name, one.document, values(one.document), {})
    return b"".join(bytes(buffer) for buffer in record.buffers)
