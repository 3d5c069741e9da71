"""From records, in the order of the plan, to the shards of a workshop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec.structs import replace

from kvformat.extract.plan import Plan, PlannedDocument
from kvformat.write.planned_shard import PlannedShard
from kvformat.write.record import EncodedRecord
from kvformat.write.worker_state import WorkerState
from kvformat.write.workshop import Workshop

__all__ = ["ShardSink"]


class ShardSink:
    """Puts records into their shards, one shard after the other; a :class:`~kvformat.extract.pipeline.RecordSink`.

    Parameters
    ----------
    added
        Told the shard, the tokens and the stored bytes of each record.
    """

    def __init__(self, workshop: Workshop, plan: Plan, *, added: Callable[[int, int, int], None]) -> None:
        self._workshop = workshop
        self._plan = plan
        self._added = added
        self._shard: PlannedShard | None = None
        self._lock = threading.Lock()

    def begin(self, ordinal: int) -> None:
        """Tell other workers that this shard is in hand; for the thread that chooses it."""
        self._tell(
            lambda state: replace(
                state, phase="work", shard=ordinal, shard_records=0, shard_total=len(self._plan.shard(ordinal))
            )
        )

    def add(self, planned: PlannedDocument, record: EncodedRecord) -> None:
        """Append a record; its shard is delivered when it was the last one."""
        shard = self._shard_of(planned)
        shard.add(record.placement, record.buffers, document=planned.digest, record_sum=record.record_sum)
        tokens, nbytes = planned.document.num_tokens, record.placement.nbytes
        self._tell(
            lambda state: replace(
                state,
                shard_records=shard.num_done,
                num_tokens=state.num_tokens + tokens,
                nbytes=state.nbytes + nbytes,
            )
        )
        self._done(shard)
        self._added(shard.ordinal, tokens, nbytes)

    def skip(self, planned: PlannedDocument, reason: str) -> None:
        """Leave a document out."""
        shard = self._shard_of(planned)
        shard.skip(planned.digest, reason)
        self._done(shard)

    def drop(self) -> None:
        """Drop a shard that was not completed, as somebody else was faster."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.discard()

    def stop(self) -> None:
        """Let what waits for the storage fail soon."""
        self._workshop.stop()

    def _shard_of(self, planned: PlannedDocument) -> PlannedShard:
        if self._shard is None:
            self._shard = self._workshop.begin(self._plan.shard_of(planned.record))
        return self._shard

    def _done(self, shard: PlannedShard) -> None:
        if shard.num_done == shard.num_records:
            self._shard = None
            self._workshop.deliver(shard)
            self._tell(lambda state: replace(state, num_shards=state.num_shards + 1))

    def _tell(self, change: Callable[[WorkerState], WorkerState]) -> None:
        with self._lock:
            self._workshop.report(change(self._workshop.state))
