"""``kvformat verify``: all faults of a dataset, with their codes, and whether a model gives what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvformat.cli import model_options, options, output
from kvformat.cli.group import FAILED, FAULTS
from kvformat.cli.progress import meter
from kvformat.cli.recompute import Recomputation, document, recompute, show
from kvformat.codes import CODES

if TYPE_CHECKING:
    from kvformat.read.verify import Finding, Report

__all__ = ["verify"]


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Dataset: a directory or URL.")],
    *,
    level: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4,
            help="1: root and manifest. 2: and index, sizes, headers. 3: and every XXH3. 4: and every SHA-256. "
            "[default: 4, or 2 with --recompute]",
        ),
    ] = None,
    expected_id: Annotated[
        str | None, typer.Option("--expected-id", metavar="ID", help="Dataset id it must have.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Shards checked at once [default: processors, at most 8, or 4 of an object store]."),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            "--recompute", metavar="SHARE", help="Also compute so many records again, such as 1% or 200, with --model."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR_OR_ID", help="Model directory or hub id to compute with.")
    ] = None,
    revision: options.Revision = None,
    checkpoint: model_options.Checkpoint = None,
    select: model_options.Select = None,
    rename: model_options.Rename = None,
    preset: model_options.Preset = None,
    weights: model_options.Weights = None,
    checkpoint_dtype: model_options.CheckpointDtype = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Chooses which records are computed again [default: 0].")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Where the model runs, such as cuda:0 [default: cpu].")
    ] = None,
    compute_dtype: Annotated[
        str | None,
        typer.Option("--compute-dtype", metavar="DTYPE", help="Dtype of computation [default: as the dataset says]."),
    ] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attention implementation, such as sdpa or eager.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="LoRA adapter the dataset was extracted with.")
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Documents the dataset was made of: compared with the records computed again, text tokenised anew. "
            "A dataset with images needs its documents file, *.kvdocs, which says where they are.",
        ),
    ] = None,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Look for all faults of a dataset.

    Each is named by its code. Warnings, such as a file the dataset does not name, do not make it faulty. In an object
    store, levels 1 and 2 move no values; 3 and 4 fetch every shard once, and need the memory of one a thread.

    With --recompute, a sample of records is computed again from the stored token ids, and K and V are compared layer
    by layer. Other last bits are expected on other hardware; what is beyond the dataset's bounds, or was made by
    another model, is a fault.
    """
    asked = Recomputation.of(
        again,
        model=model,
        revision=revision,
        checkpoint=checkpoint,
        select=select,
        rename=rename,
        preset=preset,
        weights=weights,
        checkpoint_dtype=checkpoint_dtype,
        seed=seed,
        device=device,
        compute_dtype=compute_dtype,
        attn_implementation=attn_implementation,
        adapter=adapter,
        documents=documents,
    )
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.read.verify import verify as look

    with meter(phases=False) as shown:
        shown.begin("verifying")
        report = look(
            path,
            level=(4 if asked is None else 2) if level is None else level,
            expected_id=expected_id,
            threads=threads,
            progress=lambda done, total: shown.update(done, total=total),
            storage_options=storage_options,
        )
    audited = recompute(path, asked, storage_options=storage_options) if asked is not None and report.ok else None
    shown_path = path.partition("?")[0] if "://" in path else path  # behind it, URLs hold signatures
    ok = report.ok and (audited is None or audited.ok)
    if as_json:
        more = {} if audited is None else {"ok": ok, "recomputed": document(audited)}
        output.emit_json(_document(shown_path, report) | more)
    else:
        output.emit(*_lines(shown_path, report))
        if audited is not None:
            show(audited)
    if asked is not None and audited is None:
        output.complain("nothing was computed again: mend the faults first")
    if not ok:
        # Where the storage alone is in the way, nothing is known of the dataset.
        found = report.ok or any(CODES[finding.code].kind == "reader" for finding in report.findings)
        raise typer.Exit(FAULTS if found else FAILED)


def _document(path: str, report: Report) -> dict[str, object]:
    def members(found: tuple[Finding, ...]) -> list[dict[str, str | int | None]]:
        return [output.finding(f.code, f.message, f.path, f.record, f.layer) for f in found]

    return {
        "ok": report.ok,
        "location": path,
        "id": report.id,
        "level": report.level,
        "records": report.records,
        "nbytes": report.nbytes,
        "findings": members(report.findings),
        "warnings": members(report.warnings),
    }


def _lines(path: str, report: Report) -> list[str]:
    lines = []
    for kind, found in (("fault", report.findings), ("warning", report.warnings)):
        for one in found:
            lines.append(f"{kind} [{one.code}] {CODES[one.code].name}: {output.one_line(one.message)}")
            where = output.place(one.path, one.record, one.layer)
            if where:
                lines.append(f"    {where}")
    counted = [_count(len(report.findings), "fault")]
    if report.warnings:
        counted.append(_count(len(report.warnings), "warning"))
    what = (
        f"{output.counted(report.records, 'record')}, {output.size_text(report.nbytes)}"
        if report.id
        else "not looked into"
    )
    lines.append(f"{'ok' if report.ok else 'FAULTY'}: {', '.join(counted)} at level {report.level}")
    lines.append(f"    {output.plain(path)} ({what})")
    if report.id:
        lines.append(f"    id {report.id}")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
