"""The staging directory of one writer: plan, lease, shards in work, receipts."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical
from kvformat.spec.paths import STAGING
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.local_write import LocalFiles

__all__ = ["Plan", "Receipt", "StagedRecord", "Staging", "remove_staging", "stagings"]

_DIRECTORY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}|copy-[0-9a-f]{16}")  # a writer's; a copy's, by the dataset id
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


class Receipt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished, durable shard."""

    ordinal: int
    records: tuple[StagedRecord, ...]
    sha256: str
    size: int

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
        draft = self.path / f"{name}.{secrets.token_hex(4)}.part"
        self._files.create_file(draft, data)
        fresh = self._files.link(draft, target)
        self._files.unlink(draft)
        self._files.sync_dir(self.path)
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


def remove_staging(files: LocalFiles, path: Path) -> int:
    """Remove the files of one staging directory and the directory; returns the bytes that were in them."""
    freed = 0
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        freed += entry.lstat().st_size
        files.unlink(entry)
    files.remove_dir(path)
    return freed
