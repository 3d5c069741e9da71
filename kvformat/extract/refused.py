"""Documents that are refused one by one: which errors are about a document, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvformat.errors import KVFormatError

__all__ = ["DOCUMENT_CODES", "OnError", "is_of_document", "skip_reason", "with_records"]

OnError = Literal["fail", "skip"]

DOCUMENT_CODES = frozenset({"E104", "E105", "E110", "E111", "E301", "E303", "E309", "E313"})
"""Errors that say something of one document. Others, a wrong dtype for instance, would be those of every document."""

_NAMED = 3


def is_of_document(error: BaseException) -> bool:
    """Whether the error is about one document, so that others may do without it."""
    return isinstance(error, KVFormatError) and error.code in DOCUMENT_CODES


def skip_reason(error: KVFormatError) -> str:
    """Why a document was left out, as the manifest lists it beside the document's name: code, message, layer."""
    layer = "" if error.layer is None else f" (layer {error.layer})"
    return f"{error.code}: {error.message}{layer}"


def with_records(error: Exception, names: Sequence[str]) -> None:
    """Have an error tell which records it is about, unless it says so itself.

    Parameters
    ----------
    names
        Names of the record, or of those that were computed together.
    """
    if isinstance(error, KVFormatError) and len(names) == 1:
        if error.record is None:
            error.record = names[0]
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    error.add_note(f"in extraction of {', '.join(map(repr, names[:_NAMED]))}{more}")
