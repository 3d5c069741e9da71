"""``kvformat check-documents``: whether a trainer's documents are those of a dataset."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output
from kvformat.cli.group import FAULTS, looking_at_prepared
from kvformat.cli.progress import meter
from kvformat.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from kvformat.extract.join_report import JoinFinding, JoinReport

__all__ = ["check_documents"]

_KINDS = {
    "text": "tokenised otherwise",
    "missing": "not in the dataset",
    "tokens": "of other tokens",
    "inputs": "of other positions, mask or media",
    "unusable": "unusable",
    "extra": "in the dataset alone",
}


def check_documents(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Dataset: a directory or URL.")],
    documents: Annotated[
        str,
        typer.Argument(
            metavar="DOCUMENTS",
            help="What the trainer will ask for: *.kvdocs, or JSON Lines with `id` and `token_ids`, or `text` and "
            "--model.",
        ),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR_OR_ID",
            help="Model whose tokenizer turns text into token ids, and is compared with the dataset's.",
        ),
    ] = None,
    revision: options.Revision = None,
    subset: Annotated[
        bool, typer.Option("--subset", help="The trainer need not ask for all documents of the dataset.")
    ] = False,
    values: Annotated[
        bool,
        typer.Option(
            "--values", help="Show token ids, and with --model text, where they differ. They can reveal the prompt."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most differences of each kind to show.")] = 20,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare a trainer's documents with those of a dataset.

    Token by token: looks for names and documents of one side alone, for the first token that differs, and for another
    tokenizer or template. Several names of one document are fine. Exits with 1 where anything differs.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    from kvformat.extract.join import check_documents as compare
    from kvformat.read.opening import open_dataset

    dataset = open_dataset(path, storage_options=storage_options)
    tokenizer = None
    if model is not None:
        from kvformat.extract.extras import needing

        with needing("tokenising needs"):
            from kvformat.extract.hf.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model, revision=revision)
    with meter(phases=False) as shown:
        shown.begin("comparing documents")
        with looking_at_prepared(as_json=as_json, path=documents):
            report = compare(dataset, documents, tokenizer=tokenizer, subset=subset, values=values, limit=limit)
    if as_json:
        output.emit_json(_document(report))
    else:
        output.emit(*_lines(report))
    if not report.ok:
        raise typer.Exit(FAULTS)


def _document(report: JoinReport) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(report))


def _lines(report: JoinReport) -> list[str]:
    lines = []
    for finding in report.findings:
        about = [one for one in (finding.name,) if one is not None]
        where = f" ({output.place(None, about[0], None)})" if about else ""
        lines.append(f"{finding.kind}: {output.one_line(finding.message)}{_values(finding)}{where}")
    counts = {kind: getattr(report, kind) for kind in _KINDS}
    for kind, count in counts.items():
        told = sum(finding.kind == kind for finding in report.findings)
        if count > told:
            lines.append(f"{kind}: and {count - told:,} more")
    lines += [f"note: {output.one_line(note)}" for note in report.notes]
    lines.append(
        f"{'ok' if report.ok else 'DIFFERENT'}: {output.counted(report.looked_at, 'document')}, {report.matched:,} of "
        + ", ".join(["them the dataset's", *(f"{count:,} {_KINDS[kind]}" for kind, count in counts.items() if count)])
    )
    lines += [f"    {output.plain(report.location)}", f"    id {report.id}"]
    return lines


def _values(finding: JoinFinding) -> str:
    """Token ids, and text, where they were asked for."""
    sides = ((finding.expected, finding.expected_text), (finding.found, finding.found_text))
    if all(token_id is None for token_id, _ in sides):
        return ""
    told = [
        "nothing" if token_id is None else f"{token_id}" + (f" {text!r}" if text is not None else "")
        for token_id, text in sides
    ]
    return f"; the dataset has {output.plain(told[0])}, given is {output.plain(told[1])}"
