"""What workers share at a location, looked at without disturbing them: who is at work, what is done, what is left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from kvformat.cli import output
from kvformat.spec.digests import context_digest, schema_digest
from kvformat.write.at_work import gone_in_s
from kvformat.write.run import RunIdentity
from kvformat.write.worker_state import Liveness, Phase, Worker, is_alive, is_loading

__all__ = ["SeenWorker", "SharedWork", "describe", "lines", "state_of"]

_SHOWN = 20
_PHASES = {
    "load": "loading its model",
    "start": "starting",
    "work": "between shards",
    "wait": "waiting for the others",
    "seal": "sealing",
}


class SeenWorker(Struct, frozen=True, kw_only=True):
    """A worker; ``said_s_ago`` tells how old all the rest is."""

    rank: int
    world_size: int
    host: str
    pid: int
    liveness: Liveness
    phase: Phase
    shard: int | None
    shard_records: int
    shard_total: int
    num_shards: int
    num_tokens: int
    nbytes: int
    said_s_ago: float


class SharedWork(Struct, frozen=True, kw_only=True):
    """The work of a run.

    Attributes
    ----------
    plan, schema, context
        Digests.
    finished, running, missing
        Shards: with a receipt, in the hands of a worker that lives or may do so, and the others.
    first_missing
        Ordinals of some of the missing.
    loading
        Whether somebody is there, and nobody but for loading a model.
    rate_nbytes_s
        Of the workers that live, together, since each began; None where nobody did anything yet.
    left_s
        How long the rest takes at that rate.
    needed_nbytes, free_nbytes
        What the shards not finished will take, and the space there is; None where that is not known.
    """

    plan: str
    schema: str
    context: str
    tag: str
    shard_nbytes: int
    num_shards: int
    num_records: int
    num_tokens: int
    finished: int
    running: tuple[int, ...]
    missing: int
    first_missing: tuple[int, ...]
    loading: bool
    rate_nbytes_s: float | None
    left_s: float | None
    needed_nbytes: int
    free_nbytes: int | None
    workers: tuple[SeenWorker, ...]


def describe(
    run: RunIdentity,
    finished: frozenset[int],
    nbytes: int,
    workers: Sequence[Worker],
    *,
    place: Path | None,
    now: float | None = None,
) -> SharedWork:
    """Describe the work of a run.

    Parameters
    ----------
    nbytes
        Of the finished shards.
    place
        A path on the file system that the rest goes to, where there is one.
    now
        Seconds since 1970.
    """
    now = time.time() if now is None else now
    alive = [worker.state for worker in workers if is_alive(worker)]
    running = {state.shard for state in alive if state.shard is not None} - finished
    missing = [ordinal for ordinal in range(run.num_shards) if ordinal not in finished and ordinal not in running]
    rates = [state.nbytes / (state.updated - state.started) for state in alive if state.updated > state.started]
    rate = sum(rates)
    needed = max(run.nbytes - nbytes, 0) if len(finished) < run.num_shards else 0
    return SharedWork(
        plan=run.plan,
        schema=schema_digest(run.schema).hex(),
        context=context_digest(run.context).hex(),
        tag=run.tag,
        shard_nbytes=run.shard_nbytes,
        num_shards=run.num_shards,
        num_records=run.num_records,
        num_tokens=run.num_tokens,
        finished=len(finished),
        running=tuple(sorted(running)),
        missing=len(missing),
        first_missing=tuple(missing[:_SHOWN]),
        loading=bool(alive) and all(map(is_loading, alive)),
        rate_nbytes_s=rate or None,
        left_s=needed / rate if rate else None,
        needed_nbytes=needed,
        free_nbytes=None if place is None else shutil.disk_usage(place).free,
        workers=tuple(_seen(worker, now) for worker in workers),
    )


def state_of(workers: Sequence[Worker]) -> Literal["live", "abandoned", "unknown"]:
    """What the workers of a run say of it."""
    found = {worker.liveness for worker in workers}
    return "live" if "live" in found else "unknown" if "unknown" in found else "abandoned"


def lines(work: SharedWork, nbytes: int) -> list[str]:
    """A few lines for people; ``nbytes`` are those of the finished shards."""
    running = f", {len(work.running)} in work" if work.running else ""
    size = f"{output.size_text(nbytes)}, {output.size_text(work.needed_nbytes)} to go"
    free = "" if work.free_nbytes is None else f", {output.size_text(work.free_nbytes)} free"
    counts = f"{work.finished:,} of {work.num_shards:,} finished{running}, {work.missing:,} missing"
    found = [f"    shards: {counts}; {size}{free}"]
    if work.free_nbytes is not None and work.free_nbytes < work.needed_nbytes:
        found.append(f"    space is short by {output.size_text(work.needed_nbytes - work.free_nbytes)}")
    if work.rate_nbytes_s and work.needed_nbytes:
        assert work.left_s is not None
        found.append(f"    rate: {output.rate_text(work.rate_nbytes_s)}, {_duration(work.left_s)} left")
    if work.missing and not work.running:
        more = ", ..." if work.missing > len(work.first_missing) else ""
        found.append(f"    missing: {', '.join(map(str, work.first_missing))}{more}")
    found += [_worker_line(worker) for worker in work.workers[:_SHOWN]]
    if len(work.workers) > _SHOWN:
        found.append(f"    and {len(work.workers) - _SHOWN:,} more workers; --json lists all")
    shards = f"shards of {output.size_text(work.shard_nbytes)}"
    found.append(f"    plan {work.plan[:16]}, schema {work.schema[:16]}, context {work.context[:16]}, {shards}")
    return [*found, f"    tag: {output.plain(work.tag)}"] if work.tag else found


def _worker_line(worker: SeenWorker) -> str:
    who = f"worker {worker.rank} of {worker.world_size}, {worker.liveness}"
    where = f"{output.plain(worker.host)}, pid {worker.pid}"
    if worker.phase == "work" and worker.shard is not None:
        what = f"shard {worker.shard} ({worker.shard_records} of {output.counted(worker.shard_total, 'record')})"
    else:
        what = _PHASES[worker.phase]
    done = f"{output.counted(worker.num_shards, 'shard')} and {output.size_text(worker.nbytes)} done"
    ago = "" if worker.liveness == "live" else f", last heard of {_duration(worker.said_s_ago)} ago"
    if worker.liveness == "unknown":
        ago += f"; where it was killed, it counts as gone in {_duration(gone_in_s(worker.said_s_ago))}"
    return f"    {who}: {where}, {what}, {done}{ago}"


def _seen(worker: Worker, now: float) -> SeenWorker:
    state = worker.state
    return SeenWorker(
        rank=state.rank,
        world_size=state.world_size,
        host=state.host,
        pid=state.pid,
        liveness=worker.liveness,
        phase=state.phase,
        shard=state.shard,
        shard_records=state.shard_records,
        shard_total=state.shard_total,
        num_shards=state.num_shards,
        num_tokens=state.num_tokens,
        nbytes=state.nbytes,
        said_s_ago=round(max(now - state.updated, 0.0), 3),
    )


def _duration(seconds: float) -> str:
    """As ``1:02:03``, or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
