"""Sealing: the shards of all workers, proved to be all of the plan, become one dataset."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Skipped
from kvformat.write.planned import Planned
from kvformat.write.rows import Tables
from kvformat.write.run import run_differs
from kvformat.write.staging import Receipt
from kvformat.write.worker_state import is_alive
from kvformat.write.workshop import Workshop

__all__ = ["seal"]

_MOST_NAMED = 10


def seal(workshop: Workshop, planned: Planned, *, allow_skips: bool = False) -> str:
    """Publish the shards of a plan, all of which are finished. Several may do so at once: equal is success.

    Receipts are read one behind the other: memory grows by the tables alone, about 100 bytes a record and its names.

    Parameters
    ----------
    allow_skips
        Publish although documents were skipped when their shard was made; the manifest lists them, with the reasons.
        What was left out when planning is listed in any case.

    Returns
    -------
    str
        The dataset id.

    Raises
    ------
    ConflictError
        E119 where shards are missing, where documents were skipped and that is not allowed, and where all documents of
        a shard were, which nothing allows: shards of a dataset have no gaps in their numbers. E112 where a receipt is
        not by this plan; E113 where something else is published already.
    IdentityError
        E120 where the staged work is of another plan.
    StorageError
        E200 to E203, E207 to E209.
    """
    run = workshop.run
    if planned.digest != run.plan:
        raise run_differs([f"plan ({planned.digest} here, {run.plan} there)"], workshop.place)
    finished = workshop.finished()
    if len(finished) < planned.num_shards:
        raise _missing(
            [ordinal for ordinal in range(planned.num_shards) if ordinal not in finished], workshop, planned
        )
    gathered = _Gathered(workshop.layout)
    missing = []
    for ordinal, receipt in workshop.receipts():
        if receipt is None:
            missing.append(ordinal)
        elif not missing:
            gathered.add(receipt, planned.shard(ordinal), planned.shard_documents(ordinal))
    if missing:
        raise _missing(missing, workshop, planned)
    if gathered.reasons:
        raise _without_records(gathered.reasons, workshop, planned)
    left_out = gathered.add_names(planned)
    if left_out and not allow_skips:
        raise _skipped(left_out, workshop)
    skipped = sorted([*planned.skipped, *left_out], key=lambda one: one.input)
    manifest, parts = run.draft(workshop.place, workshop.covered).complete(gathered.tables, skipped)
    root = workshop.publish(shards=gathered.shards, parts=parts, manifest=manifest)
    return hashlib.sha256(root).hexdigest()


class _Gathered:
    """Tables of the shards so far, in order.

    Attributes
    ----------
    shards
        Ordinal and SHA-256.
    reasons
        Of the shards all of whose documents were skipped: why, by document, by ordinal.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._skipped: list[int] = []
        self._reasons: dict[int, str] = {}
        self.tables = Tables(len(layout.schema.dims))
        self.shards: list[tuple[int, bytes]] = []
        self.reasons: dict[int, dict[bytes, str]] = {}

    def add(self, receipt: Receipt, records: range, documents: Sequence[bytes]) -> None:
        """Add a shard, whose documents were found to be the planned ones."""
        if receipt.is_empty:
            self.reasons[receipt.ordinal] = {bytes.fromhex(one.document): one.reason for one in receipt.skipped}
            return
        first, offset = self.tables.num_records, 0
        for record in receipt.records:
            self.tables.add_record(
                offset=offset,
                dims=record.dims,
                document=bytes.fromhex(record.document),
                record_sum=bytes.fromhex(record.record_sum),
            )
            offset += self._layout.place(record.dims).nbytes
        if receipt.skipped:
            reasons = {bytes.fromhex(one.document): one.reason for one in receipt.skipped}
            for number, document in zip(records, documents, strict=True):
                if document in reasons:
                    self._skipped.append(number)
                    self._reasons[number] = reasons[document]
        sha256 = bytes.fromhex(receipt.sha256)
        self.tables.add_shard(sha256=sha256, size=receipt.size, first_record=first)
        self.shards.append((receipt.ordinal, sha256))

    def add_names(self, planned: Planned) -> list[Skipped]:
        """Add the names of all records; those of skipped ones are returned instead."""
        left_out = []
        for record, position, name in planned.names():
            reason = self._reasons.get(record)
            if reason is not None:
                left_out.append(Skipped(input=position, name=name.decode(), reason=reason))
            else:
                stored = record - bisect_left(self._skipped, record)
                self.tables.add_name(record=stored, name=name, position=position)
        return left_out


def _missing(ordinals: Sequence[int], workshop: Workshop, planned: Planned) -> KVFormatError:
    records = sum(len(planned.shard(ordinal)) for ordinal in ordinals)
    at_work = sum(
        is_alive(worker) and worker.state.phase not in ("load", "seal") and worker.state.token != workshop.state.token
        for worker in workshop.workers()
    )
    remedy = "run the workers of this plan again, they make what is missing, then seal"
    if at_work:
        who = "1 worker is" if at_work == 1 else f"{at_work:,} workers are"
        remedy = f"{who} at work on them: wait, they seal when all is there; `kvformat status` shows how far they are"
    return make_error(
        "E119",
        f"{len(ordinals):,} of {planned.num_shards:,} shards are missing, with {records:,} records: "
        f"{_listed(ordinals)}; {remedy}",
        path=workshop.place,
    )


def _listed(ordinals: Sequence[int]) -> str:
    return ", ".join(map(str, ordinals[:_MOST_NAMED])) + (", ..." if len(ordinals) > _MOST_NAMED else "")


def _without_records(
    reasons: Mapping[int, Mapping[bytes, str]], workshop: Workshop, planned: Planned
) -> KVFormatError:
    """The E119 of shards all of whose documents were skipped."""
    ordinals = sorted(reasons)
    why = {
        record: reasons[ordinal][document]
        for ordinal in ordinals[:_MOST_NAMED]
        for record, document in zip(planned.shard(ordinal), planned.shard_documents(ordinal), strict=True)
    }
    named = [(name.decode(), why[record]) for record, _, name in planned.names() if record in why]
    shown = "; ".join(f"{name!r} ({reason:.100})" for name, reason in named[:_MOST_NAMED])
    more = "; ..." if len(named) > _MOST_NAMED or len(ordinals) > _MOST_NAMED else ""
    count = "1 shard holds" if len(ordinals) == 1 else f"{len(ordinals):,} shards hold"
    return make_error(
        "E119",
        f"{count} no record, as all of their documents were skipped: {_listed(ordinals)}, with {shown}{more}; shards "
        "of a dataset have no gaps in their numbers, so it cannot be published like that, not even where skips are "
        "allowed: mend the cause and run the workers again without allowing skips, which tries these documents again, "
        "or plan again without them",
        path=workshop.place,
        record=named[0][0],
    )


def _skipped(left_out: Sequence[Skipped], workshop: Workshop) -> KVFormatError:
    shown = "; ".join(f"{one.name!r} ({one.reason:.100})" for one in left_out[:_MOST_NAMED])
    more = "; ..." if len(left_out) > _MOST_NAMED else ""
    return make_error(
        "E119",
        f"{len(left_out):,} names are of documents that were skipped: {shown}{more}; mend the cause and run the "
        "workers again without allowing skips, which tries them again, or publish without them (allow_skips, "
        "--allow-skips)",
        path=workshop.place,
        record=left_out[0].name,
    )
