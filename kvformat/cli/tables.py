"""Tables as this command line draws them: no frames, names escaped, plain when piped."""

from __future__ import annotations

from collections.abc import Mapping

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvformat.cli.output import plain

__all__ = ["PlainTable", "facts", "heading", "table"]


class PlainTable(Table):
    """A table whose cells are printed as they are, on one line each."""

    def add_row(self, *cells: object, **options: object) -> None:
        """Add a row of values."""
        del options
        super().add_row(*(Text(plain(cell)) for cell in cells))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with headings; columns named in ``right`` are aligned there."""
    found = PlainTable(box=None, pad_edge=True, padding=(0, 2, 0, 1), header_style="bold")
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return found


def facts(values: Mapping[str, object]) -> Table:
    """Names and values, one pair a line."""
    found = PlainTable(box=None, show_header=False, pad_edge=True, padding=(0, 2, 0, 1))
    found.add_column(style="dim", no_wrap=True)
    found.add_column(overflow="fold")
    for name, value in values.items():
        found.add_row(name, value)
    return found


def heading(text: str) -> Padding:
    """A heading, with a line free above."""
    return Padding(Text(plain(text), style="bold"), (1, 0, 0, 0), expand=False)
