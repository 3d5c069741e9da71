"""The options that say which documents there are, and how they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from kvformat.errors import make_error

__all__ = ["BatchSize", "BatchTokens", "Columns", "Order", "SkipTooLong", "Source", "parse_columns"]

Source = Annotated[
    str,
    typer.Option(
        "--documents",
        metavar="SRC",
        help="Where documents come from: JSON Lines, *.parquet or a directory of them, a data set that Hugging Face "
        "datasets saved, or file.py:FUNCTION; each object has `id` and one of `text`, `messages`, `token_ids`. Or a "
        "documents file (*.kvdocs).",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="MEMBER=NAME",
        help="Which column is `id`, `text`, `messages` or `token_ids`, such as text=caption: of "
        "Parquet and saved data "
        "sets; repeatable.",
    ),
]
SkipTooLong = Annotated[
    bool,
    typer.Option("--skip-too-long", help="Leave out, and list, documents that are longer than the model's positions."),
]
Order = Annotated[
    Literal["given", "length"],
    typer.Option(
        "--order",
        help="Records within a shard: as the documents came, or by length, so that more can be computed together.",
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        min=1,
        metavar="N",
        help="Most documents of one forward pass; only those of equal length go together.",
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens", min=1, metavar="N", help="Most tokens of one forward pass; a longer document is alone."
    ),
]


def parse_columns(given: Sequence[str] | None) -> dict[str, str] | None:
    """Columns by member, of texts such as ``id=clip``; E081 for anything else, and for a member given twice."""
    found: dict[str, str] = {}
    for text in given or ():
        member, equals, name = text.partition("=")
        if not equals or not name or member in found:
            raise make_error("E081", f"--column must be MEMBER=NAME, each member once, found {text!r}")
        found[member] = name
    return found or None
