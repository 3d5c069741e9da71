"""What the headers of shards take: each has room for as many records as a shard may hold, however few it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvformat.cli.output import size_text

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["header_nbytes", "header_warning"]


def header_nbytes(dataset: Dataset) -> int:
    """Bytes of the headers of all shards."""
    return dataset.manifest.header_size * dataset.manifest.totals.shards


def header_warning(*, shards: int, headers: int, nbytes: int) -> str | None:
    """A line about headers that exceed the data; None where they do not, or where one shard holds everything.

    Parameters
    ----------
    shards, nbytes
        Their number and size, headers included.
    headers
        Bytes of the headers.
    """
    if shards < 2 or 2 * headers <= nbytes:
        return None
    return (
        f"warning: the headers of {shards:,} shards take {size_text(headers)}, more than their data "
        f"({size_text(nbytes - headers)}): choose a larger --shard-size"
    )
