"""Where any number of workers, on any number of machines, make the shards of one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest
from kvformat.write.deliveries import Deliveries
from kvformat.write.found import Beside
from kvformat.write.heartbeat import Heartbeat
from kvformat.write.planned import Planned
from kvformat.write.planned_shard import PlannedShard
from kvformat.write.rows import EncodedPart
from kvformat.write.settling import Settling
from kvformat.write.shared import Shared
from kvformat.write.shared_receipts import SharedReceipts
from kvformat.write.staging import Receipt
from kvformat.write.worker_state import SAID_EVERY_S, Worker, WorkerState

__all__ = ["Workshop"]

_SOONEST_S = 1.0


class Workshop:
    """One worker's hold on the shared work of a run; a context manager.

    Made by :func:`kvformat.write.opening.open_workshop`.

    Leaving the block lets complete shards be delivered, and leaves the staging for others; an interrupt does not wait
    for what has not begun. :meth:`remove` leaves too, and lets the last one out remove the staging of a published
    dataset. Methods may be called by several threads, those of one shard by one at a time.

    Attributes
    ----------
    run, covered
        The run that counts, and its covered files by label: those of the worker that began.
    layout
        Of its schema.
    state
        What :meth:`report` was told last.
    beside
        Work of the same plan that this run does not continue, as values would differ.
    """

    def __init__(
        self,
        shared: Shared,
        planned: Planned,
        state: WorkerState,
        *,
        beside: tuple[Beside, ...],
        max_waiting_nbytes: int,
        clock: Callable[[], float],
        close: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._planned = planned
        self._clock = clock
        self._close = close
        self._deliveries = Deliveries(max_nbytes=max_waiting_nbytes)
        self._shards: set[PlannedShard] = set()
        self._said = state.updated
        self._beats = Heartbeat(self._beat, every_s=SAID_EVERY_S)
        self.run = shared.run
        self.covered = shared.covered
        self.layout = Layout(shared.run.schema)
        self._receipts = SharedReceipts(shared, planned, self.layout)
        self._settling = Settling(shared, self._receipts, drop=self._drop)
        self.state = state
        self.beside = beside
        self._beats.start()

    @property
    def place(self) -> Path | str:
        """Path or URL of the staging, for messages."""
        return self._shared.place

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(keep=isinstance(error, Exception | None))

    # -- shards ----------------------------------------------------------------------------------------------------

    def finished(self) -> frozenset[int]:
        """Ordinals of the shards there is a receipt for; no receipt is read."""
        return self._shared.ordinals()

    def begin(self, ordinal: int) -> PlannedShard:
        """Begin a shard. Other workers may be at work on the same one.

        Raises
        ------
        UsageError
            E081 for an ordinal that is not planned.
        StorageError
            E200 where the disk is full.
        """
        shard = PlannedShard(
            self._shared.files,
            self._shared.part(self._checked(ordinal)),
            self.layout,
            ordinal=ordinal,
            documents=self._planned.shard_documents(ordinal),
            version=self.run.version,
            header_size=self.run.header_size,
        )
        self._shards.add(shard)
        return shard

    def deliver(self, shard: PlannedShard) -> Future[Receipt]:
        """Let a helper thread complete a shard, and bring it where it counts, once there is room for it.

        One all of whose documents were skipped is finished too, by a receipt alone; sealing refuses it.

        Returns
        -------
        Future
            The receipt that counts: of this shard, or of the same one of a worker that was faster. Then nothing of
            this one stays, but in an object store what arrived.

        Raises
        ------
        ConflictError
            E115 for a shard that is not complete: nothing of it stays.
        KVFormatError
            What an earlier delivery failed with. The future fails with E112 where another worker's shard holds other
            documents, E200 where the disk is full, and whatever else the storage refuses.
        """
        shard.check_complete()
        return self._deliveries.submit(partial(self._settling.settle, shard), self.run.header_size + shard.nbytes)

    @property
    def lost(self) -> frozenset[int]:
        """Shards delivered here of which another worker's counts, as it was faster."""
        return frozenset(self._settling.lost)

    def flush(self) -> None:
        """Wait until all that was delivered is there; raises what the first delivery that failed did."""
        self._deliveries.flush()

    def stop(self) -> None:
        """Let what is being delivered fail soon: nobody waits for it any more."""
        self._shared.stop()

    def check(self, ordinal: int, *, allow_skips: bool = True) -> bool:
        """Look at a finished shard of an earlier run again; whether it may stay finished.

        A local one is hashed; of one in an object store, existence and size are looked at. A damaged one is set aside
        with a warning (W006), and counts as missing from then on.

        Parameters
        ----------
        allow_skips
            Otherwise a shard some of whose documents were skipped counts as missing too, for them to be tried again.
        """
        return self._receipts.check(self._checked(ordinal), allow_skips=allow_skips)

    def receipts(self) -> Iterator[tuple[int, Receipt | None]]:
        """The receipt of every planned shard by ordinal; None where there is none, or its shard is not there.

        Some are read ahead, side by side; they are not kept.

        Raises
        ------
        ConflictError
            E112 for documents that are not the planned ones.
        """
        return self._receipts.all()

    # -- others ----------------------------------------------------------------------------------------------------

    def report(self, state: WorkerState) -> None:
        """Tell others how this worker gets on: ``replace(workshop.state, shard=..., nbytes=...)``.

        Cheap: it is passed on at most once a second, or when shard or phase are others; now and then in any case.
        """
        now = self._clock()
        before, self.state = self.state, replace(state, updated=now)
        changed = (before.shard, before.phase) != (state.shard, state.phase)
        if changed or now - self._said >= _SOONEST_S:
            self._said = now
            self._shared.say(self.state)

    def workers(self) -> list[Worker]:
        """What all workers, this one included, said of themselves, and whether they live; by rank."""
        return self._shared.workers()

    def root(self) -> bytes | None:
        """The root, once a worker published; None before. Its SHA-256 is the dataset id."""
        return self._shared.root()

    # -- the end ---------------------------------------------------------------------------------------------------

    def publish(
        self, *, shards: Sequence[tuple[int, bytes]], parts: Sequence[EncodedPart], manifest: Manifest
    ) -> bytes:
        """Publish shards, given by ordinal and SHA-256; for :func:`kvformat.write.sealing.seal`, which proves them."""
        return self._shared.publish(shards=shards, parts=parts, covered=self.covered, manifest=manifest)

    def close(self, *, keep: bool = True) -> None:
        """Leave. More than once is harmless.

        Parameters
        ----------
        keep
            Whether complete shards are delivered first, whatever that takes; what fails then is left out.
        """
        try:
            self._end(keep=keep)
        finally:
            self._shared.leave()
            self._close()

    def remove(self) -> None:
        """Leave a dataset that is published; the last one out removes the staging."""
        try:
            self._end(keep=False)
        finally:
            try:
                self._shared.remove()
            finally:
                self._close()

    # -- within ----------------------------------------------------------------------------------------------------

    def _end(self, *, keep: bool) -> None:
        if not keep:
            self._shared.stop()
        self._deliveries.close(keep=keep)
        for shard in list(self._shards):
            self._drop(shard)
        self._beats.stop()

    def _checked(self, ordinal: int) -> int:
        if not 0 <= ordinal < self._planned.num_shards:
            raise make_error("E081", f"the plan has shards 0 to {self._planned.num_shards - 1}, found {ordinal}")
        return ordinal

    def _drop(self, shard: PlannedShard) -> None:
        shard.discard()
        self._shards.discard(shard)

    def _beat(self) -> None:
        now = self._clock()
        if now - self._said >= SAID_EVERY_S / 2:
            self._said = now
            self._shared.say(replace(self.state, updated=now))
