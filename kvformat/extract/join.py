"""The join check: whether a trainer's documents are those of a dataset, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import InputError, KVFormatError, make_error
from kvformat.extract.agreement import text_differences, text_of, tokeniser_of
from kvformat.extract.documents.opening import DocumentsSource
from kvformat.extract.given import Given, given_documents
from kvformat.extract.inputs import has_inputs, stored_document
from kvformat.extract.join_report import JoinFinding, JoinKind, JoinReport
from kvformat.extract.mismatch import other_inputs, usual_mistake
from kvformat.extract.slots import slots_of_names, slots_of_records
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvformat.read.dataset import Dataset
    from kvformat.spec.context import Text

__all__ = ["check_documents"]

_KINDS: tuple[JoinKind, ...] = ("text", "missing", "tokens", "inputs", "unusable", "extra")


def check_documents(
    dataset: Dataset,
    documents: DocumentsSource | Iterable[tuple[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    subset: bool = False,
    values: bool = False,
    limit: int = 20,
    records: Collection[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> JoinReport:
    """Compare the documents a trainer will ask for with those a dataset holds.

    A K/V that belongs to other tokens than the trainer thinks is coherent and wrong, and nothing shows it in training.
    Memory does not grow with the number of documents, but for a byte a name of the dataset.

    Parameters
    ----------
    dataset
        Its documents are compared by digest; where they differ and it stores ``token_ids``, these tell where.
    documents
        A documents file (``*.kvdocs``); JSON Lines or another source of objects with ``id`` and one of ``token_ids``,
        ``text``, ``messages``; or pairs of a name and token ids, or of a name and a
        :class:`~kvformat.Document`. Token ids alone say nothing of positions, mask and media, which are not compared
        then. Several names of one document are fine, and so is a name that comes again with the same document.
    tokenizer
        Turns text, by the rules the dataset records; is compared with the dataset's own; and decodes for ``values``.
    subset
        Whether names of the dataset may be left out.
    values
        Tell the token ids, and with a tokenizer the text, where documents first differ. They can reveal the prompt.
    limit
        Most findings of each kind to tell; all of them are counted.
    records
        Look at these records alone, whatever else is given; text sections are not compared then, and token ids longer
        than the dataset's rules allow are cut: these are the documents the dataset was made of.
    progress
        Called with the number of documents compared so far.

    Returns
    -------
    JoinReport

    Raises
    ------
    InputError
        E300 for an entry that is no document, E306 for none at all, E110 for ids that are none. E305 for text without
        a tokenizer and E309 for messages with images, which no document can be made of here: that is no difference.
    UsageError
        E081.
    FormatError, DamageError
        Of the dataset, where its index or token ids are damaged; E307 of a documents file.
    """
    if limit < 1:
        raise make_error("E081", f"limit must be an integer of at least 1, found {limit!r}")
    join = _Join(dataset, tokenizer if values else None, values=values, limit=limit, records=records)
    refused = frozenset({"E309"} if tokenizer is not None else {"E305", "E309"})
    source = given_documents(
        documents, tokeniser_of(tokenizer, dataset.text), wanted=join.wanted, cut=records is not None
    )
    if records is None:
        join.compare_text(source.text, tokenizer)
    empty = True
    for piece in source.pieces:
        empty = False
        for given in piece:
            if isinstance(given.document, KVFormatError) and given.document.code in refused:
                raise given.document
        join.compare(piece)
        if progress is not None:
            progress(join.looked_at)
    if empty:
        raise make_error("E306", "no document was given: give those the trainer will ask for", path=dataset.location)
    if not subset:
        join.find_extra()
    return join.report()


class _Join:
    """Counts and first findings."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        values: bool,
        limit: int,
        records: Collection[int] | None,
    ) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._values = values
        self._limit = limit
        self._records = records
        self._chosen = None if records is None else slots_of_records(dataset, records)
        self._seen = np.zeros(dataset.num_names, np.bool_)
        self._skipped = {skipped.name: skipped.reason for skipped in dataset.manifest.skipped}
        self._has_inputs = has_inputs(dataset)
        self._counts = dict.fromkeys(_KINDS, 0)
        self._findings: dict[JoinKind, list[JoinFinding]] = {kind: [] for kind in _KINDS}
        self._notes: list[str] = []
        self.looked_at = self._matched = 0

    def wanted(self, names: list[str]) -> list[bool]:
        """Which documents have to be made."""
        if self._chosen is None:
            return [True] * len(names)
        slots = slots_of_names(self._dataset, names)
        return [bool(slot >= 0 and self._chosen[slot]) for slot in slots.tolist()]

    def compare_text(self, text: Text | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Text section of the file, and the tokenizer, against the dataset's text section."""
        ours = self._dataset.text
        if ours.tokenizer is None:
            self._notes.append("the dataset's documents came as token ids: there is no tokenizer to compare")
            return
        if text is not None and text.tokenizer is not None:
            for one in text_differences(ours, text):
                self._add("text", f"the documents were tokenised otherwise: {one}")
        elif tokenizer is None:
            self._notes.append("nothing is known of the tokenizer of these documents: it is not compared")
        if tokenizer is not None:
            try:
                found = text_differences(ours, text_of(tokenizer, ours))
            except InputError as error:
                found = [error.message]
            for one in found:
                self._add("text", f"the tokenizer is another one: {one}")

    def compare(self, piece: list[Given]) -> None:
        """Some documents."""
        slots = slots_of_names(self._dataset, [given.name for given in piece])
        known = slots >= 0
        owners = np.full(len(piece), -1, np.int64)
        owners[known] = self._dataset.index.records_of_names(slots[known])
        self._seen[slots[known]] = True
        for given, slot, record in zip(piece, slots.tolist(), owners.tolist(), strict=True):
            if self._chosen is not None and (slot < 0 or not self._chosen[slot]):
                continue
            self.looked_at += 1
            if isinstance(given.document, KVFormatError):
                self._add("unusable", given.document.message, name=given.name)
            elif given.document is not None and given.digest is not None:
                self._compare_one(given, given.digest, given.document, None if record < 0 else record)

    def find_extra(self) -> None:
        """Names of the dataset that did not come."""
        if self._records is not None:
            for record in sorted(self._records):
                names = self._dataset.index.names_of(record)
                if not self._seen[slots_of_names(self._dataset, names)].any():
                    self._add("extra", f"no document was given for record {record}", name=names[0], record=record)
            return
        missed: NDArray[np.int64] = np.flatnonzero(~self._seen)
        for slot in missed[: self._limit].tolist():
            record = int(self._dataset.index.records_of_names(np.array([slot], np.int64))[0])
            self._add(
                "extra",
                "the dataset has it, and it was not given",
                name=self._dataset.index.name_at(slot),
                record=record,
            )
        self._counts["extra"] = len(missed)

    def report(self) -> JoinReport:
        """What was found."""
        return JoinReport(
            ok=not any(self._counts.values()),
            id=self._dataset.id,
            location=self._dataset.location,
            looked_at=self.looked_at,
            matched=self._matched,
            findings=tuple(finding for kind in _KINDS for finding in self._findings[kind]),
            notes=tuple(self._notes),
            **self._counts,
        )

    def _compare_one(self, given: Given, digest: bytes, make: Callable[[], Document], record: int | None) -> None:
        name = given.name
        if record is None:
            self._add("missing", self._absence(name, digest), name=name)
        elif self._dataset.index.document(record) == digest:
            self._matched += 1
        elif not self._has_inputs:
            message = "it is another document; the dataset stores no token ids that would tell where"
            self._add("tokens", message, name=name, record=record)
        else:
            ours, theirs = stored_document(self._dataset, self._dataset[record]), make()
            if not np.array_equal(ours.token_ids, theirs.token_ids):
                self._add_tokens(name, record, ours.token_ids, theirs.token_ids)
            elif given.whole:
                self._add("inputs", other_inputs(ours, theirs), name=name, record=record)
            else:
                self._matched += 1

    def _absence(self, name: str, digest: bytes) -> str:
        if name in self._skipped:
            return f"the dataset leaves it out: {self._skipped[name]}"
        record = self._dataset.index.find_document(digest)
        if record is None:
            return "the dataset has no record of this name, and none of this document"
        other = self._dataset.index.names_of(record)[0]
        return f"the dataset has this document under other names, such as {other!r}"

    def _add_tokens(self, name: str, record: int, ours: NDArray[np.int32], theirs: NDArray[np.int32]) -> None:
        shared = min(len(ours), len(theirs))
        differing = np.flatnonzero(ours[:shared] != theirs[:shared])
        position = int(differing[0]) if len(differing) else shared
        lengths = f"{len(ours):,} tokens in the dataset, {len(theirs):,} given"
        expected, found = (int(ids[position]) if position < len(ids) else None for ids in (ours, theirs))
        if not self._values:
            expected = found = None
        self._add(
            "tokens",
            f"token {position} differs ({lengths}){usual_mistake(ours, theirs)}",
            name=name,
            record=record,
            position=position,
            expected=expected,
            found=found,
            expected_text=self._decoded(expected),
            found_text=self._decoded(found),
        )

    def _decoded(self, token_id: int | None) -> str | None:
        if token_id is None or self._tokenizer is None:
            return None
        return str(self._tokenizer.decode([token_id]))

    def _add(self, kind: JoinKind, message: str, **where: Any) -> None:
        self._counts[kind] += 1
        if len(self._findings[kind]) < self._limit:
            self._findings[kind].append(JoinFinding(kind=kind, message=message, **where))
