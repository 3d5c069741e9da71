"""Whether a shard an interrupted run left on this disk is what its receipt says."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from kvformat.codec.shard import header_fault
from kvformat.errors import make_error
from kvformat.spec.digests import record_sum
from kvformat.spec.layout import Layout
from kvformat.storage.faults import translated
from kvformat.write.shard import hash_file
from kvformat.write.staging import Receipt

__all__ = ["check_shard"]


def check_shard(path: Path, receipt: Receipt, layout: Layout, *, header_size: int, version: str) -> None:
    """Look at a staged shard and its receipt again: present on disk is no reason to trust them.

    Raises
    ------
    DamageError
        E116 where they do not agree.
    """
    if hash_file(path, path).hex() != receipt.sha256:
        raise make_error("E116", "the staged shard is damaged: run `kvformat clean` and start again", path=path)
    with translated(path), path.open("rb") as file:
        agrees = _agrees(file, receipt, layout, header_size=header_size, version=version)
    if not agrees:
        message = "the receipt is not that of the staged shard: run `kvformat clean` and start again"
        raise make_error("E116", message, path=path.with_suffix(".json"))


def _agrees(file: BinaryIO, receipt: Receipt, layout: Layout, *, header_size: int, version: str) -> bool:
    """Whether header and sums of a shard are those of the records its receipt lists."""
    placements = [layout.place(record.dims) for record in receipt.records]
    fault = header_fault(
        file.read(header_size),
        layout=layout,
        version=version,
        ordinal=receipt.ordinal,
        placements=placements,
        header_size=header_size,
        path=file.name,
    )
    if fault is not None:
        return False
    start = header_size
    for record, placement in zip(receipt.records, placements, strict=True):
        file.seek(start + placement.sums.offset)
        if record_sum(record.dims, file.read(placement.sums.nbytes)).hex() != record.record_sum:
            return False
        start += placement.nbytes
    return True
