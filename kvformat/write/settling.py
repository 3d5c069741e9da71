"""Bringing complete shards to where they count, each unless another worker was faster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvformat.errors import KVFormatError
from kvformat.write.planned_shard import PlannedShard
from kvformat.write.shared import Shared
from kvformat.write.shared_receipts import SharedReceipts
from kvformat.write.staging import Receipt

__all__ = ["Settling"]


class Settling:
    """For helper threads; those of one shard, one at a time.

    Parameters
    ----------
    drop
        What becomes of a shard once it is settled, or failed.

    Attributes
    ----------
    lost
        Ordinals of the shards of which another worker's counts.
    """

    def __init__(self, shared: Shared, receipts: SharedReceipts, *, drop: Callable[[PlannedShard], None]) -> None:
        self._shared = shared
        self._receipts = receipts
        self._drop = drop
        self.lost: set[int] = set()

    def settle(self, shard: PlannedShard) -> Receipt:
        """Complete a shard, unless another worker was faster; the receipt that counts."""
        try:
            first = self._receipts.counting(shard.ordinal)
            if first is None:
                return self._kept(shard)
            self.lost.add(shard.ordinal)
            return first
        finally:
            self._drop(shard)

    def _kept(self, shard: PlannedShard) -> Receipt:
        receipt = shard.complete()
        try:
            self._shared.keep(shard.path, receipt)
            counts = self._receipts.add(receipt)
        except BaseException:
            with contextlib.suppress(KVFormatError):
                if self._shared.read(shard.ordinal) is None:
                    self._shared.drop(receipt)
            raise
        if counts is receipt:
            self.lost.discard(shard.ordinal)
        else:
            self.lost.add(shard.ordinal)
            if counts.sha256 != receipt.sha256:
                self._shared.drop(receipt)
        return counts
