"""The shards of a dataset in the making, one behind the other: in work, being finished, finished."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvformat.spec.layout import Layout
from kvformat.storage.local_write import LocalFiles
from kvformat.write.finisher import Finisher
from kvformat.write.record import EncodedRecord
from kvformat.write.replay import StagedRow
from kvformat.write.rows import Tables
from kvformat.write.shard import ShardWriter
from kvformat.write.staging import Plan, Receipt
from kvformat.write.target import Stage

__all__ = ["ShardSequence"]


class ShardSequence:
    """Puts records into shards and into the tables.

    Parameters
    ----------
    plan
        When a shard is full, and how its header looks.
    keep
        Whether complete shards are finished even when the writer fails.

    Attributes
    ----------
    receipts
        Of the finished shards, in order; all of them after :meth:`finish`.
    """

    def __init__(self, files: LocalFiles, layout: Layout, tables: Tables, plan: Plan, *, keep: bool) -> None:
        self._files = files
        self._layout = layout
        self._tables = tables
        self._plan = plan
        self._finisher = Finisher(keep=keep)
        self._shard: ShardWriter | None = None
        self._stage: Stage | None = None
        self._first: list[int] = []
        self.receipts: list[Receipt] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the finished shards and of the one in work."""
        in_work = 0 if self._shard is None else self._plan.header_size + self._shard.nbytes
        return self._tables.nbytes + in_work

    def add(self, staging: Stage, encoded: EncodedRecord, document: bytes) -> int:
        """Write a record; returns its number."""
        placement = encoded.placement
        shard = self._shard
        if shard is None:
            shard = self._start(staging)
        elif shard.num_records >= self._plan.shard_slots or shard.nbytes + placement.nbytes > self._plan.shard_nbytes:
            self.close_shard()
            shard = self._start(staging)
        offset = shard.add(placement, encoded.buffers, document=document, record_sum=encoded.record_sum)
        return self._tables.add_record(
            offset=offset, dims=placement.dims, document=document, record_sum=encoded.record_sum
        )

    def check_staged(self, staging: Stage, receipts: Iterable[Receipt]) -> None:
        """Begin with these shards of an earlier run; they are looked at again meanwhile."""
        for receipt in receipts:
            self._finisher.submit(partial(staging.check, receipt))

    def add_staged(self, row: StagedRow, document: bytes) -> int:
        """Add a record of a shard of the earlier run; returns its number."""
        if row.first:
            self._first.append(self._tables.num_records)
        return self._tables.add_record(offset=row.offset, dims=row.dims, document=document, record_sum=row.record_sum)

    def close_shard(self) -> None:
        """Let the shard in work be finished in the background."""
        if self._shard is not None and self._stage is not None:
            shard, self._shard = self._shard, None
            self._finisher.submit(partial(_finish, shard, self._stage))
            self._collect(self._finisher.ready())

    def finish(self) -> None:
        """Close the shard in work and wait for all of them."""
        self.close_shard()
        self._collect(self._finisher.rest())

    def close(self) -> None:
        """Drop the shard in work and end the helper threads. More than once is harmless."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._finisher.close()

    def _start(self, staging: Stage) -> ShardWriter:
        self._first.append(self._tables.num_records)
        self._stage = staging
        self._shard = ShardWriter(
            self._files,
            staging,
            self._layout,
            ordinal=len(self._first) - 1,
            version=self._plan.version,
            header_size=self._plan.header_size,
        )
        return self._shard

    def _collect(self, receipts: Iterable[Receipt]) -> None:
        for receipt in receipts:
            self.receipts.append(receipt)
            self._tables.add_shard(
                sha256=bytes.fromhex(receipt.sha256), size=receipt.size, first_record=self._first[receipt.ordinal]
            )


def _finish(shard: ShardWriter, staging: Stage) -> Receipt:
    """Complete a shard and bring it where it is kept; its receipt."""
    try:
        return staging.deliver(shard.finish())
    except BaseException:
        staging.stop(shard.ordinal)
        raise
