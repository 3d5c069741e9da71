"""Counts of documents and plans, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvformat.cli import output
from kvformat.cli.progress import Meter

if TYPE_CHECKING:
    from kvformat.extract.documents import Enumerated

__all__ = ["shown_facts", "told"]


def told(shown: Meter) -> Callable[[Enumerated], None]:
    """What shows how far an enumeration got."""
    shown.begin("reading documents")

    def tell(found: Enumerated) -> None:
        note = f"{output.counted(found.names, 'document')}, {output.counted(found.tokens, 'token')}"
        shown.update(4 * found.tokens if found.done is None else found.done, total=found.total, note=note)

    return tell


def shown_facts(facts: dict[str, Any]) -> dict[str, str]:
    """Facts for people: numbers with separators, sizes in units, underscores as spaces."""
    found = {}
    for name, value in facts.items():
        text = str(value)
        if name == "nbytes":
            text = f"{output.size_text(value)} ({value:,} bytes)"
        elif isinstance(value, int):
            text = f"{value:,}"
        found["size" if name == "nbytes" else name.replace("_", " ")] = text
    return found
