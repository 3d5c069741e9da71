"""What an object store keeps for runs that resume, looked at without changing it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from kvformat.cli.shared_work import describe, state_of
from kvformat.cli.spooled import Spooled
from kvformat.cli.staged import StagedWork
from kvformat.errors import KVFormatError
from kvformat.spec.paths import STAGING, shard_path
from kvformat.storage.remote import Remote
from kvformat.write.parallel import side_by_side
from kvformat.write.planned import Planned
from kvformat.write.remote_receipts import Kept, KeptPlan, RemoteReceipts, kept_plans
from kvformat.write.remote_workers import read_run, workers_of
from kvformat.write.staging import Receipt

__all__ = ["Looked", "any_kept", "list_kept", "look_kept"]

_SHARD = re.compile(r"shards/[0-9]{5}/([0-9]{8})-[0-9a-f]{16}\.safetensors")


def list_kept(remote: Remote) -> Kept:
    """What lies below ``.staging/``; lists it."""
    return kept_plans(remote.list(f"{STAGING}/"))


def any_kept(remote: Remote) -> bool:
    """Whether there is a receipt of any plan."""
    return any(plan.ordinals for plan in list_kept(remote).plans)


class Looked(NamedTuple):
    """Work of every plan, URLs of what else lies beside it, and the names of the shards receipts speak of."""

    works: tuple[StagedWork, ...]
    others: tuple[str, ...]
    shards: frozenset[str]


def look_kept(
    remote: Remote,
    spools: Iterable[Spooled],
    *,
    objects: Mapping[str, int],
    base: Path,
    planned: Planned | None = None,
) -> Looked:
    """Describe what lies below ``.staging/``.

    An object store knows nothing of who is at work: a writer on this machine shows by its spool, workers anywhere by
    what they say.

    Parameters
    ----------
    objects
        Sizes of all others, by name.
    base
        Where spools are on this machine.
    planned
        The plan of work that workers share, where it is known.
    """
    live = {spool.plan for spool in spools if spool.state == "live"}
    kept = list_kept(remote)
    works = []
    shards: set[str] = set()
    for plan in kept.plans:
        if plan.shared:
            work, staged = _look_shared(remote, plan, objects, base, planned)
        else:
            work, staged = _look_plan(remote, plan, live=plan.digest in live)
        works.append(work)
        shards |= staged
    others = [*(probe.name for probe in kept.probes), *kept.others]
    return Looked(tuple(works), tuple(remote.path(name) for name in others), frozenset(shards))


def _look_plan(remote: Remote, plan: KeptPlan, *, live: bool) -> tuple[StagedWork, set[str]]:
    """The work of one writer, and the names of its shards."""
    receipts = RemoteReceipts(remote, plan.digest)
    found = _read(receipts, plan.ordinals)
    nbytes = sum(receipt.size for receipt in found)
    work = StagedWork(
        path=remote.path(f"{STAGING}/{plan.digest}"),
        plan=receipts.plan(),
        shards=len(found),
        records=sum(len(receipt.records) for receipt in found),
        nbytes=nbytes,
        total_nbytes=nbytes + sum(stat.nbytes for stat in plan.objects),
        state="live" if live else "unknown",
    )
    return work, {_name(receipt) for receipt in found}


def _look_shared(
    remote: Remote, plan: KeptPlan, objects: Mapping[str, int], base: Path, planned: Planned | None
) -> tuple[StagedWork, set[str]]:
    """The work of a run, and the names of its shards. Receipts are read only where a shard is there twice, or none."""
    named: dict[int, list[str]] = {}
    for name in objects:
        if match := _SHARD.fullmatch(name):
            named.setdefault(int(match[1]), []).append(name)
    ordinals = [ordinal for ordinal in plan.ordinals if ordinal in named]
    receipts = RemoteReceipts(remote, plan.digest)
    twice = [ordinal for ordinal in ordinals if len(named[ordinal]) > 1]
    counting = {receipt.ordinal: _name(receipt) for receipt in _read(receipts, twice)}
    staged = {counting.get(ordinal, named[ordinal][0]) for ordinal in ordinals}
    nbytes = sum(objects.get(name, 0) for name in staged)
    workers = workers_of(remote, plan.digest, [stat.name for stat in plan.objects], base=base)
    run = read_run(remote, plan.digest)
    without = [ordinal for ordinal in plan.ordinals if ordinal not in named]  # all documents skipped: a receipt alone
    finished = frozenset([*ordinals, *(receipt.ordinal for receipt in _read(receipts, without) if receipt.is_empty)])
    same = planned is not None and run is not None and run.plan == planned.digest
    work = StagedWork(
        path=remote.path(f"{STAGING}/{plan.digest}"),
        plan=None,
        shards=len(finished),
        records=sum(len(planned.shard(ordinal)) for ordinal in finished) if same and planned is not None else None,
        nbytes=nbytes,
        total_nbytes=nbytes + sum(stat.nbytes for stat in plan.objects),
        state=state_of(workers) if workers else "unknown",
        shared=None if run is None else describe(run, finished, nbytes, workers, place=None),
    )
    return work, staged


def _name(receipt: Receipt) -> str:
    return shard_path(receipt.ordinal, bytes.fromhex(receipt.sha256))


def _read(receipts: RemoteReceipts, ordinals: Iterable[int]) -> list[Receipt]:
    """The receipts of some shards, as far as they can be read."""

    def read(ordinal: int) -> Receipt | None:
        try:
            return receipts.read(ordinal)
        except KVFormatError as error:
            if error.code != "E116":
                raise
            return None  # damaged: shown as absent, refused by the writer that resumes

    return [receipt for receipt in side_by_side(read, ordinals) if receipt is not None]
