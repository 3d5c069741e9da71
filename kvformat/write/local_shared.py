"""What workers share in a local directory, or one of a file system all of their machines mount."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import CoveredFile, Manifest
from kvformat.spec.paths import ROOT, STAGING, shard_path
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease, HeldFile, exclusive
from kvformat.storage.local_write import LocalFiles
from kvformat.write.folders import Folders
from kvformat.write.joining import join
from kvformat.write.local_workers import find_runs, workers_in
from kvformat.write.recheck import check_shard
from kvformat.write.rows import EncodedPart
from kvformat.write.run import RunIdentity, SameFile
from kvformat.write.run_files import agree_on_files
from kvformat.write.seal import publish
from kvformat.write.shard import hash_file
from kvformat.write.shared import FoundRun
from kvformat.write.staging import COVERED, Receipt, place_file, remove_staging
from kvformat.write.sweeping import sweep
from kvformat.write.worker_state import Worker, WorkerState, is_alive

__all__ = ["LocalShared"]

_BUSY_TIMEOUT_S = 60.0
_RECEIPT = re.compile(r"([0-9]{8})\.json")
_SHARD = re.compile(r"([0-9]{8})(?:-[0-9a-f]{16}\.shard|\.skipped)")
"""A shard; or what stands in its place where all of its documents were skipped."""


class LocalShared:
    """A :class:`~kvformat.write.shared.Shared` that is a directory in ``.staging``, with a shared lease on it."""

    def __init__(
        self, files: LocalFiles, root: Path, path: Path, lease: DirectoryLease, folders: Folders, state: WorkerState
    ) -> None:
        self._files = files
        self._root = root
        self._path = path
        self._lease = lease
        self._folders = folders
        self._token = state.token
        self._said = HeldFile(path / state.name)
        self._saying = threading.Lock()
        self._began = False
        self.run: RunIdentity
        self.covered: Mapping[str, bytes]

    @classmethod
    def open(
        cls,
        root: Path,
        run: RunIdentity,
        covered: Mapping[str, bytes],
        state: WorkerState,
        *,
        files: LocalFiles,
        same_file: SameFile | None = None,
    ) -> LocalShared:
        """Join the workers of a run at a dataset's directory, or begin it.

        Raises
        ------
        ConflictError
            E117 where ``kvformat clean`` holds the staging.
        IdentityError
            E120 where the run that is staged is another one.
        DamageError
            E116 where it cannot be read.
        StorageError
            E200, E201, E207.
        """
        path = root / STAGING / f"{run.key}-workers"
        folders = Folders(files)
        lease = join(files, root, path, folders)
        shared = cls(files, root, path, lease, folders, state)
        try:
            shared._said.replace(state.encode())  # loudly: what says nothing may be taken for gone
            sweep(files, path, state.token)
            shared._agree(run, covered, same_file)
        except BaseException:
            with contextlib.suppress(KVFormatError, OSError):  # the first failure says more
                shared.remove(unpublished=True)
            raise
        return shared

    @property
    def place(self) -> Path:
        """The directory."""
        return self._path

    @property
    def files(self) -> LocalFiles:
        """As given."""
        return self._files

    # -- shards and receipts ---------------------------------------------------------------------------------------

    def part(self, ordinal: int) -> Path:
        """See :class:`~kvformat.write.shared.Shared`."""
        return self._path / f"{ordinal:08d}.{self._token}.part"

    def keep(self, path: Path, receipt: Receipt) -> None:
        """Give a shard the name of its content. One of that name that is there already is looked at first."""
        target = self._shard(receipt)
        if receipt.is_empty:
            if not place_file(self._files, target, b"", token=self._token):
                self._files.sync_dir(self._path)  # whoever made it may not have come so far
            return
        while not self._files.link(path, target):
            try:
                if hash_file(target, target).hex() == receipt.sha256:
                    break
                self._rename_bad(target)
            except KVFormatError as error:
                if error.code != "E002":  # gone meanwhile
                    raise
        self._files.sync_dir(self._path)  # before its receipt can be
        self._files.unlink(path)

    def drop(self, receipt: Receipt) -> None:
        """See :class:`~kvformat.write.shared.Shared`."""
        self._files.unlink(self._shard(receipt))

    def ordinals(self) -> frozenset[int]:
        """Receipts with a shard of that ordinal beside them: one without was left by a removal that was cut short.

        Where all documents were skipped, an empty file stands in the place of the shard: no receipt need be read.
        """
        receipts, shards = set(), set()
        with translated(self._path), os.scandir(self._path) as entries:
            for entry in entries:
                if match := _RECEIPT.fullmatch(entry.name):
                    receipts.add(int(match[1]))
                elif match := _SHARD.fullmatch(entry.name):
                    shards.add(int(match[1]))
        return frozenset(receipts & shards)

    def read(self, ordinal: int) -> bytes | None:
        """See :class:`~kvformat.write.shared.Shared`."""
        path = self._receipt(ordinal)
        with translated(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def create(self, ordinal: int, data: bytes) -> bool:
        """See :class:`~kvformat.write.shared.Shared`."""
        return place_file(self._files, self._receipt(ordinal), data, token=self._token)

    def sizes(self) -> Mapping[str, int]:
        """Nothing is cheaper here than to look."""
        return {}

    def fault(self, receipt: Receipt, layout: Layout, *, whole: bool) -> str | None:
        """See :class:`~kvformat.write.shared.Shared`."""
        path = self._shard(receipt)
        if receipt.is_empty:
            with translated(path):
                return None if path.exists() else "what stands in the place of the shard is missing"
        try:
            with translated(path):
                size = path.stat().st_size
            if size != receipt.size:
                return f"the staged shard has {size} bytes, expected {receipt.size}"
            if whole:
                check_shard(path, receipt, layout, header_size=self.run.header_size, version=self.run.version)
        except KVFormatError as error:
            if error.code == "E116":
                return error.message.partition(": run")[0]
            if error.code == "E002":
                return "the staged shard is missing"
            raise
        return None

    def set_aside(self, ordinal: int, data: bytes, receipt: Receipt | None) -> None:
        """Rename a damaged shard, then remove its receipt; what several find damaged, one sets aside."""

        def busy() -> KVFormatError:
            return make_error("E117", f"other workers keep this busy for more than {_BUSY_TIMEOUT_S:.0f} s", path=held)

        held = self._path / COVERED
        with exclusive(held, timeout_s=_BUSY_TIMEOUT_S, refusal=busy):
            if self.read(ordinal) != data:
                return
            if receipt is not None and receipt.is_empty:
                self._files.unlink(self._shard(receipt))
            elif receipt is not None:
                self._rename_bad(self._shard(receipt))
            self._files.unlink(self._receipt(ordinal))
            self._files.sync_dir(self._path)  # before the names are used again

    # -- workers ---------------------------------------------------------------------------------------------------

    def say(self, state: WorkerState) -> None:
        """See :class:`~kvformat.write.shared.Shared`."""
        with self._saying, contextlib.suppress(KVFormatError):
            self._said.replace(state.encode())

    def workers(self) -> list[Worker]:
        """See :class:`~kvformat.write.shared.Shared`."""
        return workers_in(self._path)

    def found(self) -> list[FoundRun]:
        """See :class:`~kvformat.write.shared.Shared`."""
        return find_runs(self._root)

    # -- publishing ------------------------------------------------------------------------------------------------

    def root(self) -> bytes | None:
        """See :class:`~kvformat.write.shared.Shared`."""
        path = self._root / ROOT
        with translated(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def publish(
        self,
        *,
        shards: Sequence[tuple[int, bytes]],
        parts: Sequence[EncodedPart],
        covered: Mapping[str, bytes],
        manifest: Manifest,
    ) -> bytes:
        """See :class:`~kvformat.write.shared.Shared`; errors as for :func:`kvformat.write.seal.publish`."""
        return publish(
            self._files,
            self._root,
            self,
            shards=[(self._path / _shard_name(o, sha256.hex()), shard_path(o, sha256)) for o, sha256 in shards],
            parts=parts,
            covered=covered,
            manifest=manifest,
            undo=False,
        )

    def add_file(self, name: str, data: bytes) -> Path:
        """See :class:`~kvformat.write.seal.Scratch`. What an earlier attempt left damaged is made again."""
        target = self._path / name
        while not place_file(self._files, target, data, token=self._token):
            with translated(target), contextlib.suppress(FileNotFoundError):
                if target.read_bytes() == data:
                    return target
                self._files.unlink(target)
        return target

    def stop(self) -> None:
        """Nothing takes long here."""

    def leave(self) -> None:
        """See :class:`~kvformat.write.shared.Shared`."""
        with self._saying:
            self._said.remove()
        self._lease.release()

    def remove(self, *, unpublished: bool = False) -> None:
        """See :class:`~kvformat.write.shared.Shared`."""
        self.leave()
        try:
            lease = DirectoryLease.take(self._path)
        except KVFormatError as error:
            if error.code != "E002":  # somebody else was the last
                raise
            lease = None
        if lease is not None:
            try:
                if lease.holds(self._path) and self._may_go(unpublished=unpublished):
                    remove_staging(self._files, self._path)
            finally:
                lease.release()
        self._files.remove_dir(self._path.parent)
        if unpublished:
            self._folders.remove()

    # -- within ----------------------------------------------------------------------------------------------------

    def _may_go(self, *, unpublished: bool) -> bool:
        if any(is_alive(worker) for worker in self.workers()):  # the lease does not tell of other machines everywhere
            return False
        if (self._root / ROOT).exists():
            return True
        own = self._began or not (self._path / "run.json").exists()
        return unpublished and own and not self.ordinals()

    def _shard(self, receipt: Receipt) -> Path:
        name = f"{receipt.ordinal:08d}.skipped" if receipt.is_empty else _shard_name(receipt.ordinal, receipt.sha256)
        return self._path / name

    def _receipt(self, ordinal: int) -> Path:
        return self._path / f"{ordinal:08d}.json"

    def _rename_bad(self, path: Path) -> None:
        bad = path.with_name(f"{path.name}.bad")
        try:
            self._files.link(path, bad)
        except KVFormatError as error:
            if error.code != "E002":  # missing, not damaged
                raise
        self._files.unlink(path)

    def _agree(self, run: RunIdentity, covered: Mapping[str, bytes], same_file: SameFile | None) -> None:
        """Write down the run and its covered files, or find that those that are there agree."""
        self._files.make_dir(self._path / COVERED)
        path = self._path / "run.json"
        first = self._written(path)
        if first is None:
            for file in run.files:  # before whoever reads of them can look for them
                self._store(file, covered[file.name])
            self._began = place_file(self._files, path, run.encode(), token=self._token)
            first = self._written(path)
            if first is None:
                raise make_error("E002", "the staging was removed: start again", path=path)
        self.run, self.covered = agree_on_files(first, run, covered, self._stored, same_file, self._path)
        for file in first.files:
            self._store(file, self.covered[file.name])
        for place in (self._path, self._path.parent, self._root):  # a killed worker may not have come so far
            self._files.sync_dir(place)

    def _written(self, path: Path) -> RunIdentity | None:
        with translated(path):
            try:
                return RunIdentity.decode(path.read_bytes(), path=path)
            except FileNotFoundError:
                return None

    def _stored(self, file: CoveredFile) -> bytes | None:
        path = self._path / COVERED / file.sha256
        with translated(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def _store(self, file: CoveredFile, content: bytes) -> None:
        path = self._path / COVERED / file.sha256
        if not place_file(self._files, path, content, token=self._token) and self._stored(file) != content:
            message = "a staged file with this name has other content: run `kvformat clean` and start again"
            raise make_error("E116", message, path=path)


def _shard_name(ordinal: int, sha256: str) -> str:
    return f"{ordinal:08d}-{sha256[:16]}.shard"
