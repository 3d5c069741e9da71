"""``kvformat diff``: what differs between two datasets, field by field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output
from kvformat.cli.group import FAULTS

if TYPE_CHECKING:
    from kvformat.cli.compare import Change, Comparison, Records
    from kvformat.read.dataset import Dataset

__all__ = ["diff"]


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Dataset: a directory or URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Dataset to compare it with.")],
    *,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what differs between two datasets.

    Compares context, weights by tensor, schema, text and records. Provenance is shown and not
    counted. Two unknown contexts count as a difference: nobody knows whether they are equal. Exits
    with 1 where anything that counts differs.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.cli.compare import compare
    from kvformat.read.opening import open_dataset

    left, right = (open_dataset(path, storage_options=storage_options) for path in (a, b))
    found = compare(left, right)
    if as_json:
        output.emit_json(_document(left, right, found))
    else:
        _show(left, right, found)
    if not found.same:
        raise typer.Exit(FAULTS)


def _document(left: Dataset, right: Dataset, found: Comparison) -> dict[str, Any]:
    import msgspec

    return {
        "ok": found.same,
        "a": {"location": left.location, "id": left.id},
        "b": {"location": right.location, "id": right.id},
        **msgspec.to_builtins(found),
    }


def _show(left: Dataset, right: Dataset, found: Comparison) -> None:
    from kvformat.cli.tables import facts, heading, table

    def changes(found: tuple[Change, ...]) -> Any:
        rows = table("", "A", "B")
        for change in found:
            rows.add_row(
                change.field, "absent" if change.a is None else change.a, "absent" if change.b is None else change.b
            )
        return rows

    parts: list[Any] = [
        facts({"A": f"{left.location}  id {left.id}", "B": f"{right.location}  id {right.id}"}),
    ]
    sections = {
        "context": found.context,
        "weights: tensors that differ": found.weights,
        "covered files": found.files,
        "schema": found.schema,
        "text": found.text,
    }
    for name, section in sections.items():
        if section:
            parts += [heading(f"{name} ({len(section):,})"), changes(section)]
    records = found.records
    if records.differ or not records.same_order:
        parts += [heading("records"), facts(_records(records))]
    if found.provenance:
        parts += [heading("provenance, not counted as a difference"), changes(found.provenance)]
    if found.notes:
        parts += [heading("notes"), *(f"  {note}" for note in found.notes)]
    equal = [name.partition(":")[0] for name, section in sections.items() if section == ()]
    if not records.differ:
        equal.append("records")
    unknown = "; not comparable: weights" if found.weights is None else ""
    verdict = "the datasets are equal in all that counts" if found.same else "the datasets differ"
    if not found.same and equal:
        verdict += f"; equal: {', '.join(equal)}{unknown}"
    output.render(*parts, heading(verdict))


def _records(records: Records) -> dict[str, str]:
    def counted(count: int, examples: tuple[str, ...]) -> str:
        more = ", ..." if count > len(examples) else ""
        return f"{count:,}" + (f": {', '.join(examples)}{more}" if count and examples else "")

    found = {
        "records": f"{records.a:,} in A, {records.b:,} in B",
        "documents only in A": counted(records.only_a, records.examples_only_a),
        "documents only in B": counted(records.only_b, records.examples_only_b),
    }
    if records.other_values is None:
        found["other values"] = "not comparable, the schemas differ"
    else:
        found["documents with other bytes"] = counted(records.other_values, records.examples_other_values)
    names = records.names_only_a + records.names_only_b + records.names_moved
    if names:
        sides = f"{records.names_only_a:,} only in A, {records.names_only_b:,} only in B"
        more = ", ..." if names > len(records.examples_names) else ""
        examples = f"{', '.join(records.examples_names)}{more}"
        found["other names"] = f"{sides}, {records.names_moved:,} of another document: {examples}"
    if not records.same_order:
        found["order"] = "common documents stand in another order (not counted)"
    return found
