"""Counts of documents and plans, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvformat.cli import output
from kvformat.cli.progress import Meter

if TYPE_CHECKING:
    from kvformat.extract.documents import Documents, Enumerated
    from kvformat.extract.plan import Plan

__all__ = ["documents_facts", "plan_facts", "shown_facts", "told"]


def told(shown: Meter) -> Callable[[Enumerated], None]:
    """What shows how far an enumeration got."""
    shown.begin("reading documents")

    def tell(found: Enumerated) -> None:
        note = f"{output.counted(found.names, 'document')}, {output.counted(found.tokens, 'token')}"
        shown.update(4 * found.tokens if found.done is None else found.done, total=found.total, note=note)

    return tell


def documents_facts(found: Documents) -> dict[str, Any]:
    """Counts of a documents file, and what proves it."""
    return {
        "location": found.path,
        "documents": found.num_inputs,
        "records": len(found),
        "names": found.num_names,
        "duplicates": found.num_names - len(found),
        "skipped": len(found.skipped),
        "tokens": int(found.num_tokens.sum(dtype="uint64")),
        "longest": int(found.num_tokens.max()),
        "nbytes": found.proof.nbytes,
        "sha256": found.proof.sha256,
    }


def plan_facts(plan: Plan, location: str) -> dict[str, Any]:
    """Counts of a plan, and its digest."""
    return {
        "location": location,
        "digest": plan.digest,
        "documents": plan.num_inputs,
        "records": plan.num_records,
        "names": plan.num_names,
        "duplicates": plan.num_names - plan.num_records,
        "skipped": len(plan.skipped),
        "tokens": plan.num_tokens,
        "longest": plan.longest,
        "shards": plan.num_shards,
        "groups": plan.num_groups,
        "nbytes": plan.nbytes,
    }


def shown_facts(facts: dict[str, Any]) -> dict[str, str]:
    """Facts for people: numbers with separators, sizes in units, underscores as spaces."""
    found = {}
    for name, value in facts.items():
        text = str(value)
        if name.endswith("nbytes"):
            text = f"{output.size_text(value)} ({value:,} bytes)"
        elif isinstance(value, int):
            text = f"{value:,}"
        found[name.replace("nbytes", "size").replace("_", " ")] = text
    return found
