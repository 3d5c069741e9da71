"""From a source to a documents file: read, tokenised in batches beside the reading, and written in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.file import Documents
from kvformat.extract.documents.opening import DocumentsSource, open_source
from kvformat.extract.documents.reading import BadEntries, Reader, read_sources
from kvformat.extract.documents.source import Kind, Source
from kvformat.extract.documents.writer import DocumentsWriter
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from kvformat.extract.tokenise import Tokeniser

__all__ = ["Enumerated", "TooLong", "write_documents"]

TooLong = Literal["refuse", "skip"]
_BATCH = 256
_THREADS = 2
_AHEAD = 2 * _THREADS

_Entry = Source | KVFormatError
_Outcome = tuple[_Entry, Document | KVFormatError]


class Enumerated(NamedTuple):
    """How far an enumeration got.

    Attributes
    ----------
    names, tokens
        Written so far: names, and tokens of different documents.
    done, total
        How much of the source was read, in bytes; None where nobody knows.
    """

    names: int
    tokens: int
    done: int | None
    total: int | None


def write_documents(
    source: DocumentsSource,
    path: str | os.PathLike[str] | None,
    tokeniser: Tokeniser,
    *,
    columns: Mapping[str, str] | None = None,
    too_long: TooLong = "refuse",
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[Enumerated], None] | None = None,
) -> Documents:
    """Enumerate a source, tokenise it once, and write a documents file.

    The same source gives the same bytes, whatever the number of cores.

    Parameters
    ----------
    source, columns
        See :func:`~kvformat.extract.documents.opening.open_source`.
    path, folder
        See :class:`~kvformat.extract.documents.writer.DocumentsWriter`.
    tokeniser
        Turns entries into documents.
    too_long
        What becomes of a document that is longer than the model's positions: all are refused, or each is left out,
        which is noted with the reason.
    progress
        Told after every few hundred entries, in this thread.

    Raises
    ------
    InputError
        E300, E301, E305: one error tells of all bad entries, with the code of the first. E306 where nothing is left.
    UsageError
        E081.
    StorageError
        E200 to E203; E207 where another file is at ``path``.
    DependencyError
        E205.
    """
    if too_long not in ("refuse", "skip"):
        raise make_error("E081", f"too_long must be 'refuse' or 'skip', found {too_long!r:.80}")
    reader = open_source(source, columns=columns)
    bad = BadEntries(reader.location, reader.noun)
    kinds: set[Kind] = set()
    with DocumentsWriter(path, folder=folder) as writer:
        for outcomes in _tokenised(reader, tokeniser):
            if not _collect(outcomes, tokeniser, writer, bad, kinds, skip=too_long == "skip"):
                break
            if progress is not None:
                done, total = reader.done() or (None, None)
                progress(Enumerated(writer.num_names, writer.num_tokens, done, total))
        bad.check()
        return writer.finish(tokeniser.text(kinds))


def _collect(
    outcomes: Sequence[_Outcome],
    tokeniser: Tokeniser,
    writer: DocumentsWriter,
    bad: BadEntries,
    kinds: set[Kind],
    *,
    skip: bool,
) -> bool:
    """Write what was tokenised, or note what is wrong; whether to go on."""
    for entry, found in outcomes:
        if isinstance(found, Document):
            if not bad and isinstance(entry, Source):  # else nothing will come of the file
                # Of images at the end, truncation may have left none.
                writer.add(entry.id, found, tokeniser.media_sources(entry)[: len(found.media)])
                kinds.add(entry.kind)
        elif isinstance(entry, Source) and skip and found.code == "E301":
            writer.skip(entry.id, found.message)
        else:
            bad.add(found)
            if isinstance(entry, Source) and not tokeniser.takes(entry.kind):
                return False  # every entry of this kind would say the same
    return True


def _tokenised(reader: Reader, tokeniser: Tokeniser) -> Iterator[list[_Outcome]]:
    """Batches of entries with what became of them, in order; a few are tokenised while more are read."""
    entries = read_sources(reader)
    waiting: deque[Future[list[_Outcome]]] = deque()
    first = True
    # Encoding runs without the interpreter's lock, as a rule on all cores. A second thread makes lists of ids
    # meanwhile; where the environment forbids the first, it is what uses a second core.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvformat-tokenise") as threads:
        try:
            while batch := list(islice(entries, _BATCH)):
                waiting.append(threads.submit(_tokenise, batch, reader.location, tokeniser))
                if first:  # it alone changes settings of the tokenizer, which no other call may use at that moment
                    wait(waiting)
                    first = False
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _tokenise(entries: Sequence[_Entry], location: str, tokeniser: Tokeniser) -> list[_Outcome]:
    sources = [entry for entry in entries if isinstance(entry, Source)]
    documents = iter(tokeniser.documents(sources, path=location))
    return [(entry, next(documents) if isinstance(entry, Source) else entry) for entry in entries]
