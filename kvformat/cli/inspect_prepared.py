"""What ``kvformat inspect`` shows of what is made before a dataset: a documents file, and a plan."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvformat.cli import output
from kvformat.cli.counts import documents_facts, plan_facts, shown_facts
from kvformat.spec.paths import ROOT

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvformat.spec.context import Text
    from kvformat.spec.manifest import Skipped
    from kvformat.spec.schema import Schema

__all__ = ["Prepared", "prepared_at", "show_prepared"]

Prepared = Literal["plan", "documents"]
_SHOWN = 12


def prepared_at(path: str) -> Prepared | None:
    """What stands at a location in place of a dataset; None where it is none of these. A damaged one is told too."""
    from kvformat.storage.location import resolve
    from kvformat.write.prepared import PLAN_FILES, SUFFIX

    place = resolve(path)
    if not isinstance(place, Path):
        return None
    if place.name.endswith(SUFFIX) and not place.is_dir():
        return "documents"
    head, *others = ((place / name).is_file() for name in PLAN_FILES)
    return "plan" if (head or all(others)) and not (place / ROOT).exists() else None


def show_prepared(kind: Prepared, path: str, *, as_json: bool) -> None:
    """Show it; no document is read for that, and no token id is shown.

    Raises
    ------
    DamageError
        E307, E002.
    """
    if kind == "documents":
        from kvformat.extract.documents import open_documents

        found = open_documents(path)
        _show("documents file", documents_facts(found), None, found.text, found.skipped, as_json=as_json)
        return
    from kvformat.extract.plan import open_plan

    with contextlib.closing(open_plan(path)) as plan:
        facts = plan_facts(plan, path) | {
            "order": plan.order,
            "batch_size": plan.batch_size,
            "batch_tokens": plan.batch_tokens,
            "shard_nbytes": plan.shard_nbytes,
            "shard_slots": plan.shard_slots,
        }
        _show("plan", facts, plan.schema, plan.text, plan.skipped, as_json=as_json)


def _show(
    noun: str,
    facts: dict[str, Any],
    schema: Schema | None,
    text: Text,
    skipped: tuple[Skipped, ...],
    *,
    as_json: bool,
) -> None:
    from kvformat.cli.fields import schema_fields, text_document, text_fields
    from kvformat.cli.tables import facts as table
    from kvformat.cli.tables import heading

    if as_json:
        import msgspec

        output.emit_json(
            {
                "ok": True,
                "kind": noun.partition(" ")[0],
                **{name: value for name, value in facts.items() if name != "skipped"},
                **({} if schema is None else {"schema": msgspec.to_builtins(schema)}),
                "text": text_document(text),
                "skipped": msgspec.to_builtins(skipped),
            }
        )
        return
    told = {name: value for name, value in facts.items() if value is not None}
    parts: list[RenderableType] = [table({noun: str(told.pop("location")), **shown_facts(told)})]
    if schema is not None:
        parts += [heading("schema"), table({name: value for name, value in schema_fields(schema).items() if value})]
    fields = text_fields(text)
    if fields:
        parts += [heading("text"), table(fields)]
    if skipped:
        more = {"...": f"and {len(skipped) - _SHOWN:,} more; --json lists all"} if len(skipped) > _SHOWN else {}
        parts += [heading(f"skipped ({len(skipped):,})"), table({s.name: s.reason for s in skipped[:_SHOWN]} | more)]
    output.render(*parts)
