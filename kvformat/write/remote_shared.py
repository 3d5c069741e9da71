"""What workers share in an object store: shards under their final names, and everything else below ``.staging/``."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvformat.errors import KVFormatError, KVFormatWarning, make_error
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import CoveredFile, Manifest
from kvformat.spec.paths import STAGING, shard_path
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.storage.store import StoreFault
from kvformat.write.at_work import at_work
from kvformat.write.found import FoundRun
from kvformat.write.parallel import side_by_side
from kvformat.write.remote_dead import forget_dead, sweep_dead
from kvformat.write.remote_publish import publish_objects, read_root
from kvformat.write.remote_receipts import MAX_RECEIPT_NBYTES
from kvformat.write.remote_workers import RUN_NBYTES, find_runs, list_or_none, workers_of
from kvformat.write.rows import EncodedPart
from kvformat.write.run import RunIdentity, SameFile
from kvformat.write.run_files import agree_on_files
from kvformat.write.spool import Spool
from kvformat.write.staging import COVERED, Receipt
from kvformat.write.worker_state import SAID_EVERY_S, Worker, WorkerState, is_alive, is_loading

__all__ = ["RemoteShared"]

_PATIENCE_S = 10.0
_SAY_TIMEOUT_S = 10.0
_MISSED_S = 3 * SAID_EVERY_S
_RECEIPT = re.compile(r".*/([0-9]{8})\.json")


class RemoteShared:
    """A :class:`~kvformat.write.shared.Shared` below ``.staging/<key>/``, with a spool directory on this machine."""

    def __init__(self, remote: Remote, base: Path, spool: Spool, key: str, state: WorkerState) -> None:
        self._remote = remote
        self._base = base
        self._spool = spool
        self._key = key
        self._state = f"{STAGING}/{key}/{state.name}"
        self._saying = threading.Lock()
        self._left = False
        self._began = False
        self._stopped = False
        self._patience: threading.Timer | None = None
        self.run: RunIdentity
        self.covered: Mapping[str, bytes]

    @classmethod
    def open(
        cls,
        remote: Remote,
        run: RunIdentity,
        covered: Mapping[str, bytes],
        state: WorkerState,
        *,
        base: Path,
        files: LocalFiles,
        same_file: SameFile | None = None,
    ) -> RemoteShared:
        """Join the workers of a run at a URL, or begin it.

        Parameters
        ----------
        base
            Local directory, below which shards wait for their upload.

        Raises
        ------
        IdentityError
            E120 where the run that is staged is another one.
        DamageError
            E116 where it cannot be read.
        StorageError
            E209 where the store replaces what is there, E203, E207, E208; E200, E207 of the spool.
        """
        remote.require_create(f"{STAGING}/")
        forgotten = forget_dead(remote, base)
        spool = Spool.create(files, base, remote.url, run.key, worker=state, forgotten=forgotten)
        shared = cls(remote, base, spool, run.key, state)
        try:
            shared.say(state)
            shared._agree(run, covered, same_file)
        except BaseException:
            with contextlib.suppress(KVFormatError, OSError):  # the first failure says more
                shared.remove(unpublished=True)
            raise
        return shared

    @property
    def place(self) -> str:
        """The URL."""
        return self._remote.path(f"{STAGING}/{self._key}")

    @property
    def files(self) -> LocalFiles:
        """By which the spool is written."""
        return self._spool.files

    # -- shards and receipts ---------------------------------------------------------------------------------------

    def part(self, ordinal: int) -> Path:
        """See :class:`~kvformat.write.shared.Shared`."""
        return self._spool.shard(ordinal)

    def keep(self, path: Path, receipt: Receipt) -> None:
        """Upload a shard to its final name, and remove it from the spool."""

        def go_on(_nbytes: int = 0) -> None:
            if self._stopped:
                raise make_error("E115", "the worker was stopped before this shard was uploaded", path=path)

        go_on()
        if receipt.is_empty:
            return
        self._remote.put_file(_shard_name(receipt), path, progress=go_on)
        self._spool.drop(receipt.ordinal)

    def drop(self, receipt: Receipt) -> None:
        """Another worker may rely on it: what is under a final name is never removed."""

    def ordinals(self) -> frozenset[int]:
        """With one listing; where the store does not list, with a request for each."""
        listed = list_or_none(self._remote, f"{STAGING}/{self._key}/")
        if listed is not None:
            matches = (_RECEIPT.fullmatch(stat.name) for stat in listed)
            return frozenset(int(match[1]) for match in matches if match is not None)
        every = range(self.run.num_shards)
        there = side_by_side(lambda ordinal: self._remote.stat(self._receipt(ordinal)), every)
        return frozenset(ordinal for ordinal, stat in zip(every, there, strict=True) if stat is not None)

    def read(self, ordinal: int) -> bytes | None:
        """See :class:`~kvformat.write.shared.Shared`."""
        return self._read(self._receipt(ordinal), max_nbytes=MAX_RECEIPT_NBYTES)

    def create(self, ordinal: int, data: bytes) -> bool:
        """See :class:`~kvformat.write.shared.Shared`."""
        return self._remote.create(self._receipt(ordinal), data)

    def sizes(self) -> Mapping[str, int]:
        """With one listing; nothing where the store does not list."""
        return {stat.name: stat.nbytes for stat in list_or_none(self._remote, "shards/") or ()}

    def fault(self, receipt: Receipt, layout: Layout, *, whole: bool) -> str | None:  # noqa: ARG002 -- no transfer
        """See :class:`~kvformat.write.shared.Shared`."""
        if receipt.is_empty:
            return None
        name = _shard_name(receipt)
        found = self._remote.stat(name)
        if found is not None and found.nbytes != receipt.size:
            found = self._remote.stat(name)  # the page of a proxy has a size as well
        if found is None:
            return "the shard is missing"
        return None if found.nbytes == receipt.size else f"the shard has {found.nbytes} bytes, not {receipt.size}"

    def set_aside(self, ordinal: int, data: bytes, receipt: Receipt | None) -> None:  # noqa: ARG002 -- final names
        """Remove the receipt; the shard has its final name, and stays.

        A store has no conditional removal: in the worst case another worker's new receipt goes too, and its shard
        counts as missing once more.
        """
        if self.read(ordinal) == data:
            self._remote.delete(self._receipt(ordinal))

    # -- workers ---------------------------------------------------------------------------------------------------

    def say(self, state: WorkerState) -> None:
        """See :class:`~kvformat.write.shared.Shared`. One attempt: there will be news soon."""
        with self._saying, contextlib.suppress(StoreFault, KVFormatError):
            if not self._left:
                self._spool.touch()
                self._remote.store.put(self._state, state.encode(), timeout_s=_SAY_TIMEOUT_S)

    def workers(self) -> list[Worker]:
        """See :class:`~kvformat.write.shared.Shared`."""
        listed = list_or_none(self._remote, f"{STAGING}/{self._key}/") or ()
        return workers_of(self._remote, self._key, [stat.name for stat in listed], base=self._base)

    def found(self) -> list[FoundRun]:
        """See :class:`~kvformat.write.shared.Shared`."""
        return find_runs(self._remote, base=self._base)

    # -- publishing ------------------------------------------------------------------------------------------------

    def root(self) -> bytes | None:
        """See :class:`~kvformat.write.shared.Shared`."""
        return read_root(self._remote)

    def publish(
        self,
        *,
        shards: Sequence[tuple[int, bytes]],  # noqa: ARG002 -- they have their final names
        parts: Sequence[EncodedPart],
        covered: Mapping[str, bytes],
        manifest: Manifest,
    ) -> bytes:
        """See :class:`~kvformat.write.shared.Shared`; errors as for :func:`publish_objects`."""
        return publish_objects(self._remote, self._spool, parts=parts, covered=covered, manifest=manifest)

    def stop(self) -> None:
        """Let uploads fail; where the store does not answer, what is under way is given up after some seconds."""
        self._stopped = True
        if self._patience is None:
            self._patience = threading.Timer(_PATIENCE_S, self._remote.close)
            self._patience.daemon = True
            self._patience.start()

    def leave(self) -> None:
        """See :class:`~kvformat.write.shared.Shared`."""
        if self._patience is not None:
            self._patience.cancel()
        with self._saying:
            left, self._left = self._left, True
        if not left:
            try:
                self._spool.remove()
            finally:
                with contextlib.suppress(KVFormatError):  # it goes stale
                    self._remote.delete(self._state)

    def remove(self, *, unpublished: bool = False) -> None:
        """See :class:`~kvformat.write.shared.Shared`. The run goes last: cut short, others find what is left."""
        self.leave()
        sweep_dead(self._remote, self._base, self.files)
        prefix = f"{STAGING}/{self._key}/"
        listed = list_or_none(self._remote, prefix)
        if listed is None:
            names = [self._receipt(ordinal) for ordinal in range(self.run.num_shards)]
            names += [f"{prefix}{COVERED}/{file.sha256}" for file in self.run.files]
        else:
            names = [stat.name for stat in listed]
            workers = workers_of(self._remote, self._key, names, base=self._base)
            others = [worker for worker in workers if is_alive(worker) and not is_loading(worker.state)]
            if others:
                self._warn_of_silent(others)
                return
        run = f"{prefix}run.json"
        empty = (self._began or run not in names) and not any(_RECEIPT.fullmatch(name) for name in names)
        if self.root() is None and not (unpublished and empty):
            return
        side_by_side(self._remote.delete, [name for name in names if name != run])
        self._remote.delete(run)

    # -- within ----------------------------------------------------------------------------------------------------

    def _warn_of_silent(self, others: list[Worker]) -> None:
        """W002 where something is published, and nobody was heard of lately who would remove the rest."""
        now = time.time()
        heard = any(one.liveness == "live" or now - one.state.updated <= _MISSED_S for one in others)
        if not heard and self.root() is not None:
            message = f"published, but staged work stays: {at_work(others, now=now, then='run `kvformat clean`')}"
            warnings.warn(KVFormatWarning(message, code="W002", path=self.place), stacklevel=2)

    def _receipt(self, ordinal: int) -> str:
        return f"{STAGING}/{self._key}/{ordinal:08d}.json"

    def _read(self, name: str, **limit: int) -> bytes | None:
        try:
            return self._remote.read(name, **limit)
        except KVFormatError as error:
            if error.code == "E002":
                return None
            raise

    def _agree(self, run: RunIdentity, covered: Mapping[str, bytes], same_file: SameFile | None) -> None:
        """Write down the run and its covered files, or find that those that are there agree."""
        name = f"{STAGING}/{self._key}/run.json"
        path = self._remote.path(name)
        data = self._read(name, max_nbytes=RUN_NBYTES)
        if data is None:
            for file in run.files:  # before whoever reads of them can look for them
                self._store(self._file(file), covered[file.name])
            self._began = self._remote.create(name, run.encode())
            data = self._read(name, max_nbytes=RUN_NBYTES)
            if data is None:
                raise make_error("E002", "the staging was removed: start again", path=path)
        first = RunIdentity.decode(data, path=path)
        self.run, self.covered = agree_on_files(
            first, run, covered, lambda file: self._read(self._file(file), nbytes=file.size), same_file, path
        )

    def _store(self, name: str, data: bytes) -> None:
        if len(data) <= self._remote.options.request_nbytes:
            self._remote.put(name, data)
        else:
            with self._spool.part(data) as path:
                self._remote.put_file(name, path)

    def _file(self, file: CoveredFile) -> str:
        return f"{STAGING}/{self._key}/{COVERED}/{file.sha256}"


def _shard_name(receipt: Receipt) -> str:
    return shard_path(receipt.ordinal, bytes.fromhex(receipt.sha256))
