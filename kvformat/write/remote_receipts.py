"""What a writer keeps in an object store for a later run: its plan, and a receipt for each shard that is there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical
from kvformat.spec.paths import STAGING, shard_path
from kvformat.storage.remote import Remote
from kvformat.storage.store import Stat
from kvformat.write.parallel import side_by_side
from kvformat.write.receipt_file import decode_receipt, encode_receipt
from kvformat.write.staging import COVERED, Plan, Receipt

__all__ = ["MAX_RECEIPT_NBYTES", "Kept", "KeptPlan", "RemoteReceipts", "kept_plans"]

MAX_RECEIPT_NBYTES = 256 << 20
"""Of a receipt; one of 10,000 records with 16 dims takes a hundredth."""
_MOST_AHEAD = 16
_NAME = re.compile(
    rf"{re.escape(STAGING)}/([0-9a-f]{{16}})/"
    rf"(?:(?P<head>plan|run)\.json|(?P<receipt>[0-9]{{8}})\.json|worker-[0-9]+-[0-9a-f]{{8}}\.json|{COVERED}/[0-9a-f]{{64}})"
)
_PROBE = re.compile(re.escape(STAGING) + r"/probe-[0-9a-f]{32}")  # of Remote.require_create


class KeptPlan(Struct, frozen=True, kw_only=True):
    """What lies in an object store of one plan.

    Attributes
    ----------
    digest
        Of the plan of a writer, or the key of a run that workers share.
    shared
        Whether workers share it.
    ordinals
        Of the shards there are receipts for, ascending.
    objects
        All objects: receipts in ascending order, then the others, and the plan or run at the end.
    """

    digest: str
    shared: bool
    ordinals: tuple[int, ...]
    objects: tuple[Stat, ...]


class Kept(NamedTuple):
    """What lies below ``.staging/``: of each plan, of probes that were cut short, and names of what is foreign."""

    plans: tuple[KeptPlan, ...]
    probes: tuple[Stat, ...]
    others: tuple[str, ...]


class RemoteReceipts:
    """Receipts of one plan, below ``.staging/<digest of the plan>/``. Made once each, and never replaced."""

    def __init__(self, remote: Remote, digest: str) -> None:
        self._remote = remote
        self._digest = digest
        self._plan_name = f"{STAGING}/{digest}/plan.json"

    def name(self, ordinal: int) -> str:
        """Object of a receipt."""
        return f"{STAGING}/{self._digest}/{ordinal:08d}.json"

    def begin(self, plan: Plan) -> None:
        """Write down the plan; E116 where something else is there in its place."""
        if not self._remote.create(self._plan_name, canonical.encode(plan)):
            message = "not the plan that belongs here: run `kvformat clean` and start again"
            raise make_error("E116", message, path=self._remote.path(self._plan_name))

    def plan(self) -> Plan | None:
        """The plan, where it is there and can be read."""
        try:
            return canonical.convert(
                canonical.decode(self._remote.read(self._plan_name, max_nbytes=MAX_RECEIPT_NBYTES)), Plan
            )
        except KVFormatError as error:
            if error.code.startswith("E2"):
                raise
            return None

    def read_all(self) -> list[Receipt]:
        """Receipts from 0 on without a gap, each of a shard that is there. Nothing is listed.

        Raises
        ------
        DamageError
            E116 for a damaged receipt, and for a shard that is missing or of another size.
        """
        found: list[Receipt] = []
        ahead = 1
        while True:
            read = side_by_side(self._confirmed, range(len(found), len(found) + ahead))
            for receipt in read:
                if receipt is None:
                    return found
                found.append(receipt)
            ahead = min(2 * ahead, _MOST_AHEAD)

    def read(self, ordinal: int) -> Receipt | None:
        """One receipt; None where there is none; E116 where it is damaged."""
        name = self.name(ordinal)
        path = self._remote.path(name)
        try:
            data = self._remote.read(name, max_nbytes=MAX_RECEIPT_NBYTES)
        except KVFormatError as error:
            if error.code == "E002":
                return None
            raise
        return decode_receipt(data, key=self._digest, ordinal=ordinal, path=path)

    def add(self, receipt: Receipt) -> Receipt:
        """Note that a shard is there; returns the receipt that counts, which is the first one made.

        Raises
        ------
        ConflictError
            E112 where that is of other records.
        """
        name = self.name(receipt.ordinal)
        if self._remote.create(name, encode_receipt(receipt, key=self._digest)):
            return receipt
        first = self._confirmed(receipt.ordinal)
        if first is None or first.records != receipt.records:
            mine = [record.document for record in receipt.records]
            same = first is not None and [record.document for record in first.records] == mine
            what = "values of the same documents" if same else "documents"
            raise make_error(
                "E112",
                f"another writer of this plan stored other {what} as shard {receipt.ordinal}: let one writer of a "
                "plan be at work, with one set of inputs, and run again; or run `kvformat clean` and start again",
                path=self._remote.path(name),
            )
        return first

    def remove(self, num_shards: int) -> None:
        """Remove plan and receipts of so many shards. What is not removed is no harm: see `kvformat status`."""
        names = [self._plan_name, *(self.name(ordinal) for ordinal in reversed(range(num_shards)))]
        with contextlib.suppress(KVFormatError):
            side_by_side(self._remote.delete, names)

    def _confirmed(self, ordinal: int) -> Receipt | None:
        """A receipt, whose shard was found to be there."""
        receipt = self.read(ordinal)
        if receipt is None:
            return None
        name = shard_path(ordinal, bytes.fromhex(receipt.sha256))
        found = self._remote.stat(name)
        if found is not None and found.nbytes != receipt.size:
            found = self._remote.stat(name)  # the page of a proxy has a size as well
        if found is None or found.nbytes != receipt.size:
            what = "is missing" if found is None else f"has {found.nbytes} bytes"
            message = f"the shard {what}, expected {receipt.size} bytes: run `kvformat clean` and start again"
            raise make_error("E116", message, path=self._remote.path(name))
        return receipt


def kept_plans(objects: Iterable[Stat]) -> Kept:
    """Sort what was listed below ``.staging/``."""
    plans: dict[str, list[tuple[int, Stat, re.Match[str]]]] = {}
    probes = []
    others = []
    for found in sorted(objects):
        if (match := _NAME.fullmatch(found.name)) is not None:
            place = 2 if match["head"] else 0 if match["receipt"] else 1
            plans.setdefault(match[1], []).append((place, found, match))
        elif _PROBE.fullmatch(found.name):
            probes.append(found)
        else:
            others.append(found.name)
    kept = []
    for digest, members in plans.items():
        members.sort(key=lambda member: member[0])
        kept.append(
            KeptPlan(
                digest=digest,
                shared=any(match["head"] != "plan" and place for place, _, match in members),
                ordinals=tuple(int(match["receipt"]) for place, _, match in members if place == 0),
                objects=tuple(stat for _, stat, _ in members),
            )
        )
    return Kept(tuple(kept), tuple(probes), tuple(others))
