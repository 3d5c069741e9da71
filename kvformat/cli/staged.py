"""What lies in staging directories, looked at without changing it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct

from kvformat.errors import KVFormatError
from kvformat.spec import canonical
from kvformat.spec.paths import STAGING
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease
from kvformat.write.staging import Plan, Receipt, stagings

__all__ = ["StagedWork", "any_finished", "directories", "is_directory", "look", "look_all", "others"]

State = Literal["live", "abandoned", "unknown"]
T = TypeVar("T", Plan, Receipt)
_RECEIPT = re.compile(r"[0-9]{8}\.json")


class StagedWork(Struct, frozen=True, kw_only=True):
    """One staging directory, or what an object store keeps of one plan.

    Attributes
    ----------
    plan
        What was to be written; None where it cannot be read.
    shards, records, nbytes
        What is finished: shards with a receipt, their records and bytes.
    total_nbytes
        Bytes of everything in the directory.
    state
        ``live`` while a writer holds it; ``unknown`` on file systems without leases, and in object stores.
    """

    path: str
    plan: Plan | None
    shards: int
    records: int
    nbytes: int
    total_nbytes: int
    state: State


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


def look(path: Path) -> StagedWork | None:
    """Describe a staging directory; None where it is gone meanwhile."""
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


def look_all(root: Path) -> Iterator[StagedWork]:
    """Describe all staging directories below a dataset's directory."""
    for path in directories(root):
        found = look(path)
        if found is not None:
            yield found


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return canonical.convert(canonical.decode(path.read_bytes()), kind)
    except (KVFormatError, OSError):  # unfinished or damaged: shown as absent, refused by the writer that resumes
        return None
