"""A plan of a few small documents, its run, and a worker that makes its shards without any model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvformat
from kvformat.spec.context import Context, Text
from kvformat.spec.document import Document
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Skipped
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.write.opening import open_workshop
from kvformat.write.planned_shard import PlannedShard
from kvformat.write.record import RecordEncoder
from kvformat.write.run import RunIdentity
from kvformat.write.workshop import Workshop

__all__ = ["COVERED", "SCHEMA", "SmallPlan", "fill", "make", "opened", "remote", "run_of", "simple", "work"]

SCHEMA = kvformat.Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="F16")
LAYOUT = Layout(SCHEMA)
COVERED = {"notes": b"made by a test", "tokenizer": b"{}"}
SHARD_SLOTS = 2


class SmallPlan:
    """Records of 3, 8, 13, ... tokens, two a shard; another name for the third, and an input that was left out."""

    def __init__(self, num_records: int = 7, *, first_id: int = 0, per_shard: int = SHARD_SLOTS) -> None:
        self.num_records = num_records
        self.per_shard = per_shard
        self._documents = [
            Document.of(np.arange(3 + 5 * (record % 40), dtype=np.int32) + record + first_id)
            for record in range(num_records)
        ]
        self._digests = [document.digest for document in self._documents]
        self.digest = hashlib.sha256(b"".join(self._digests) + bytes([per_shard])).hexdigest()
        self.num_shards = -(-num_records // per_shard)
        self.skipped = (Skipped(input=num_records + 1, name="empty", reason="no tokens"),)

    @property
    def num_tokens(self) -> int:
        return sum(document.num_tokens for document in self._documents)

    @property
    def nbytes(self) -> int:
        return sum(LAYOUT.place((document.num_tokens,)).nbytes for document in self._documents)

    def shard(self, ordinal: int) -> range:
        return range(ordinal * self.per_shard, min((ordinal + 1) * self.per_shard, self.num_records))

    def shard_documents(self, ordinal: int) -> Sequence[bytes]:
        return [self._digests[record] for record in self.shard(ordinal)]

    def names(self) -> Iterator[tuple[int, int, bytes]]:
        for record in range(self.num_records):
            yield record, record, f"clip-{record}".encode()
            if record == 2:
                yield record, self.num_records, b"alias-of-2"

    def document(self, record: int) -> Document:
        return self._documents[record]

    def close(self) -> None:
        pass


def values(plan: SmallPlan, record: int, *, variant: int = 0) -> dict[str, np.ndarray]:
    """Components of a record, the same in every process."""
    generator = np.random.default_rng([record, variant])
    shape = (2, plan.document(record).num_tokens, 1, 4)
    return {name: generator.standard_normal(shape).astype(np.float16) for name in ("k", "v")}


def run_of(plan: SmallPlan, **changes: Any) -> RunIdentity:
    """The run of a plan."""
    given: dict[str, Any] = {
        "schema": SCHEMA,
        "context": Context.unknown(),
        "text": Text(),
        "provenance": {"variant": "0"},
        "covered": COVERED,
        "shard_nbytes": 1 << 30,
        "shard_slots": plan.per_shard,
        "num_tokens": plan.num_tokens,
        "nbytes": plan.nbytes,
        **changes,
    }
    return RunIdentity.of(plan, **given)


def opened(
    target: Path | Remote,
    plan: SmallPlan,
    *,
    changes: Mapping[str, Any] | None = None,
    covered: Mapping[str, bytes] = COVERED,
    **options: Any,
) -> Workshop:
    """A worker's hold on the work of a plan."""
    run = run_of(plan, covered=covered, **(changes or {}))
    return open_workshop(target, run, plan, covered=covered, **options)


def remote(store: Any, **options: Any) -> Remote:
    """A client of this store that gives up soon."""
    settings = RemoteOptions(**{"attempt_timeout_s": 5.0, "deadline_s": 5.0, **options})
    return Remote(store.url, connect=lambda *_: store, options=settings)


def fill(
    shard: PlannedShard, plan: SmallPlan, *, variant: int = 0, skip: Collection[int] = (), stop: int | None = None
) -> PlannedShard:
    """Add the records of a shard, all of them or the first few."""
    encoder = RecordEncoder(LAYOUT)
    for record in list(plan.shard(shard.ordinal))[:stop]:
        document = plan.document(record)
        if record in skip:
            shard.skip(document.digest, f"record {record} is odd")
            continue
        encoded = encoder.encode(f"{record}", document, values(plan, record, variant=variant), {})
        shard.add(encoded.placement, encoded.buffers, document=document.digest, record_sum=encoded.record_sum)
    return shard


def make(workshop: Workshop, plan: SmallPlan, ordinals: Collection[int], **options: Any) -> None:
    """Make these shards, and wait until they are there."""
    for ordinal in ordinals:
        workshop.deliver(fill(workshop.begin(ordinal), plan, **options))
    workshop.flush()


def work(
    workshop: Workshop,
    plan: SmallPlan,
    *,
    rank: int = 0,
    world_size: int = 1,
    told: Callable[[str, int], None] = lambda *_: None,
    variant: int = 0,
) -> None:
    """Make the shards of a rank that are not finished, then what the others have not, from the end.

    ``told`` is called with ``begun`` and an ordinal, and with ``finished`` once a receipt counts.
    """
    earlier = workshop.finished()
    own = list(range(rank, plan.num_shards, world_size))
    for ordinal in own:
        if ordinal in earlier:
            workshop.check(ordinal)
    futures = []
    for ordinal in [*own, *sorted(set(range(plan.num_shards)) - set(own), reverse=True)]:
        if ordinal in workshop.finished():
            continue
        told("begun", ordinal)
        future = workshop.deliver(fill(workshop.begin(ordinal), plan, variant=variant))
        future.add_done_callback(lambda done, ordinal=ordinal: _tell(told, done, ordinal))
        futures.append(future)
    workshop.flush()


def _tell(told: Callable[[str, int], None], done: Any, ordinal: int) -> None:
    if not done.cancelled() and done.exception() is None:
        told("finished", ordinal)


def simple(location: Path, plan: SmallPlan) -> str:
    """Id of the dataset as the simple writer makes it."""
    with kvformat.create(
        location,
        schema=SCHEMA,
        context=Context.unknown(),
        provenance={"variant": "0"},
        files=COVERED,
        shard_slots=plan.per_shard,
    ) as writer:
        for record in range(plan.num_records):
            writer.add(f"clip-{record}", values(plan, record), document=plan.document(record))
        writer.alias("alias-of-2", "clip-2")
        writer.skip("empty", "no tokens")
    return writer.id
