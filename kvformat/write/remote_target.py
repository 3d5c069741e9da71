"""A dataset that goes to an object store: every finished shard to its final name at once, the root last."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvformat.errors import make_error
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest
from kvformat.spec.paths import STAGING, shard_path
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.write.remote_publish import publish_objects, read_root
from kvformat.write.remote_receipts import RemoteReceipts
from kvformat.write.rows import EncodedPart
from kvformat.write.spool import Spool, SpoolFiles
from kvformat.write.staging import Plan, Receipt

__all__ = ["RemoteStage", "RemoteTarget"]

_PATIENCE_S = 10.0


class RemoteTarget:
    """A :class:`~kvformat.write.target.Target` that is a URL of an object store.

    Parameters
    ----------
    spool
        Local directory, below which shards wait for their upload.
    keep_open
        Leave the client to the caller.
    """

    def __init__(
        self, remote: Remote, spool: Path, *, files: LocalFiles | None = None, keep_open: bool = False
    ) -> None:
        self._remote = remote
        self._spool = spool
        self._files = files or SpoolFiles()
        self._keep_open = keep_open

    @property
    def place(self) -> str:
        """The URL."""
        return self._remote.path("")

    @property
    def files(self) -> LocalFiles:
        """By which the spool is written."""
        return self._files

    def require_free(self) -> None:
        """E100 where a dataset is there already."""
        if read_root(self._remote) is not None:
            raise make_error("E100", "a dataset is here already; choose another location", path=self.place)

    def stage(self, plan: Plan, layout: Layout, *, resume: bool) -> RemoteStage:  # noqa: ARG002 -- for a directory
        """Prove that the store can commit, and make a spool directory.

        Raises
        ------
        StorageError
            E209 where the store replaces what is there, E207 where it may not be written to; E200, E207 of the spool.
        """
        self._remote.require_create(f"{STAGING}/")
        receipts = RemoteReceipts(self._remote, plan.digest) if resume else None
        spool = Spool.create(self._files, self._spool, self._remote.url, plan.digest)
        return RemoteStage(self._remote, spool, plan, receipts)

    def remove(self) -> None:
        """Nothing was made of the way."""

    def close(self) -> None:
        """Let go of the client."""
        if not self._keep_open:
            self._remote.close()


class RemoteStage:
    """A :class:`~kvformat.write.target.Stage`: a spool directory, and receipts in the store where runs resume.

    Shards are uploaded side by side; their receipts are made in order, so that an interrupt leaves no gap.
    """

    def __init__(self, remote: Remote, spool: Spool, plan: Plan, receipts: RemoteReceipts | None) -> None:
        self._remote = remote
        self._spool = spool
        self._plan = plan
        self._receipts = receipts
        self._turn = threading.Condition()
        self._noted = 0
        self._last: int | None = None
        self._patience: threading.Timer | None = None
        self.path = spool.path

    def shard(self, ordinal: int) -> Path:
        """Path of a shard in the spool."""
        return self._spool.shard(ordinal)

    def add_receipt(self, receipt: Receipt) -> None:
        """Nothing is noted of a shard before it is uploaded."""

    def deliver(self, receipt: Receipt) -> Receipt:
        """Upload a shard, remove it from the spool, and note that it is there.

        Raises
        ------
        ConflictError
            E112, E113 where another writer stored something else in its place.
        StorageError
            Of the upload.
        """
        ordinal = receipt.ordinal

        def stopped() -> bool:
            return self._last is not None and ordinal > self._last

        def go_on(_nbytes: int = 0) -> None:
            if stopped():
                raise make_error("E115", "the writer was stopped before this shard was uploaded", path=self.path)

        go_on()
        name = shard_path(ordinal, bytes.fromhex(receipt.sha256))
        self._remote.put_file(name, self.shard(ordinal), progress=go_on)
        self._spool.drop(ordinal)
        if self._receipts is None:
            return receipt
        with self._turn:
            self._turn.wait_for(lambda: self._noted == ordinal or stopped())
        go_on()
        if ordinal == 0:
            self._receipts.begin(self._plan)
        counts = self._receipts.add(receipt)
        with self._turn:
            self._noted = ordinal + 1
            self._turn.notify_all()
        return counts

    def receipts(self) -> list[Receipt]:
        """As for :meth:`RemoteReceipts.read_all`; none where this run does not resume."""
        if self._receipts is None:
            return []
        found = self._receipts.read_all()
        if found:
            self._receipts.begin(self._plan)
        self._noted = len(found)
        return found

    def check(self, receipt: Receipt) -> Receipt:
        """The shard was found when its receipt was read."""
        return receipt

    def stop(self, after: int = -1) -> None:
        """Let the shards beyond ``after`` fail as soon as a part of them is uploaded.

        Where all are stopped, and the store does not answer, what is under way is given up after some seconds.
        """
        with self._turn:
            self._last = after if self._last is None else min(self._last, after)
            self._turn.notify_all()
            if after < 0 and self._patience is None:
                self._patience = threading.Timer(_PATIENCE_S, self._remote.close)
                self._patience.daemon = True
                self._patience.start()

    def publish(
        self,
        *,
        receipts: Sequence[Receipt],  # noqa: ARG002 -- the shards have their final names
        parts: Sequence[EncodedPart],
        covered: Mapping[str, bytes],
        manifest: Manifest,
        undo: bool,  # noqa: ARG002 -- what others may rely on is never removed
    ) -> bytes:
        """As for :func:`kvformat.write.remote_publish.publish_objects`."""
        return publish_objects(self._remote, self._spool, parts=parts, covered=covered, manifest=manifest)

    def release(self) -> None:
        """Remove the spool; shards and receipts stay in the store."""
        self._end()

    def remove(self) -> None:
        """Remove the spool and the receipts; shards are never removed."""
        try:
            self._end()
        finally:
            if self._receipts is not None:
                self._receipts.remove(self._noted)

    def _end(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._spool.remove()
