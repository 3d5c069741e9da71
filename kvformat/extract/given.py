"""A trainer's documents, from wherever they are: a file, a source of objects, or pairs of names and token ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.file import Documents, open_documents
from kvformat.extract.documents.opening import DocumentsSource, is_documents_file, open_source
from kvformat.extract.documents.reading import Reader, Unreadable, refusal
from kvformat.extract.documents.source import Source, source_of
from kvformat.spec.context import Text
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from kvformat.extract.tokenise import Tokeniser

__all__ = ["Given", "GivenDocuments", "given_documents"]

_TOGETHER = 512  # documents that are looked up, and tokenised, in one call
_TOGETHER_TOKENS = 1 << 20

Wanted = Callable[[list[str]], list[bool]]


class Given(NamedTuple):
    """One document under one name.

    Attributes
    ----------
    digest
        Document digest; None where there is no document.
    document
        Makes it; or what is wrong with it; None where it is not wanted.
    whole
        Whether positions, mask and media were given too; otherwise token ids are all that is known.
    """

    name: str
    digest: bytes | None
    document: Callable[[], Document] | KVFormatError | None
    whole: bool


class GivenDocuments(NamedTuple):
    """Documents in pieces that fit in memory, and how their text became ids, where that is recorded."""

    text: Text | None
    pieces: Iterator[list[Given]]


def given_documents(
    documents: DocumentsSource | Iterable[tuple[str, Any]],
    tokeniser: Tokeniser,
    *,
    wanted: Wanted,
    cut: bool,
) -> GivenDocuments:
    """Open a trainer's documents.

    Parameters
    ----------
    documents
        A documents file (``*.kvdocs``), a source as :mod:`kvformat.extract.documents` takes it, or an iterable of
        (name, token ids) or (name, :class:`~kvformat.Document`).
    tokeniser
        For what is not tokenised.
    wanted
        Says of some names which of their documents are needed.
    cut
        Whether token ids of a source are cut as its text is. Those of a trainer are taken as they are.

    Raises
    ------
    InputError
        While it is read: E300 for an entry that is none, E110 for token ids that make no document.
    UsageError
        E081 for something else.
    DamageError
        E307 where a documents file is damaged.
    """
    if is_documents_file(documents):
        assert isinstance(documents, str | os.PathLike)
        opened = open_documents(documents)
        return GivenDocuments(opened.text, _from_file(opened))
    if isinstance(documents, str | os.PathLike) or callable(documents):
        return GivenDocuments(None, _tokenised(open_source(documents), tokeniser, wanted, cut=cut))
    if not isinstance(documents, Iterable):
        raise make_error("E081", f"documents must be a source or pairs of name and ids, found {documents!r:.80}")
    return GivenDocuments(None, _from_pairs(documents))


def _from_file(documents: Documents) -> Iterator[list[Given]]:
    """Names in the order of the inputs. Ids are read where the digest does not say enough."""
    for first in range(0, documents.num_names, _TOGETHER):
        places = np.arange(first, min(first + _TOGETHER, documents.num_names), dtype=np.uint64)
        numbers = documents.name_document[first : first + _TOGETHER].tolist()
        yield [
            Given(name.decode(), documents.digest(number), partial(documents.document, number), whole=True)
            for name, number in zip(documents.names(places), numbers, strict=True)
        ]


def _from_pairs(pairs: Iterable[tuple[str, Any]]) -> Iterator[list[Given]]:
    piece: list[Given] = []
    tokens = 0
    for pair in pairs:
        name, ids = _pair(pair)
        whole = isinstance(ids, Document)
        try:
            document = ids if whole else Document.of(ids)
        except KVFormatError as error:
            raise make_error(error.code, error.message, record=name) from None
        piece.append(_given(name, document, whole=whole))
        tokens += document.num_tokens
        if len(piece) == _TOGETHER or tokens >= _TOGETHER_TOKENS:
            yield piece
            piece, tokens = [], 0
    if piece:
        yield piece


def _pair(pair: Any) -> tuple[str, Any]:
    try:
        name, ids = pair
    except (TypeError, ValueError):
        raise make_error("E081", f"expected pairs of a name and token ids, found {pair!r:.80}") from None
    if not isinstance(name, str):
        raise make_error("E081", f"a name is a string, found {name!r:.80}")
    return name, ids


def _tokenised(reader: Reader, tokeniser: Tokeniser, wanted: Wanted, *, cut: bool) -> Iterator[list[Given]]:
    """Entries of a source. Unlike extraction, no name is remembered: the caller knows them all."""
    entries = enumerate(reader)
    while chunk := list(islice(entries, _TOGETHER)):
        sources = [_source(reader, ordinal, value) for ordinal, value in chunk]
        needs = wanted([source.id for source in sources])
        needed = [source for source, need in zip(sources, needs, strict=True) if need]
        made: dict[str, Document | KVFormatError] = {
            source.place: Document.of(source.token_ids)
            for source in needed
            if source.token_ids is not None and not cut
        }
        others = [source for source in needed if source.place not in made]
        found = tokeniser.documents(others, path=reader.location)
        made |= {source.place: document for source, document in zip(others, found, strict=True)}
        yield [_given(source.id, made.get(source.place), whole=False) for source in sources]


def _given(name: str, document: Document | KVFormatError | None, *, whole: bool) -> Given:
    if isinstance(document, Document):
        return Given(name, document.digest, lambda: document, whole)
    return Given(name, None, document, whole)


def _source(reader: Reader, ordinal: int, value: object) -> Source:
    place = reader.place(ordinal)
    found = value.reason if isinstance(value, Unreadable) else source_of(value, place)
    if isinstance(found, Source):
        return found
    raise refusal(reader, place, found)
