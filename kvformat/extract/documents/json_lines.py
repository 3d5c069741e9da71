"""JSON Lines: one document a line, read as a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from kvformat.errors import make_error
from kvformat.extract.documents.reading import Unreadable

__all__ = ["JsonLines"]

JSON = Any  # a decoded JSON value


class _DuplicateMemberError(ValueError):
    pass


class JsonLines:
    """A :class:`~kvformat.extract.documents.reading.Reader` of a file of JSON objects, one a line."""

    noun = "line"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nbytes = 0
        self._size = 0

    @property
    def location(self) -> str:
        """Path of the file."""
        return str(self._path)

    def __iter__(self) -> Iterator[object]:
        """Decoded lines; E203 where the file cannot be read."""
        self._nbytes = 0
        try:
            with self._path.open("rb") as file:
                self._size = self._path.stat().st_size
                for number, raw in enumerate(file):
                    self._nbytes += len(raw)
                    # Some editors put a byte order mark before everything.
                    text = raw.removeprefix(codecs.BOM_UTF8) if number == 0 else raw
                    yield _decode(text.removesuffix(b"\n").removesuffix(b"\r"))
        except OSError as error:
            raise make_error(
                "E203", f"the documents file cannot be read: {error.strerror or error}", path=self._path
            ) from error

    def place(self, ordinal: int) -> str:
        """Line number, from 1."""
        return f"line {ordinal + 1}"

    def done(self) -> tuple[int, int]:
        """Bytes."""
        return self._nbytes, max(self._size, self._nbytes)


def _decode(raw: bytes) -> object:
    if not raw.strip():
        return Unreadable("blank; remove the line")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 at byte {error.start}")
    except _DuplicateMemberError as error:
        return Unreadable(f"member {error.args[0]!r} stands twice")
    except RecursionError:
        return Unreadable("nested too deeply")
    except json.JSONDecodeError as error:
        return Unreadable(f"not JSON at column {error.colno}: {error.msg}")
    except ValueError as error:
        return Unreadable(f"not JSON: {error}")


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateMemberError(next(name for name in names if names.count(name) > 1))
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
