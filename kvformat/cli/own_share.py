"""What this worker of an extraction did: one of several tells it in a line, or in a line of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvformat.cli import output

if TYPE_CHECKING:
    from kvformat.cli.watch import Watch
    from kvformat.loader.world import World
    from kvformat.read.dataset import Dataset

__all__ = ["document", "line", "tell"]


def document(watch: Watch, world: World, dataset: Dataset) -> dict[str, Any]:
    """For programs: which worker this is, what it computed, and what it did not have to."""
    import msgspec

    return {
        "ok": True,
        "location": dataset.location,
        "id": dataset.id,
        "already_finished": not watch.extracted,
        "rank": world.rank,
        "world_size": world.size,
        "computed_shards": watch.shards,
        "computed_records": watch.records,
        "computed_tokens": watch.tokens,
        "computed_nbytes": watch.nbytes,
        "resumed_nbytes": watch.resumed_nbytes,
        "elsewhere_nbytes": watch.elsewhere_nbytes,
        "times": None if watch.spent is None else msgspec.to_builtins(watch.spent),
        "limited_by": watch.limit,
        "seconds": round(watch.seconds, 3) if watch.extracted else 0,
    }


def line(watch: Watch, world: World) -> str:
    """For people."""
    who = f"worker {world.rank} of {world.size}"
    if not watch.shards:
        why = "nothing was left to make" if watch.extracted else "the dataset was finished"
        return f"{who}: made nothing, {why}"
    made = f"{output.counted(watch.shards, 'shard')}, {output.counted(watch.records or 0, 'record')}"
    rate = f"{output.size_text(watch.nbytes)} in {watch.seconds:.1f} s: {watch.rates()}"
    limit = "" if watch.limit is None else f", limited by {watch.limit}"
    return f"{who}: made {made}, {rate}{limit}"


def tell(watch: Watch, world: World, dataset: Dataset, *, as_json: bool) -> None:
    """Print it, for a worker other than the first, which tells of the dataset as well.

    Workers may have one standard output in common: a document is one line there.
    """
    if as_json:
        output.emit(json.dumps(document(watch, world, dataset), allow_nan=False))
    else:
        output.emit(line(watch, world))
