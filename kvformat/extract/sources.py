"""Documents files: JSON Lines, one document a line, read as a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

from msgspec import Struct

from kvformat.errors import InputError, KVFormatError, make_error
from kvformat.spec import limits

__all__ = ["BadLines", "Message", "Source", "read_documents", "refuse"]

JSON = Any  # a decoded JSON value; leaves this module only as a Source, or as parts of a message the template reads
Kind = Literal["text", "messages", "token_ids"]
Message = dict[str, JSON]
_SHOWN = 20  # bad lines whose reasons are told
_KINDS: tuple[Kind, ...] = ("text", "messages", "token_ids")
_MESSAGE_MEMBERS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


class Source(Struct, frozen=True, kw_only=True):
    """One line of a documents file. Exactly one of ``text``, ``messages`` and ``token_ids`` is present.

    Attributes
    ----------
    id
        Name of the record, 1 to 512 bytes of UTF-8, unique in the file.
    line
        Line number, from 1.
    """

    id: str
    line: int
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def kind(self) -> Kind:
        """Which of the three members the line has."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


class _DuplicateMemberError(ValueError):
    pass


class BadLines:
    """Gathers what is wrong with the lines of a documents file, to be told at once.

    Holds the reasons of the first few, and counts the rest.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._first: KVFormatError | None = None
        self._reasons: list[str] = []
        self._count = 0

    def add(self, error: KVFormatError) -> None:
        """One more; its message begins with the number of the line."""
        self._first = self._first or error
        self._count += 1
        if self._count <= _SHOWN:
            self._reasons.append(error.message)

    def check(self) -> None:
        """Raise where anything is wrong, with the code of the first bad line; a single one as it was found."""
        if self._first is None:
            return
        if self._count == 1:
            raise self._first
        more = self._count - len(self._reasons)
        told = [*self._reasons, *([f"and {more:,} more"] if more else [])]
        raise make_error(self._first.code, f"{self._count:,} bad lines: {'; '.join(told)}", path=self._path)


def read_documents(path: str | Path, *, bad: BadLines | None = None) -> Iterator[Source]:
    """Read a documents file line by line.

    Only the ids are held in memory, to find duplicates.

    Parameters
    ----------
    bad
        Gets the bad lines, for the caller to check once the file is read; good lines among them are given on. Without
        it nothing is given on after the first bad line, and all of them are raised when the file is read.

    Raises
    ------
    InputError
        E300 with file, line numbers and reasons; E306 where the file holds no document.
    StorageError
        E203 where the file cannot be read.
    """
    found = bad or BadLines(path)
    going = True
    number = 0
    seen: dict[str, int] = {}
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901 - some editors put it before everything
                try:
                    source = _parse(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)
                    first = seen.setdefault(source.id, number)
                    if first != number:
                        refuse(path, number, f"id {source.id!r} stands in line {first} already; ids are unique")
                except InputError as error:
                    found.add(error)
                    going = bad is not None
                    continue
                if going:
                    yield source
    except OSError as error:
        raise make_error("E203", f"the documents file cannot be read: {error.strerror or error}", path=path) from error
    if bad is None:
        found.check()
    if number == 0:
        raise make_error("E306", "the documents file is empty; write one JSON object a line", path=path)


def refuse(path: object, line: int, reason: str) -> NoReturn:
    """Raise E300 for a line."""
    raise make_error("E300", f"line {line}: {reason}", path=path)


def _parse(raw: bytes, path: object, line: int) -> Source:
    if not raw.strip():
        refuse(path, line, "blank; remove the line")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        refuse(path, line, f"not UTF-8 at byte {error.start}")
    except _DuplicateMemberError as error:
        refuse(path, line, f"member {error.args[0]!r} stands twice")
    except RecursionError:
        refuse(path, line, "nested too deeply")
    except json.JSONDecodeError as error:
        refuse(path, line, f"not JSON at column {error.colno}: {error.msg}")
    except ValueError as error:
        refuse(path, line, f"not JSON: {error}")
    if not isinstance(value, dict):
        refuse(path, line, f"expected a JSON object, found {_kind(value)}")
    given = [kind for kind in _KINDS if kind in value]
    unknown = sorted(value.keys() - {"id", *_KINDS})
    if unknown:
        names = ", ".join(map(repr, unknown))
        refuse(path, line, f"unknown member {names}; expected `id` and one of {', '.join(_KINDS)}")
    if len(given) != 1:
        refuse(path, line, f"expected exactly one of {', '.join(_KINDS)}, found {', '.join(given) or 'none'}")
    reason = (
        _id_reason(value.get("id"))
        or (_text_reason(value["text"]) if "text" in value else None)
        or (_messages_reason(value["messages"]) if "messages" in value else None)
        or (_token_reason(value["token_ids"]) if "token_ids" in value else None)
        or (None if _encodable(value) else "a string holds a surrogate, which UTF-8 cannot encode")
    )
    if reason is not None:
        refuse(path, line, reason)
    return Source(
        id=value["id"],
        line=line,
        text=value.get("text"),
        messages=tuple(value["messages"]) if "messages" in value else None,
        token_ids=tuple(value["token_ids"]) if "token_ids" in value else None,
    )


def _id_reason(name: JSON) -> str | None:
    if name is None:
        return "`id` is missing"
    if not isinstance(name, str):
        return f"`id` must be a string, found {_kind(name)}"
    nbytes = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= nbytes <= limits.MAX_NAME_NBYTES:
        return f"`id` must have 1 to {limits.MAX_NAME_NBYTES} bytes of UTF-8, found {nbytes}"
    return None


def _text_reason(text: JSON) -> str | None:
    return None if isinstance(text, str) else f"`text` must be a string, found {_kind(text)}"


def _messages_reason(messages: JSON) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"`messages` must be a non-empty array of objects, found {_kind(messages)}"
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            return f"{where} must be an object, found {_kind(message)}"
        unknown = sorted(message.keys() - _MESSAGE_MEMBERS)
        if unknown:
            return f"{where}: unknown member {', '.join(map(repr, unknown))}"
        if not isinstance(message.get("role"), str):
            return f"{where}: `role` must be a string"
        content = message.get("content")
        if isinstance(content, list):
            if not all(
                isinstance(part, dict)
                and part.keys() == {"type", "text"}
                and part["type"] == "text"
                and isinstance(part["text"], str)
                for part in content
            ):
                return f'{where}: a part of `content` must be {{"type": "text", "text": ...}}; media are not read here'
        elif not isinstance(content, str) and not (content is None and "tool_calls" in message):
            return f"{where}: `content` must be a string or an array of text parts, found {_kind(content)}"
    return None


def _token_reason(ids: JSON) -> str | None:
    if not isinstance(ids, list):
        return f"`token_ids` must be an array of integers, found {_kind(ids)}"
    if not ids:
        return "`token_ids` is empty; give an empty caption a token of its own, such as BOS"
    if len(ids) > limits.MAX_TOKENS:
        return f"`token_ids` has {len(ids)} ids, at most {limits.MAX_TOKENS} are allowed"
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limits.MAX_TOKEN_ID:
            return f"token_ids[{index}] must be an integer of 0 to 2^31-1, found {value!r}"
    return None


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found: dict[str, JSON] = {}
    for name, value in pairs:
        if name in found:
            raise _DuplicateMemberError(name)
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _encodable(value: JSON) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, list):
        return all(map(_encodable, value))
    if isinstance(value, dict):
        return all(_encodable(name) and _encodable(item) for name, item in value.items())
    return True


def _kind(value: JSON) -> str:
    if value is None:
        return "null"
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return f"an empty {names[type(value)]}" if value in ({}, [], "") else names[type(value)]
