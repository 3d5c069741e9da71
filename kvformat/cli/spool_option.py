"""The option that names another spool directory."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Spool"]

Spool = Annotated[
    str | None,
    typer.Option(
        "--spool",
        metavar="DIR",
        help="Where shards wait for their upload to a URL [default: kvformat/spool in the user's cache].",
    ),
]
