"""One document as a source gives it: an object with ``id`` and one of ``text``, ``messages``, ``token_ids``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvformat.spec import limits

__all__ = ["KINDS", "MEMBERS", "Kind", "Message", "Source", "source_of"]

Value = Any  # a value of a source; leaves this module only as a Source, or as parts of a message the template reads
Kind = Literal["text", "messages", "token_ids"]
Message = dict[str, Value]
KINDS: tuple[Kind, ...] = ("text", "messages", "token_ids")
MEMBERS = ("id", *KINDS)
_MESSAGE_MEMBERS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


class Source(Struct, frozen=True, kw_only=True):
    """A document before it is tokenised. Exactly one of ``text``, ``messages`` and ``token_ids`` is present.

    Attributes
    ----------
    id
        Name of the record, 1 to 512 bytes of UTF-8.
    place
        Where it stands in its source, such as ``line 7``: what messages begin with.
    token_ids
        int32 ``[tokens]``.
    """

    id: str
    place: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: NDArray[np.int32] | None = None

    @property
    def images(self) -> tuple[str, ...]:
        """Paths or URLs of the images in its messages, as they are written there, in order."""
        return tuple(
            part["image"]
            for message in self.messages or ()
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part["type"] == "image"
        )

    @property
    def kind(self) -> Kind:
        """Which of the three members it has."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def source_of(value: Value, place: str) -> Source | str:
    """The source an object is, or what is wrong with it."""
    if not isinstance(value, Mapping):
        return f"expected an object, found {_kind(value)}"
    given = [kind for kind in KINDS if kind in value]
    unknown = sorted(map(str, value.keys() - set(MEMBERS)))
    if unknown:
        names = ", ".join(map(repr, unknown))
        return f"unknown member {names}; expected `id` and one of {', '.join(KINDS)}"
    if len(given) != 1:
        return f"expected exactly one of {', '.join(KINDS)}, found {', '.join(given) or 'none'}"
    reason = _id_reason(value.get("id"))
    if reason is not None:
        return reason
    content = value[given[0]]
    ids = None
    if given[0] == "text":
        reason = None if isinstance(content, str) else f"`text` must be a string, found {_kind(content)}"
    elif given[0] == "messages":
        reason = _messages_reason(content)
    else:
        ids = _token_ids(content)
        reason = ids if isinstance(ids, str) else None
    if reason is None and not (_encodable(value["id"]) and (given[0] == "token_ids" or _encodable(content))):
        reason = "a string holds a surrogate, which UTF-8 cannot encode"
    if reason is not None:
        return reason
    return Source(
        id=value["id"],
        place=place,
        text=content if given[0] == "text" else None,
        messages=tuple(content) if given[0] == "messages" else None,
        token_ids=None if isinstance(ids, str) else ids,
    )


def _id_reason(name: Value) -> str | None:
    if name is None:
        return "`id` is missing"
    if not isinstance(name, str):
        return f"`id` must be a string, found {_kind(name)}"
    nbytes = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= nbytes <= limits.MAX_NAME_NBYTES:
        return f"`id` must have 1 to {limits.MAX_NAME_NBYTES} bytes of UTF-8, found {nbytes}"
    return None


def _messages_reason(messages: Value) -> str | None:
    if not isinstance(messages, list | tuple) or not messages:
        return f"`messages` must be a non-empty array of objects, found {_kind(messages)}"
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            return f"{where} must be an object, found {_kind(message)}"
        unknown = sorted(map(str, message.keys() - _MESSAGE_MEMBERS))
        if unknown:
            return f"{where}: unknown member {', '.join(map(repr, unknown))}"
        if not isinstance(message.get("role"), str):
            return f"{where}: `role` must be a string"
        content = message.get("content")
        if isinstance(content, list):
            if not all(map(_is_part, content)):
                return (
                    f'{where}: a part of `content` must be {{"type": "text", "text": TEXT}} or, with images, '
                    '{"type": "image", "image": PATH_OR_URL}'
                )
        elif not isinstance(content, str) and not (content is None and "tool_calls" in message):
            return f"{where}: `content` must be a string or an array of text parts, found {_kind(content)}"
    return None


def _is_part(part: Value) -> bool:
    """Whether a part of a message is a text or an image."""
    if not isinstance(part, dict) or part.get("type") not in ("text", "image"):
        return False
    return part.keys() == {"type", part["type"]} and isinstance(part[part["type"]], str)


def _token_ids(ids: Value) -> NDArray[np.int32] | str:
    if not isinstance(ids, list | tuple | np.ndarray):
        return f"`token_ids` must be an array of integers, found {_kind(ids)}"
    if len(ids) == 0:
        return "`token_ids` is empty; give an empty caption a token of its own, such as BOS"
    if len(ids) > limits.MAX_TOKENS:
        return f"`token_ids` has {len(ids)} ids, at most {limits.MAX_TOKENS} are allowed"
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            return f"`token_ids` must be integers in one dimension, found {ids.dtype} of shape {ids.shape}"
        if ids.min() >= 0 and ids.max() <= limits.MAX_TOKEN_ID:
            return np.ascontiguousarray(ids, dtype=np.int32)
        ids = ids.tolist()
    elif set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= limits.MAX_TOKEN_ID:
        return np.array(ids, dtype=np.int32)
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= limits.MAX_TOKEN_ID:
            return f"token_ids[{index}] must be an integer of 0 to 2^31-1, found {value!r:.40}"
    return np.array(ids, dtype=np.int32)  # integers of other types, such as NumPy's


def _encodable(value: Value) -> bool:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, list | tuple):
        return all(map(_encodable, value))
    if isinstance(value, dict):
        return all(_encodable(name) and _encodable(item) for name, item in value.items())
    return True


def _kind(value: Value) -> str:
    if value is None:
        return "null"
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    name = names.get(type(value), type(value).__name__)
    return f"an empty {name}" if type(value) in (dict, list, str) and not value else name
