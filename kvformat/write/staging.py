"""The staging directory of one writer: plan, lease, shards in work, receipts. And what all staging has in common."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical
from kvformat.spec.paths import STAGING
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.local_write import LocalFiles

__all__ = [
    "COVERED",
    "Plan",
    "Receipt",
    "SkippedDocument",
    "StagedRecord",
    "Staging",
    "is_shared",
    "place_file",
    "remove_staging",
    "staged_files",
    "stagings",
]

COVERED = "files"
"""Directory of the covered files, in staging that workers share."""

# A writer's; what workers share; a copy's, by the dataset id.
_DIRECTORY = re.compile(r"[0-9a-f]{16}-(?:[0-9a-f]{8}|workers)|copy-[0-9a-f]{16}")
_RECEIPT = re.compile(r"([0-9]{8})\.json")


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two runs must have in common for the second to continue the first."""

    context: str
    header_size: int
    schema: str
    shard_nbytes: int
    shard_slots: int
    tag: str
    version: str

    @property
    def digest(self) -> str:
        """First 16 digits of the SHA-256 of the plan."""
        return hashlib.sha256(canonical.encode(self)).hexdigest()[:16]


class StagedRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record of a finished shard; digests in hexadecimal."""

    dims: tuple[int, ...]
    document: str
    record_sum: str


class SkippedDocument(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A planned document that is not stored, and why; its digest in hexadecimal."""

    document: str
    reason: str


class Receipt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A finished, durable shard.

    Where all documents of a plan's shard were skipped, there is a receipt without records, and no shard: its size is
    0, its digest that of no bytes.

    Attributes
    ----------
    skipped
        Documents of the plan that are not in it, in the plan's order.
    """

    ordinal: int
    records: tuple[StagedRecord, ...]
    sha256: str
    size: int
    skipped: tuple[SkippedDocument, ...] = ()

    @classmethod
    def without_records(cls, ordinal: int, skipped: Sequence[SkippedDocument]) -> Receipt:
        """Of a shard all of whose documents were skipped."""
        nothing = hashlib.sha256().hexdigest()
        return cls(ordinal=ordinal, records=(), sha256=nothing, size=0, skipped=tuple(skipped))

    @property
    def is_empty(self) -> bool:
        """Whether there is no shard, as no document of it is stored."""
        return not self.records

    def encode(self) -> bytes:
        """Canonical JSON: integers and hexadecimal digits, members in order. The general encoder is slow at that."""
        return msgspec.json.encode(self)


class Staging:
    """A staging directory this process holds the lease of."""

    def __init__(self, files: LocalFiles, path: Path, lease: DirectoryLease) -> None:
        self._files = files
        self.path = path
        self._lease = lease

    @classmethod
    def create(cls, files: LocalFiles, root: Path, plan: Plan) -> Staging:
        """Make a new staging directory below ``root``, which exists; none is left where that fails.

        Raises
        ------
        DamageError
            E002 where another writer removed a directory meanwhile that seemed to be there.
        """
        parent = root / STAGING
        path = parent / f"{plan.digest}-{secrets.token_hex(4)}"
        lease = None
        try:
            files.make_dir(parent)
            files.make_dir(path)
            lease = DirectoryLease.take(path)
            if lease is None:
                raise make_error("E117", "another writer took this staging directory", path=path)
            files.create_file(path / "plan.json", canonical.encode(plan))
            for folder in (path, parent, root):
                files.sync_dir(folder)
        except BaseException:
            if lease is not None:
                with contextlib.suppress(KVFormatError):
                    files.unlink(path / "plan.json")
                lease.release()
            files.remove_dir(path)
            files.remove_dir(parent)
            raise
        return cls(files, path, lease)

    @classmethod
    def resume(cls, files: LocalFiles, root: Path, plan: Plan) -> Staging | None:
        """Take over the staging directory of an interrupted writer with the same plan: the one that got furthest.

        Raises
        ------
        ConflictError
            E117 where the only ones belong to live writers.
        """
        candidates = sorted(
            (path for path in stagings(root) if path.name.startswith(plan.digest) and (path / "plan.json").exists()),
            key=lambda path: (-len(list(path.glob("*.json"))), path.name),
        )
        for path in candidates:
            lease = DirectoryLease.take(path)
            if lease is not None:
                return cls(files, path, lease)
        if candidates:
            raise make_error(
                "E117", "another writer of the same plan is at work: wait for it, or stop it", path=candidates[0]
            )
        return None

    def shard(self, ordinal: int) -> Path:
        """Path of a shard in work or finished."""
        return self.path / f"{ordinal:08d}.shard"

    def receipts(self) -> list[Receipt]:
        """Receipts of the finished shards from 0 on without a gap; what stands beyond is removed."""
        found: dict[int, Receipt] = {}
        names = sorted(path.name for path in self.path.iterdir())
        for name in names:
            match = _RECEIPT.fullmatch(name)
            if match is None:
                continue
            found[int(match[1])] = _read_receipt(self.path / name, int(match[1]))
        kept: list[Receipt] = []
        while len(kept) in found:
            receipt = found[len(kept)]
            shard = self.shard(len(kept))
            if not shard.exists():  # of two entries not yet synced a crash may keep the receipt's alone
                break
            if shard.stat().st_size != receipt.size:
                raise make_error(
                    "E116", f"expected {receipt.size} bytes as the receipt states: run `kvformat clean`", path=shard
                )
            kept.append(receipt)
        keep = {"plan.json"} | {f"{n:08d}.{suffix}" for n in range(len(kept)) for suffix in ("json", "shard")}
        left = [name for name in names if name not in keep]
        for name in left:
            self._files.unlink(self.path / name)
        if left:  # durably, before their names are used again: else a crash may pair a new receipt with an old shard
            self._files.sync_dir(self.path)
        return kept

    def add_receipt(self, receipt: Receipt) -> None:
        """Make a receipt durable. It appears whole or not at all."""
        self.add_file(f"{receipt.ordinal:08d}.json", receipt.encode())

    def add_file(self, name: str, data: bytes) -> Path:
        """Create a durable file in staging under its final name; one that is there already must be equal."""
        target = self.path / name
        fresh = place_file(self._files, target, data)
        if not fresh and target.read_bytes() != data:
            raise make_error(
                "E116", "a staged file with this name has other content: run `kvformat clean`", path=target
            )
        return target

    def release(self) -> None:
        """Give the lease back and leave the files for a later run."""
        self._lease.release()

    def remove(self) -> None:
        """Remove everything in staging, and staging itself where it is empty then."""
        try:
            remove_staging(self._files, self.path)
        finally:
            self._lease.release()
        self._files.remove_dir(self.path.parent)


def _read_receipt(path: Path, ordinal: int) -> Receipt:
    with translated(path):
        data = path.read_bytes()
    try:
        receipt = canonical.convert(canonical.decode(data), Receipt)
    except KVFormatError as error:
        raise make_error("E116", f"a damaged receipt ({error.message}): run `kvformat clean`", path=path) from None
    if receipt.ordinal != ordinal or not receipt.records:
        raise make_error("E116", "not the receipt of this shard: run `kvformat clean`", path=path)
    return receipt


def place_file(files: LocalFiles, target: Path, data: bytes, *, token: str | None = None) -> bool:
    """Create a durable file, which appears whole or not at all; False where one is there, which is left as it is.

    Parameters
    ----------
    token
        8 hexadecimal digits that tell whose the draft is; random ones without it.
    """
    draft = target.with_name(f"{target.name}.{token or secrets.token_hex(4)}.part")
    try:
        files.create_file(draft, data)
        fresh = files.link(draft, target)
    except KVFormatError:
        with contextlib.suppress(KVFormatError):  # what went wrong first is what the caller must see
            files.unlink(draft)
        raise
    files.unlink(draft)
    files.sync_dir(target.parent)
    return fresh


def is_shared(path: Path) -> bool:
    """Whether a staging directory is one that workers share."""
    return path.name.endswith("-workers")


def stagings(root: Path) -> list[Path]:
    """Staging directories below a root, of writers and of copies, sorted."""
    parent = root / STAGING
    if not parent.is_dir() or parent.is_symlink():
        return []
    with translated(parent):
        return sorted(
            path
            for path in parent.iterdir()
            if _DIRECTORY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )


def staged_files(path: Path) -> Iterator[Path]:
    """Everything in a staging directory, covered files included; what goes meanwhile is left out."""
    for folder in (path, path / COVERED) if is_shared(path) else (path,):
        if folder.is_symlink():
            continue
        with translated(folder), contextlib.suppress(FileNotFoundError):
            yield from sorted(entry for entry in folder.iterdir() if entry.is_symlink() or not entry.is_dir())


def remove_staging(files: LocalFiles, path: Path) -> int:
    """Remove the files of one staging directory and the directory; returns the bytes that were in them."""
    freed = 0
    for entry in staged_files(path):
        with contextlib.suppress(FileNotFoundError):
            freed += entry.lstat().st_size
        files.unlink(entry)
    if is_shared(path):
        files.remove_dir(path / COVERED)
    files.remove_dir(path)
    return freed
