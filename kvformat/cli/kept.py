"""What an object store keeps for runs that resume, looked at without changing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvformat.cli.spooled import Spooled
from kvformat.cli.staged import StagedWork
from kvformat.errors import KVFormatError
from kvformat.spec.paths import STAGING, shard_path
from kvformat.storage.remote import Remote
from kvformat.write.parallel import side_by_side
from kvformat.write.remote_receipts import Kept, KeptPlan, RemoteReceipts, kept_plans
from kvformat.write.staging import Receipt

__all__ = ["Looked", "any_kept", "list_kept", "look_kept"]


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


def look_kept(remote: Remote, spools: Iterable[Spooled]) -> Looked:
    """Describe what lies below ``.staging/``.

    An object store knows nothing of who is at work; only a writer on this machine shows, by its spool.
    """
    live = {spool.plan for spool in spools if spool.state == "live"}
    kept = list_kept(remote)
    works = []
    shards: set[str] = set()
    for plan in kept.plans:
        receipts = RemoteReceipts(remote, plan.digest)
        found = _read(receipts, plan)
        shards |= {shard_path(receipt.ordinal, bytes.fromhex(receipt.sha256)) for receipt in found}
        nbytes = sum(receipt.size for receipt in found)
        works.append(
            StagedWork(
                path=remote.path(f"{STAGING}/{plan.digest}"),
                plan=receipts.plan(),
                shards=len(found),
                records=sum(len(receipt.records) for receipt in found),
                nbytes=nbytes,
                total_nbytes=nbytes + sum(stat.nbytes for stat in plan.objects),
                state="live" if plan.digest in live else "unknown",
            )
        )
    others = [*(probe.name for probe in kept.probes), *kept.others]
    return Looked(tuple(works), tuple(remote.path(name) for name in others), frozenset(shards))


def _read(receipts: RemoteReceipts, plan: KeptPlan) -> list[Receipt]:
    """The receipts of a plan that can be read."""

    def read(ordinal: int) -> Receipt | None:
        try:
            return receipts.read(ordinal)
        except KVFormatError as error:
            if error.code != "E116":
                raise
            return None  # damaged: shown as absent, refused by the writer that resumes

    return [receipt for receipt in side_by_side(read, plan.ordinals) if receipt is not None]
