"""The plan of an extraction: which record is in which shard, known and fixed before any model is loaded."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.extract import plan_file
from kvformat.extract.arrangement import Arrangement, Order, arrange, payload_nbytes
from kvformat.extract.documents.collect import Enumerated, TooLong
from kvformat.extract.documents.file import Documents
from kvformat.extract.documents.opening import DocumentsSource
from kvformat.extract.plan_file import FileProof, PlanHead, PlanTotals
from kvformat.extract.plan_input import check_inputs, check_options, documents_of
from kvformat.spec import canonical, limits
from kvformat.spec.context import Text
from kvformat.spec.document import Document
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Skipped
from kvformat.spec.rules import check_schema
from kvformat.spec.schema import Schema

if TYPE_CHECKING:
    from kvformat.extract.tokenise import Tokeniser

__all__ = ["Plan", "PlannedDocument", "make_plan", "open_plan"]


class PlannedDocument(NamedTuple):
    """One record of a plan: its number, the first of its names, its document and the digest of that."""

    record: int
    name: str
    document: Document
    digest: bytes


class Plan:
    """Records, shards and forward groups of an extraction. Made by :func:`make_plan` and :func:`open_plan`.

    Everything about it is a function of documents, schema and options: equal ones give an equal :attr:`digest`, in any
    process on any machine. Threads may use one plan at the same time.

    Attributes
    ----------
    digest
        SHA-256 of ``plan.json``, 64 hexadecimal digits.
    schema, text
        Of the records, and how text became their token ids.
    shard_nbytes, shard_slots, header_size
        When a shard is full, in bytes of payload and in records, and where its data begin.
    order
        Of the records within a shard: as the documents came first (``given``), or by length (``length``).
    batch_size, batch_tokens
        Most documents and most tokens of a forward group.
    num_inputs, num_names, num_records, num_tokens
        Inputs of the source, those left out included; names; different documents; and the tokens of those.
    num_shards, num_groups
        How many there are.
    nbytes, longest
        Payload of all records in bytes, and tokens of the longest.
    """

    def __init__(self, head: PlanHead, documents: Documents, arrangement: Arrangement) -> None:
        self._head = head
        self._documents = documents
        self._arrangement = arrangement
        self._document = arrangement.document.data
        self._shard_first = arrangement.shard_first.data
        self._group_first = arrangement.group_first.data
        self._num_tokens = documents.num_tokens.data
        self.digest = hashlib.sha256(canonical.encode(head)).hexdigest()
        self.schema: Schema = head.schema
        self.text: Text = head.text
        self.shard_nbytes = head.shard_nbytes
        self.shard_slots = head.shard_slots
        self.header_size = head.header_size
        self.order: Order = head.order
        self.batch_size = head.batch_size
        self.batch_tokens = head.batch_tokens
        self.num_inputs = head.totals.inputs
        self.num_names = head.totals.names
        self.num_records = head.totals.records
        self.num_tokens = head.totals.tokens
        self.num_shards = head.totals.shards
        self.num_groups = head.totals.groups
        self.nbytes = head.totals.nbytes
        self.longest = head.totals.longest

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Inputs that were left out, in their order, each with the reason."""
        return self._documents.skipped

    @property
    def names_nbytes(self) -> int:
        """Bytes of all names together."""
        return self._documents.names_nbytes

    def shard(self, ordinal: int) -> range:
        """Records of a shard; E080 where there is no such shard."""
        if not 0 <= ordinal < self.num_shards:
            raise make_error("E080", f"the plan has shards 0 to {self.num_shards - 1}, found {ordinal}")
        end = self._shard_first[ordinal + 1] if ordinal + 1 < self.num_shards else self.num_records
        return range(self._shard_first[ordinal], end)

    def groups(self, ordinal: int) -> Iterator[range]:
        """Forward groups of a shard, in order: records of one length each."""
        records = self.shard(ordinal)
        number = bisect_left(self._group_first, records.start)
        while number < self.num_groups and self._group_first[number] < records.stop:
            end = self._group_first[number + 1] if number + 1 < self.num_groups else self.num_records
            yield range(self._group_first[number], end)
            number += 1

    def shard_of(self, record: int) -> int:
        """Shard of a record."""
        return bisect_right(self._shard_first, record) - 1

    def shard_size(self, ordinal: int) -> tuple[int, int]:
        """Tokens, and bytes of payload, of all records of a shard."""
        self.shard(ordinal)
        return int(self._shard_sizes[0][ordinal]), int(self._shard_sizes[1][ordinal])

    @property
    def largest_shard_nbytes(self) -> int:
        """Payload of the largest shard."""
        return int(self._shard_sizes[1].max())

    def num_tokens_of(self, record: int) -> int:
        """Tokens of a record."""
        return int(self._num_tokens[self._document[record]])

    def document(self, record: int) -> PlannedDocument:
        """The document of a record. Its arrays are views of a mapped file, and not to be written to.

        Raises
        ------
        DamageError
            E307 where it is not the one that was planned.
        """
        number = self._document[record]
        document = self._documents.document(number)
        return PlannedDocument(record, self._documents.first_name(number), document, self._documents.digest(number))

    def digest_of(self, record: int) -> bytes:
        """Document digest of a record."""
        return self._documents.digest(self._document[record])

    def shard_documents(self, ordinal: int) -> Sequence[bytes]:
        """Document digest of each record of a shard, in order; the documents themselves are not read."""
        records = self.shard(ordinal)
        numbers = self._arrangement.document[records.start : records.stop]
        digests = self._documents.digests[numbers.astype(np.intp)].tobytes()
        return [digests[at : at + 32] for at in range(0, len(digests), 32)]

    def names(self) -> Iterator[tuple[int, int, bytes]]:
        """Record, input and UTF-8 of every name, by record and then by input."""
        record = self._record[self._documents.name_document.astype(np.intp)]
        places = np.argsort(record, kind="stable")  # the inputs ascend as they are
        inputs = self._documents.name_input[places].tolist()
        return zip(record[places].tolist(), inputs, self._documents.names(places), strict=True)

    def media_source(self, digest: bytes) -> str | None:
        """Path or URL of the media with this digest; None where the documents name none."""
        return self._documents.media_source(digest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Keep the plan in a directory, which appears whole; nothing is overwritten. An equal plan there is as good.

        Raises
        ------
        StorageError
            E200, E202, E203; E207 where something else is at ``path``.
        DamageError
            E307 where this plan is there, and is damaged.
        """
        plan_file.save(Path(path), self._head, self._documents, self._arrangement)

    def close(self) -> None:
        """Let go of the files, once nothing else refers to them. More than once is harmless."""

    @cached_property
    def _shard_sizes(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Tokens and payload of each shard."""
        documents, order = self._documents, self._arrangement.document.astype(np.intp)
        nbytes = payload_nbytes(Layout(self.schema), documents.num_tokens, documents.num_media())
        firsts = self._arrangement.shard_first.astype(np.intp)
        tokens = np.add.reduceat(documents.num_tokens[order].astype(np.uint64), firsts)
        return tokens, np.add.reduceat(nbytes[order].astype(np.uint64), firsts)

    @cached_property
    def _record(self) -> NDArray[np.uint64]:
        """Record of each document."""
        found = np.empty(self.num_records, dtype=np.uint64)
        found[self._arrangement.document.astype(np.intp)] = np.arange(self.num_records, dtype=np.uint64)
        return found


def make_plan(
    documents: Documents | DocumentsSource,
    tokeniser: Tokeniser | None = None,
    *,
    schema: Schema,
    shard_nbytes: int = 1 << 30,
    shard_slots: int = 1024,
    order: Order = "given",
    batch_size: int = 1,
    batch_tokens: int | None = None,
    columns: Mapping[str, str] | None = None,
    too_long: TooLong = "refuse",
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[Enumerated], None] | None = None,
) -> Plan:
    """Plan an extraction.

    Parameters
    ----------
    documents
        An open documents file or the path of one (``*.kvdocs``), every document of which is read and proved; or a
        source, as :func:`~kvformat.extract.documents.opening.open_source` takes it, which is enumerated and tokenised.
    tokeniser
        Turns a source into documents. With a documents file it says what the model takes: documents that are longer,
        ids beyond its vocabulary, and text that was tokenised by another tokenizer are refused.
    schema
        Of the records.
    shard_nbytes, shard_slots
        A shard closes before its payload would exceed so many bytes, and at so many records.
    order
        Of the records within a shard: as the documents came first, or by length, so that more of them are computed
        together.
    batch_size, batch_tokens
        Most documents of a forward group, which are of one length, and most tokens; a longer document is alone.
    columns, too_long, progress
        Of a source; see :func:`~kvformat.extract.documents.collect.write_documents`.
    folder
        Where the documents of a source are kept while the plan is used, in a file that is gone afterwards.

    Raises
    ------
    UsageError
        E081.
    InputError
        E300, E301, E305, E306 of the documents; E110 for one whose inputs the schema has no room for; E111 beyond the
        limits.
    FormatError
        E030 to E039 for a schema that is none.
    DamageError
        E307 for a documents file that is damaged.
    StorageError
        E200 to E203, E207.
    """
    check_options(shard_nbytes, shard_slots, order, batch_size, batch_tokens)
    check_schema(schema, requires=())
    layout = Layout(schema)
    header_size = layout.header_size(limits.VERSION, shard_slots)
    if header_size > limits.MAX_HEADER_NBYTES:
        raise make_error("E111", f"shard headers would have {header_size:,} bytes; plan fewer shard_slots or layers")
    found = documents_of(documents, tokeniser, columns=columns, too_long=too_long, folder=folder, progress=progress)
    check_inputs(found, schema)
    nbytes = payload_nbytes(layout, found.num_tokens, found.num_media())
    arrangement = arrange(
        found.num_tokens,
        nbytes,
        shard_nbytes=shard_nbytes,
        shard_slots=shard_slots,
        order=order,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    )
    head = PlanHead(
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        documents=FileProof.of(found.proof),
        format="kvformat-plan",
        header_size=header_size,
        order=order,
        schema=schema,
        shard_nbytes=shard_nbytes,
        shard_slots=shard_slots,
        text=found.text,
        totals=PlanTotals(
            groups=len(arrangement.group_first),
            inputs=found.num_inputs,
            longest=int(found.num_tokens.max()),
            names=found.num_names,
            nbytes=int(nbytes.sum()),
            records=len(found),
            shards=len(arrangement.shard_first),
            tokens=int(found.num_tokens.sum(dtype=np.uint64)),
        ),
        version=limits.VERSION,
    )
    return Plan(plan_file.completed(head, arrangement), found, arrangement)


def open_plan(path: str | os.PathLike[str]) -> Plan:
    """Open a plan that was saved. Everything but the documents is checked; each of those is, when it is read.

    Parameters
    ----------
    path
        Local directory that :meth:`Plan.save` or ``kvformat plan`` made.

    Returns
    -------
    Plan
        Its documents are views of mapped files: leave these as they are while it is used.

    Raises
    ------
    DamageError
        E307 where it is damaged, cut short, or none of ours, and where there is none.
    StorageError
        E203, E204, E207 where it cannot be read or mapped.
    """
    return Plan(*plan_file.load(Path(path)))
