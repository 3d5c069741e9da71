"""The ``kvformat`` command, assembled."""

from __future__ import annotations

from typing import Annotated

import typer

import kvformat
from kvformat.cli import output
from kvformat.cli.check_documents import check_documents
from kvformat.cli.clean import clean
from kvformat.cli.copy import copy
from kvformat.cli.diff import diff
from kvformat.cli.documents import documents
from kvformat.cli.estimate import estimate
from kvformat.cli.extract import extract
from kvformat.cli.group import EXIT_CODES, Commands
from kvformat.cli.inspect import inspect
from kvformat.cli.plan import plan
from kvformat.cli.seal import seal
from kvformat.cli.status import status
from kvformat.cli.verify import verify

__all__ = ["app"]

_SPELLINGS = {"quantize": "quantise"}
"""Other spellings of options; help shows one alone."""

_HELP = """Datasets of the per-layer attention keys and values (K/V) of a frozen transformer.

Computed once, verified, read back at the speed of the storage.

\b
One process:      estimate, extract, inspect, verify
Several workers:  documents, plan, extract --plan, status, seal
Then:             check-documents, diff, copy

`kvformat COMMAND --help` says more.
"""

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,  # plain help costs no import of rich
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
    context_settings={"token_normalize_func": lambda token: _SPELLINGS.get(token, token)},
)
for command in (
    extract,
    estimate,
    documents,
    plan,
    seal,
    inspect,
    verify,
    check_documents,
    diff,
    copy,
    status,
    clean,
):
    app.command(epilog=EXIT_CODES)(command)


def _version(wanted: bool) -> None:  # noqa: FBT001 - the form of an option's callback
    if wanted:
        output.emit(f"kvformat {kvformat.__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def kvformat_(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """See the help."""
