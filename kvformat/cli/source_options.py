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
        help="JSON Lines, *.parquet or a directory of them, a data set saved on disk, or file.py:function: objects "
        "with `id` and one of `text`, `messages`, `token_ids`; or a documents file (*.kvdocs).",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="MEMBER=NAME", help="Column of `id`, `text`, `messages` or `token_ids`; repeatable."
    ),
]
SkipTooLong = Annotated[
    bool,
    typer.Option("--skip-too-long", help="Leave out, and list, what is longer than the model's positions."),
]
Order = Annotated[
    Literal["given", "length"],
    typer.Option("--order", help="Records within a shard as the documents came, or by length: more go together."),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size", min=1, metavar="N", help="Most documents of one forward; only equal lengths go together."
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option("--batch-tokens", min=1, metavar="N", help="Most tokens of one forward; a longer document is alone."),
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
