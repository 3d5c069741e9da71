"""``kvformat seal``: publish what the workers of a plan finished."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output, plan_option, spool_option
from kvformat.cli.progress import meter
from kvformat.errors import KVFormatError
from kvformat.spec.paths import ROOT

if TYPE_CHECKING:
    from kvformat.extract.plan import Plan
    from kvformat.read.dataset import Dataset
    from kvformat.storage.remote import Remote
    from kvformat.write.workshop import Workshop

__all__ = ["seal"]


def seal(
    path: Annotated[str, typer.Argument(metavar="OUT", help="Where the workers stage: a directory or URL.")],
    *,
    plan: plan_option.OnePlan,
    allow_skips: Annotated[
        bool, typer.Option("--allow-skips", help="Publish without the documents that were skipped, listing them.")
    ] = False,
    hashing: Annotated[
        bool, typer.Option("--hash/--no-hash", help="First hash the shards on disk again, or trust their sizes.")
    ] = True,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Publish what the workers of a plan finished.

    The last worker does so by itself: this is for when none is left, or documents were skipped. Needs no model.

    Shards that lie on a disk are hashed again; a damaged one is set aside, and is missing then. Fails with E119,
    naming them, where shards are missing or documents were skipped. Sealing a second time, or by several at once,
    gives the same dataset; E118 where another one is published there.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.read.opening import open_dataset
    from kvformat.storage.readers import remote_of

    place = remote_of(path, storage_options=storage_options)
    with contextlib.closing(plan_option.opened(plan)) as planned:
        if _is_published(place):
            _tidy(place, planned, _of_plan(place, planned), spool)
        else:
            _publish(place, planned, spool, allow_skips=allow_skips, hashing=hashing)
    dataset = open_dataset(place)
    if as_json:
        output.emit_json(_document(dataset))
    else:
        output.emit(*_lines(dataset))


def _is_published(place: Path | Remote) -> bool:
    if isinstance(place, Path):
        return os.path.lexists(place / ROOT)
    return place.stat(ROOT) is not None


def _of_plan(place: Path | Remote, planned: Plan) -> Dataset:
    """What is published, which must be what this plan makes: E118."""
    from kvformat.extract.finished import check_plan, check_schema
    from kvformat.read.opening import open_dataset

    dataset = open_dataset(place)
    check_schema(dataset, planned.schema)
    check_plan(dataset, planned)
    return dataset


def _publish(place: Path | Remote, planned: Plan, spool: str | None, *, allow_skips: bool, hashing: bool) -> None:
    from kvformat.write.attach import attach_workshop
    from kvformat.write.sealing import seal as publish

    try:
        with attach_workshop(place, planned, spool=spool) as workshop:
            if hashing and isinstance(place, Path) and len(workshop.finished()) == planned.num_shards:
                _prove(workshop, planned)
            publish(workshop, planned, allow_skips=allow_skips)
            workshop.remove()
    except KVFormatError as error:
        # Its workers may have published meanwhile, and have taken what is staged away.
        if error.code != "E119" or not _is_published(place):
            raise
        _of_plan(place, planned)


def _prove(workshop: Workshop, planned: Plan) -> None:
    """Look at all shards again: that they are there is no reason to trust them."""
    done = 0
    with meter(phases=False) as shown:
        shown.begin("hashing", total=planned.nbytes)
        for ordinal in range(planned.num_shards):
            workshop.check(ordinal)
            done += planned.shard_size(ordinal)[1]
            shown.update(done)


def _tidy(place: Path | Remote, planned: Plan, dataset: Dataset, spool: str | None) -> None:
    """Remove the staged work that was published, where whoever did so did not come so far; no other."""
    from kvformat.spec.paths import shard_path
    from kvformat.write.attach import attach_workshop

    with contextlib.suppress(KVFormatError), attach_workshop(place, planned, spool=spool) as workshop:
        published = range(dataset.manifest.totals.shards)
        if workshop.finished() == frozenset(published) and all(
            receipt is not None
            and dataset.index.shard(ordinal).path == shard_path(ordinal, bytes.fromhex(receipt.sha256))
            for ordinal, receipt in workshop.receipts()
        ):
            workshop.remove()


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
