"""What the workers of a run share, and communicate by alone: a directory, or names in an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest
from kvformat.storage.local_write import LocalFiles
from kvformat.write.found import FoundRun
from kvformat.write.rows import EncodedPart
from kvformat.write.run import RunIdentity
from kvformat.write.staging import Receipt
from kvformat.write.worker_state import Worker, WorkerState

__all__ = ["Shared"]


class Shared(Protocol):
    """Shards in work and finished, receipts, and what workers say of themselves. Safe to use in threads.

    Attributes
    ----------
    run
        Of the worker that began.
    covered
        Its covered files, by label.
    files
        By which shards in work are written.
    """

    run: RunIdentity
    covered: Mapping[str, bytes]

    @property
    def place(self) -> Path | str:
        """Path or URL of the staging, for messages."""

    @property
    def files(self) -> LocalFiles:
        """As described above."""

    def part(self, ordinal: int) -> Path:
        """Local path of this worker's own shard in work."""

    def keep(self, path: Path, receipt: Receipt) -> None:
        """Bring a complete shard from its local path to where it counts. It is durable there when this returns.

        Of a receipt without records there is no shard; what tells so by its name alone is made durable.
        """

    def drop(self, receipt: Receipt) -> None:
        """A kept shard does not count: another worker was faster with other bytes."""

    def ordinals(self) -> frozenset[int]:
        """Shards there is a receipt for."""

    def read(self, ordinal: int) -> bytes | None:
        """The receipt of a shard, as it is stored; None where there is none."""

    def create(self, ordinal: int, data: bytes) -> bool:
        """Store a receipt durably, unless there is one; whether this one counts."""

    def sizes(self) -> Mapping[str, int]:
        """Sizes of kept shards as far as they are cheaply known all at once, by their final name."""

    def fault(self, receipt: Receipt, layout: Layout, *, whole: bool) -> str | None:
        """What is wrong with the shard of a receipt; None where nothing is.

        Parameters
        ----------
        whole
            Whether to read all of it, where that costs no transfer; otherwise its size is compared.
        """

    def set_aside(self, ordinal: int, data: bytes, receipt: Receipt | None) -> None:
        """Remove this very receipt, and put its shard out of the way; another one in its place stays."""

    def say(self, state: WorkerState) -> None:
        """Tell others how this worker gets on. Never fails loudly."""

    def workers(self) -> list[Worker]:
        """What all workers said of themselves, by rank."""

    def found(self) -> list[FoundRun]:
        """All work of this and other runs that is staged at the same location."""

    def root(self) -> bytes | None:
        """The published root; None where there is none yet."""

    def publish(
        self,
        *,
        shards: Sequence[tuple[int, bytes]],
        parts: Sequence[EncodedPart],
        covered: Mapping[str, bytes],
        manifest: Manifest,
    ) -> bytes:
        """Publish kept shards, given by ordinal and SHA-256; returns the bytes of the root.

        Raises
        ------
        ConflictError
            E113 where something else was published meanwhile.
        """

    def stop(self) -> None:
        """Let what :meth:`keep` has in work fail soon."""

    def leave(self) -> None:
        """End this worker's part; the staging stays. More than once is harmless."""

    def remove(self, *, unpublished: bool = False) -> None:
        """End this worker's part, and remove the staging if nobody else is at work in it.

        Parameters
        ----------
        unpublished
            Also where nothing is published, as long as this worker began it and there are no receipts in it.
        """
