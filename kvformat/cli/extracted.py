"""What an extraction came to: the dataset, what was computed for it, and what computing costs beside loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvformat.cli import output, own_share

if TYPE_CHECKING:
    from kvformat.cli.load_time import LoadTime
    from kvformat.cli.watch import Watch
    from kvformat.loader.world import World
    from kvformat.read.dataset import Dataset

__all__ = ["document", "lines"]


def document(dataset: Dataset, watch: Watch, world: World, saved: LoadTime | None) -> dict[str, Any]:
    """For programs."""
    import msgspec

    return {
        **own_share.document(watch, world, dataset),
        "records": len(dataset),
        "names": dataset.num_names,
        "tokens": dataset.num_tokens,
        "nbytes": dataset.nbytes,
        "skipped": len(dataset.manifest.skipped),
        "load_time": None if saved is None else msgspec.to_builtins(saved),
    }


def lines(dataset: Dataset, watch: Watch, saved: LoadTime | None) -> list[str]:
    """For people."""
    done = "published" if watch.extracted else "already finished, with equal plan and context"
    counts = ", ".join(
        output.counted(count, noun)
        for count, noun in ((len(dataset), "record"), (dataset.num_names, "name"), (dataset.num_tokens, "token"))
    )
    found = [
        f"{done}: {output.plain(dataset.location)}",
        f"    id {dataset.id}",
        f"    {counts}, {output.size_text(dataset.nbytes)}",
    ]
    if not watch.extracted:
        largest = max(dataset.index.shard(ordinal).size for ordinal in range(dataset.manifest.totals.shards))
        found.append(
            f"    its shards are of up to {output.size_text(largest)}; shard size, batch size, device and attention "
            "implementation were not compared"
        )
    else:
        kept = f", {output.size_text(watch.resumed_nbytes)} kept from before" if watch.resumed_nbytes else ""
        others = f", {output.size_text(watch.elsewhere_nbytes)} by other workers" if watch.elsewhere_nbytes else ""
        computed = f"computed {output.size_text(watch.nbytes)} in {watch.seconds:.1f} s: {watch.rates()}"
        found.append(f"    {computed}{kept}{others}")
        if watch.nbytes and watch.spent is not None:
            found.append(f"    {watch.spent}")
        if saved is not None:
            found.append(f"    {saved}")
    skipped = len(dataset.manifest.skipped)
    if skipped:
        found.append(f"    {output.counted(skipped, 'document')} skipped: the manifest lists them, with the reasons")
    return found
