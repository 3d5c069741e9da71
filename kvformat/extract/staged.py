"""What an interrupted run left that this one will not have to write again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from kvformat.errors import KVFormatError
from kvformat.extract.tag import members
from kvformat.spec import canonical, limits
from kvformat.spec.digests import schema_digest
from kvformat.spec.layout import Layout
from kvformat.spec.schema import Schema
from kvformat.storage.remote import Remote
from kvformat.write.staging import Plan, stagings

__all__ = ["SHARD_SLOTS", "Known", "staged_nbytes"]

SHARD_SLOTS = 1024
"""Records of a shard, as the writer has it where nothing else is asked for."""


class Known(Struct, frozen=True, kw_only=True):
    """What is known of the plan of a run. Before the model is loaded, that is not all of it.

    Attributes
    ----------
    members
        Of the tag, those that are known.
    context, tag
        Digest and whole tag, once the model is loaded; None before.
    """

    schema: Schema
    shard_nbytes: int
    members: Mapping[str, str]
    context: str | None = None
    tag: str | None = None

    def agrees(self, plan: Plan) -> bool:
        """Whether nothing speaks against the plan of a staging directory being this run's."""
        mine = Plan(
            context=plan.context if self.context is None else self.context,
            header_size=Layout(self.schema).header_size(limits.VERSION, SHARD_SLOTS),
            schema=schema_digest(self.schema).hex(),
            shard_nbytes=self.shard_nbytes,
            shard_slots=SHARD_SLOTS,
            tag=plan.tag if self.tag is None else self.tag,
            version=limits.VERSION,
        )
        return plan == mine and self.members.items() <= members(plan.tag).items()


def staged_nbytes(target: Path | Remote, known: Known) -> int:
    """Bytes of the finished shards that a run will find staged at its target, and need not have space for again.

    In an object store nothing is counted: the space a run needs here is that of its spool, whatever is there. Of
    several plans that agree, the run can be of one only: the one with the least counts, so that too much space may be
    asked for, and never too little.
    """
    if not isinstance(target, Path):
        return 0
    found: dict[str, tuple[int, int]] = {}
    for path in stagings(target):
        plan = _plan(path)
        if plan is not None and path.name.startswith(plan.digest) and known.agrees(plan):
            # Of several directories of one plan the run continues the one that got furthest.
            found[plan.digest] = max(found.get(plan.digest, (0, 0)), _finished(path))
    return min((nbytes for _, nbytes in found.values()), default=0)


def _plan(path: Path) -> Plan | None:
    try:
        return canonical.convert(canonical.decode((path / "plan.json").read_bytes()), Plan)
    except (KVFormatError, OSError):  # unfinished or damaged: no run continues it
        return None


def _finished(path: Path) -> tuple[int, int]:
    """Number and bytes of the shards from 0 on with a receipt beside them; what stands beyond a gap is not used."""
    count = nbytes = 0
    while True:
        shard = path / f"{count:08d}.shard"
        if not shard.with_suffix(".json").exists():
            return count, nbytes
        try:
            nbytes += shard.stat().st_size
        except FileNotFoundError:
            return count, nbytes
        count += 1
