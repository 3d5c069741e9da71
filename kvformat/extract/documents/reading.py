"""Enumerating a source: every entry checked in the same way, in the order the source has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Source, source_of

__all__ = ["BadEntries", "Reader", "Unreadable", "read_sources", "refusal"]

_SHOWN = 20  # bad entries whose reasons are told


class Unreadable(NamedTuple):
    """An entry that is no object, and why."""

    reason: str


class Reader(Protocol):
    """A source, open. Iterating it gives the same entries in the same order each time."""

    @property
    def location(self) -> str:
        """For messages."""

    @property
    def noun(self) -> str:
        """What an entry is called: ``line``, ``row`` or ``item``."""

    def __iter__(self) -> Iterator[object]:
        """Objects, and :class:`Unreadable` entries among them."""

    def place(self, ordinal: int) -> str:
        """Where the entry with this ordinal (from 0) stands, such as ``line 7``."""

    def done(self) -> tuple[int, int] | None:
        """How much of it was read, and the whole, in bytes; None where nobody knows."""


class BadEntries:
    """Gathers what is wrong with the entries of a source, to be told at once.

    Holds the reasons of the first few, and counts the rest.
    """

    def __init__(self, location: object, noun: str) -> None:
        self._location = location
        self._noun = noun
        self._first: KVFormatError | None = None
        self._reasons: list[str] = []
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, error: KVFormatError) -> None:
        """One more; its message begins with the place."""
        self._first = self._first or error
        self._count += 1
        if self._count <= _SHOWN:
            self._reasons.append(error.message)

    def check(self) -> None:
        """Raise where anything is wrong, with the code of the first bad entry; a single one as it was found."""
        if self._first is None:
            return
        if self._count == 1:
            raise self._first
        more = self._count - len(self._reasons)
        told = [*self._reasons, *([f"and {more:,} more"] if more else [])]
        raise make_error(
            self._first.code, f"{self._count:,} bad {self._noun}s: {'; '.join(told)}", path=self._location
        )


def read_sources(reader: Reader) -> Iterator[Source | KVFormatError]:
    """Every entry of a source, in order: as a :class:`Source`, or the E300 that tells what is wrong with it.

    Only the ids are held in memory, to find those given twice.

    Raises
    ------
    InputError
        E306 where there is no entry at all.
    StorageError
        E203 where the source cannot be read.
    """
    seen: dict[str, int] = {}
    ordinal = -1
    for ordinal, value in enumerate(reader):
        place = reader.place(ordinal)
        found = value.reason if isinstance(value, Unreadable) else source_of(value, place)
        if isinstance(found, Source):
            first = seen.setdefault(found.id, ordinal)
            if first != ordinal:
                found = f"id {found.id!r} stands in {reader.place(first)} already; ids are unique"
        yield found if isinstance(found, Source) else refusal(reader, place, found)
    if ordinal < 0:
        raise make_error("E306", f"there is no {reader.noun} in it; give at least one document", path=reader.location)


def refusal(reader: Reader, place: str, reason: str) -> KVFormatError:
    """The E300 of an entry."""
    return make_error("E300", f"{place}: {reason}", path=reader.location)
