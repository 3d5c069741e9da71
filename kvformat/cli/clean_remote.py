"""``kvformat clean`` of a URL: what runs would resume from, and spools on this machine; never a shard."""

from __future__ import annotations

import time
from pathlib import Path

from kvformat.cli import output
from kvformat.cli.clean import ask, take_leases
from kvformat.cli.kept import list_kept
from kvformat.cli.spooled import nbytes_of
from kvformat.errors import make_error
from kvformat.spec.paths import STAGING
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.storage.store import Stat
from kvformat.write.at_work import at_work
from kvformat.write.remote_dead import forget
from kvformat.write.remote_receipts import KeptPlan
from kvformat.write.remote_workers import workers_of
from kvformat.write.spool import remove_spool
from kvformat.write.spool_places import plan_of, spools
from kvformat.write.worker_state import Worker, is_alive

__all__ = ["clean_remote"]

_MOST_NAMED = 20
_DOUBT = "no leases there: make sure no writer is at work on any machine"


def clean_remote(remote: Remote, base: Path, *, yes: bool) -> None:
    """Remove what is kept in an object store for runs that resume, and the spools of killed writers below ``base``.

    Raises
    ------
    ConflictError
        E117 where a writer on this machine is at work; what is its own is left alone.
    UsageError
        E081 where nobody answers.
    """
    held: dict[Path, DirectoryLease] = {}
    try:
        kept = list_kept(remote)
        # Before the leases are taken, which would look like those of workers.
        workers = {plan.digest: _alive(remote, plan, base) for plan in kept.plans if plan.shared}
        working = [digest for digest, alive in workers.items() if alive]
        live = take_leases(spools(base, remote.url), held)
        busy = {plan_of(path) for path in live} | {*working}
        plans = [plan for plan in kept.plans if plan.digest not in busy]
        objects = [stat for plan in plans for stat in _last_first(plan)] + list(kept.probes)
        if not objects and not held:
            if not live and not working:
                output.emit("no staged work, 0 bytes freed")
            else:
                output.emit("nothing removed, 0 bytes freed")
        elif yes or _agreed(remote, [plan.digest for plan in plans], objects, held):
            _remove(remote, objects, held)
        else:
            output.emit("nothing removed, 0 bytes freed")
    finally:
        for lease in held.values():
            lease.release()
    for other in kept.others[:_MOST_NAMED]:
        output.complain(f"not of a writer, left alone: {output.plain(remote.path(other))}")
    if len(kept.others) > _MOST_NAMED:
        output.complain(f"and {len(kept.others) - _MOST_NAMED:,} more: `kvformat status` names them")
    if working:
        raise make_error(
            "E117",
            f"{output.counted(len(working), 'plan')} left alone: "
            + at_work([one for digest in working for one in workers[digest]], now=time.time(), then="clean again"),
            path=remote.path(f"{STAGING}/{working[0]}"),
        )
    if live:
        raise make_error(
            "E117", "a writer is at work on this machine: wait for it, or stop it, and clean again", path=live[0]
        )


def _alive(remote: Remote, plan: KeptPlan, base: Path) -> list[Worker]:
    workers = workers_of(remote, plan.digest, [stat.name for stat in plan.objects], base=base)
    return [worker for worker in workers if is_alive(worker)]


def _last_first(plan: KeptPlan) -> list[Stat]:
    """The last receipt first, the plan or run at the end: cut short, a run resumes from what is left."""
    receipts, others = plan.objects[: len(plan.ordinals)], plan.objects[len(plan.ordinals) :]
    return [*reversed(receipts), *others]


def _agreed(remote: Remote, plans: list[str], objects: list[Stat], held: dict[Path, DirectoryLease]) -> bool:
    if objects:
        nbytes = sum(stat.nbytes for stat in objects)
        what = f"{output.counted(len(plans), 'plan')}, {output.counted(len(objects), 'object')}"
        output.complain(f"{output.plain(remote.path('.staging'))}: {what}, {output.size_text(nbytes)} ({_DOUBT})")
    for path, lease in held.items():
        doubt = "" if lease.supported else " (no leases on this file system: make sure no writer is at work)"
        output.complain(f"{output.plain(path)}: {output.size_text(sum(nbytes_of(path)))}{doubt}")
    return ask("Remove it? Shards are not touched, but the next run begins anew.")


def _remove(remote: Remote, objects: list[Stat], held: dict[Path, DirectoryLease]) -> None:
    files = LocalFiles()
    freed = 0
    for path in held:
        # Before what proves that its worker is dead: where others keep the plan, what it said would count as alive.
        forget(remote, path)
        freed += remove_spool(files, path)
    for stat in objects:
        remote.delete(stat.name)
    lines = []
    if objects:
        nbytes = sum(stat.nbytes for stat in objects)
        lines.append(f"removed {output.counted(len(objects), 'object')}, {nbytes:,} bytes freed in the store")
    if held:
        number = f"{len(held)} spool director{'y' if len(held) == 1 else 'ies'}"
        lines.append(f"removed {number}, {freed:,} bytes freed on this machine")
    output.emit(*lines)
