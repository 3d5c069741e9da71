"""What lies in staging directories, looked at without changing it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct

from kvformat.cli.shared_work import SharedWork, describe, state_of
from kvformat.errors import KVFormatError
from kvformat.spec import canonical
from kvformat.spec.paths import STAGING
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease
from kvformat.write.local_workers import workers_in
from kvformat.write.planned import Planned
from kvformat.write.run import RunIdentity
from kvformat.write.staging import Plan, Receipt, is_shared, staged_files, stagings

__all__ = ["StagedWork", "any_finished", "directories", "is_directory", "look", "look_all", "others"]

State = Literal["live", "abandoned", "unknown"]
T = TypeVar("T", Plan, Receipt)
_RECEIPT = re.compile(r"([0-9]{8})\.json")
_SHARD = re.compile(r"([0-9]{8})(?:-[0-9a-f]{16}\.shard|\.skipped)")


class StagedWork(Struct, frozen=True, kw_only=True):
    """One staging directory, or what an object store keeps of one plan.

    Attributes
    ----------
    plan
        What was to be written; None where it cannot be read, and for what workers share.
    shards, records, nbytes
        What is finished: shards with a receipt, their records and bytes. Records that workers share are counted only
        where their plan is given.
    total_nbytes
        Bytes of everything in the directory.
    state
        ``live`` while a writer holds it; ``unknown`` on file systems without leases, and in object stores.
    shared
        Of work that workers share; None for any other, and where it cannot be read.
    of_plan
        Whether that is of the plan that was given; None without one.
    """

    path: str
    plan: Plan | None
    shards: int
    records: int | None
    nbytes: int
    total_nbytes: int
    state: State
    shared: SharedWork | None = None
    of_plan: bool | None = None


def directories(root: Path) -> list[Path]:
    """The staging directories below a dataset's directory: real ones, not links to them."""
    return [path for path in stagings(root) if is_directory(path)]


def others(root: Path) -> list[Path]:
    """What else lies beside them. No writer of this library made it, and nothing here removes it."""
    parent = root / STAGING
    if not is_directory(parent):
        return [parent] if os.path.lexists(parent) else []
    known = set(directories(root))
    with translated(parent):
        return sorted(path for path in parent.iterdir() if path not in known)


def any_finished(root: Path) -> bool:
    """Whether any staging directory below a root holds a finished shard."""
    for path in directories(root):
        with translated(path):
            if any(_RECEIPT.fullmatch(entry.name) for entry in path.iterdir()):
                return True
    return False


def look(path: Path, planned: Planned | None = None) -> StagedWork | None:
    """Describe a staging directory; None where it is gone meanwhile."""
    if is_shared(path):
        return _look_shared(path, planned)
    try:
        lease = DirectoryLease.take(path)
    except KVFormatError as error:
        if error.code == "E002":
            return None
        raise
    state: State = "live"
    if lease is not None:
        state = "abandoned" if lease.supported else "unknown"
        lease.release()  # at once: a writer that resumes must not be kept out
    plan = None
    shards = records = nbytes = total = 0
    with translated(path):
        for name in sorted(entry.name for entry in path.iterdir()):
            try:
                total += (path / name).lstat().st_size
            except FileNotFoundError:  # a live writer goes on
                continue
            if name == "plan.json":
                plan = _read(path / name, Plan)
            elif _RECEIPT.fullmatch(name):
                receipt = _read(path / name, Receipt)
                if receipt is not None:
                    shards, records, nbytes = shards + 1, records + len(receipt.records), nbytes + receipt.size
    return StagedWork(
        path=str(path),
        plan=plan,
        shards=shards,
        records=records,
        nbytes=nbytes,
        total_nbytes=total,
        state=state,
    )


def is_directory(path: Path) -> bool:
    """Whether a directory itself stands there, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def look_all(root: Path, planned: Planned | None = None) -> Iterator[StagedWork]:
    """Describe all staging directories below a dataset's directory.

    Parameters
    ----------
    planned
        The plan of work that workers share, where it is known.
    """
    for path in directories(root):
        found = look(path, planned)
        if found is not None:
            yield found


def _look_shared(path: Path, planned: Planned | None) -> StagedWork | None:
    """No receipt is read: there may be ten thousand."""
    receipts: set[int] = set()
    shards: dict[int, int] = {}
    total = 0
    for entry in staged_files(path):
        try:
            nbytes = entry.lstat().st_size
        except FileNotFoundError:  # a worker goes on
            continue
        total += nbytes
        if match := _RECEIPT.fullmatch(entry.name):
            receipts.add(int(match[1]))
        elif match := _SHARD.fullmatch(entry.name):
            shards[int(match[1])] = max(nbytes, shards.get(int(match[1]), 0))
    finished = frozenset(receipts & shards.keys())
    nbytes = sum(shards[ordinal] for ordinal in finished)
    try:
        workers = workers_in(path)
        state = _shared_state(path) if not workers else state_of(workers)
        run = RunIdentity.decode((path / "run.json").read_bytes(), path=path)
        shared = describe(run, finished, nbytes, workers, place=path)
    except (KVFormatError, OSError):  # just begun, damaged, or gone
        if not path.is_dir():
            return None
        state, shared, run = "unknown", None, None
    return StagedWork(
        path=str(path),
        plan=None,
        shards=len(finished),
        records=_records(planned, run, finished),
        nbytes=nbytes,
        total_nbytes=total,
        state=state,
        shared=shared,
    )


def _shared_state(path: Path) -> State:
    """What the lease tells where no worker says anything."""
    lease = DirectoryLease.take(path)
    if lease is None:
        return "live"
    lease.release()
    return "abandoned" if lease.supported else "unknown"


def _records(planned: Planned | None, run: RunIdentity | None, finished: frozenset[int]) -> int | None:
    if planned is None or run is None or run.plan != planned.digest:
        return None
    return sum(len(planned.shard(ordinal)) for ordinal in finished)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return canonical.convert(canonical.decode(path.read_bytes()), kind)
    except (KVFormatError, OSError):  # unfinished or damaged: shown as absent, refused by the writer that resumes
        return None
