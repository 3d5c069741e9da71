"""What a plan is made of: documents and options, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvformat.errors import make_error
from kvformat.extract.documents.collect import Enumerated, TooLong, write_documents
from kvformat.extract.documents.file import Documents, open_documents
from kvformat.extract.documents.opening import DocumentsSource, is_documents_file
from kvformat.spec import limits
from kvformat.spec.schema import Schema

if TYPE_CHECKING:
    from kvformat.extract.tokenise import Tokeniser

__all__ = ["check_inputs", "check_options", "documents_of"]


def documents_of(
    given: Documents | DocumentsSource,
    tokeniser: Tokeniser | None,
    *,
    columns: Mapping[str, str] | None,
    too_long: TooLong,
    folder: str | os.PathLike[str] | None,
    progress: Callable[[Enumerated], None] | None,
) -> Documents:
    """The documents of a plan: those of a documents file, all of them proved, or of a source that is enumerated now.

    Parameters and errors as for :func:`kvformat.extract.plan.make_plan`.
    """
    if isinstance(given, Documents) or is_documents_file(given):
        found = given if isinstance(given, Documents) else open_documents(given)
        if columns:
            raise make_error("E081", "a documents file has no columns to choose", path=found.path)
        if tokeniser is not None:
            _check_model(found, tokeniser)
        found.check(vocab_size=None if tokeniser is None else tokeniser.vocab_size)
        return found
    if tokeniser is None:
        raise make_error("E081", "a source needs a tokeniser; only a documents file (*.kvdocs) goes without")
    return write_documents(
        given, None, tokeniser, columns=columns, too_long=too_long, folder=folder, progress=progress
    )


def _check_model(documents: Documents, tokeniser: Tokeniser) -> None:
    """Refuse documents the model does not take, or that are of another tokenizer."""
    difference = tokeniser.difference(documents.text)
    if difference is not None:
        message = f"{difference}; make the documents file again with this model"
        raise make_error("E305", message, path=documents.path)
    longest = int(np.argmax(documents.num_tokens))
    tokens = int(documents.num_tokens[longest])
    if tokeniser.max_tokens is not None and tokens > tokeniser.max_tokens:
        raise make_error(
            "E301",
            f"document {longest}: {tokens} tokens, but the model has {tokeniser.max_tokens} positions; make the "
            f"documents file again and truncate on request (--truncate {tokeniser.max_tokens})",
            path=documents.path,
            record=documents.first_name(longest),
        )


def check_inputs(documents: Documents, schema: Schema) -> None:
    """Refuse a document whose inputs would be lost; E110.

    Where token ids are stored, so must be whatever else its digest is made of.
    """
    extras = {extra.name: extra for extra in schema.extras}
    if "token_ids" not in extras:
        return
    most = (
        3 if "position_ids" in extras and extras["position_ids"].axes[0].size == 3 else int("position_ids" in extras)
    )
    lost = {
        f"more than {most} rows of positions": documents.position_rows > most,
        "a mask": (documents.masks != 0) & ("mask" not in extras),
        "media": (documents.num_media() > 0) & ("media" not in extras),
    }
    for what, which in lost.items():
        if which.any():
            number = int(np.argmax(which))
            raise make_error(
                "E110",
                f"document {number} has {what}, for which the schema has no extra",
                path=documents.path,
                record=documents.first_name(number),
            )


def check_options(shard_nbytes: int, shard_slots: int, order: str, batch_size: int, batch_tokens: int | None) -> None:
    """E081 for an option out of range."""
    ranges: dict[str, tuple[object, int]] = {
        "shard_nbytes": (shard_nbytes, limits.MAX_FILE_NBYTES),
        "shard_slots": (shard_slots, limits.MAX_SHARD_SLOTS),
        "batch_size": (batch_size, limits.MAX_INTEGER),
        "batch_tokens": (1 if batch_tokens is None else batch_tokens, limits.MAX_INTEGER),
    }
    for name, (value, most) in ranges.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise make_error("E081", f"{name} must be an integer of 1 to {most}, found {value!r:.80}")
    if order not in ("given", "length"):
        raise make_error("E081", f"order must be 'given' or 'length', found {order!r:.80}")
