"""What workers share in a local directory, or one of a file system all of their machines mount."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.spec.manifest import Manifest
from kvformat.spec.paths import ROOT, STAGING, shard_path
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease, HeldFile
from kvformat.storage.local_write import LocalFiles
from kvformat.write.folders import Folders
from kvformat.write.found import FoundRun
from kvformat.write.joining import join
from kvformat.write.local_run import LocalRun
from kvformat.write.local_shards import LocalShards, shard_name
from kvformat.write.local_workers import find_runs, workers_in
from kvformat.write.rows import EncodedPart
from kvformat.write.run import RunIdentity, SameFile
from kvformat.write.seal import publish
from kvformat.write.staging import place_file, remove_staging
from kvformat.write.sweeping import sweep
from kvformat.write.worker_state import Worker, WorkerState, is_alive, is_loading

__all__ = ["LocalShared"]


class LocalShared(LocalShards):
    """A :class:`~kvformat.write.shared.Shared` that is a directory in ``.staging``, with a shared lease on it."""

    def __init__(
        self, files: LocalFiles, root: Path, path: Path, lease: DirectoryLease, folders: Folders, state: WorkerState
    ) -> None:
        super().__init__(files, path, state.token)
        self._root = root
        self._lease = lease
        self._folders = folders
        self._said = HeldFile(path / state.name)
        self._saying = threading.Lock()
        self._written = LocalRun(files, path, state.token)
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
            shared.run, shared.covered = shared._written.agree(run, covered, same_file)
        except BaseException:
            with contextlib.suppress(KVFormatError, OSError):  # the first failure says more
                shared.remove(unpublished=True)
            raise
        return shared

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
            shards=[(self._path / shard_name(o, sha256.hex()), shard_path(o, sha256)) for o, sha256 in shards],
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
        # The lease does not tell of other machines everywhere. Who only loads a model needs none of this.
        if any(is_alive(worker) and not is_loading(worker.state) for worker in self.workers()):
            return False
        if (self._root / ROOT).exists():
            return True
        own = self._written.began or not (self._path / "run.json").exists()
        return unpublished and own and not self.ordinals()
