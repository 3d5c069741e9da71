"""Workers of a real plan, for the tests of ``status``, ``clean`` and ``seal``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import kvformat
from kvformat.extract.documents import DocumentsWriter
from kvformat.extract.plan import Plan, make_plan
from kvformat.spec.context import Context
from kvformat.spec.document import Document
from kvformat.write.opening import open_workshop
from kvformat.write.planned_shard import PlannedShard
from kvformat.write.record import RecordEncoder
from kvformat.write.run import RunIdentity
from kvformat.write.workshop import Workshop

__all__ = ["COVERED", "SCHEMA", "fill", "make", "opened", "saved_plan"]

SCHEMA = kvformat.Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="F32")
COVERED = {"notes": b"made by a test"}


def saved_plan(path: Path, *, num_records: int = 7, first_id: int = 0) -> Plan:
    """A plan in a directory, of two records a shard."""
    with DocumentsWriter(None) as writer:
        for record in range(num_records):
            writer.add(f"clip-{record}", Document.of(np.arange(5 + record, dtype=np.int32) + first_id))
        documents = writer.finish(None)
    plan = make_plan(documents, schema=SCHEMA, shard_slots=2)
    plan.save(path)
    return plan


def opened(target: Any, plan: Plan, *, tag: str = "", **options: Any) -> Workshop:
    """A worker's hold on the work of a plan."""
    run = RunIdentity.of(
        plan,
        schema=plan.schema,
        context=Context.unknown(),
        text=plan.text,
        provenance={"torch": "1.2.3"},
        covered=COVERED,
        shard_nbytes=plan.shard_nbytes,
        shard_slots=plan.shard_slots,
        num_tokens=plan.num_tokens,
        nbytes=plan.nbytes,
        tag=tag,
    )
    return open_workshop(target, run, plan, covered=COVERED, **options)


def fill(shard: PlannedShard, plan: Plan, *, skip: tuple[int, ...] = (), stop: int | None = None) -> PlannedShard:
    """Add the records of a shard, all of them or the first few."""
    encoder = RecordEncoder(kvformat.spec.layout.Layout(SCHEMA))
    for record in list(plan.shard(shard.ordinal))[:stop]:
        planned = plan.document(record)
        if record in skip:
            shard.skip(planned.digest, "[red]odd")
            continue
        values = {name: np.full((2, planned.document.num_tokens, 1, 4), record + 1, np.float32) for name in ("k", "v")}
        encoded = encoder.encode(planned.name, planned.document, values, {})
        shard.add(encoded.placement, encoded.buffers, document=planned.digest, record_sum=encoded.record_sum)
    return shard


def make(workshop: Workshop, plan: Plan, *ordinals: int, skip: tuple[int, ...] = ()) -> None:
    """Make these shards."""
    for ordinal in ordinals:
        workshop.deliver(fill(workshop.begin(ordinal), plan, skip=skip))
    workshop.flush()
