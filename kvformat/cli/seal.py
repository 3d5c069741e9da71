"""``kvformat seal``: publish what the workers of a plan finished."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output, plan_option, spool_option

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["seal"]


def seal(
    path: Annotated[str, typer.Argument(metavar="OUT", help="Where the workers stage: a directory or URL.")],
    *,
    plan: plan_option.OnePlan,
    allow_skips: Annotated[
        bool, typer.Option("--allow-skips", help="Publish without the documents that were skipped, listing them.")
    ] = False,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Publish what the workers of a plan finished.

    Needs no model. Fails with E119, naming them, where shards are missing or documents were skipped. Sealing a second
    time, or by several at once, gives the same dataset.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.read.opening import open_dataset
    from kvformat.storage.readers import remote_of
    from kvformat.write.attach import attach_workshop
    from kvformat.write.sealing import seal as publish

    place = remote_of(path, storage_options=storage_options)
    with (
        contextlib.closing(plan_option.opened(plan)) as planned,
        attach_workshop(place, planned, spool=spool) as workshop,
    ):
        publish(workshop, planned, allow_skips=allow_skips)
        workshop.remove()
    dataset = open_dataset(place)
    if as_json:
        output.emit_json(_document(dataset))
    else:
        output.emit(*_lines(dataset))


def _document(dataset: Dataset) -> dict[str, Any]:
    totals = dataset.manifest.totals
    return {
        "ok": True,
        "location": str(dataset.location),
        "id": dataset.id,
        "records": totals.records,
        "names": totals.names,
        "tokens": totals.tokens,
        "shards": totals.shards,
        "nbytes": totals.nbytes,
        "skipped": len(dataset.manifest.skipped),
    }


def _lines(dataset: Dataset) -> list[str]:
    totals = dataset.manifest.totals
    counts = f"{output.counted(totals.records, 'record')} in {output.counted(totals.shards, 'shard')}"
    lines = [
        f"published: {output.plain(dataset.location)}",
        f"    id {dataset.id}",
        f"    {counts}, {output.counted(totals.tokens, 'token')}, {output.size_text(totals.nbytes)}",
    ]
    skipped = len(dataset.manifest.skipped)
    return [*lines, f"    {output.counted(skipped, 'input')} skipped; the manifest lists them"] if skipped else lines
