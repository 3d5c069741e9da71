"""Where a dataset goes: what a writer asks of a directory and of an object store alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest
from kvformat.storage.local_write import LocalFiles
from kvformat.write.rows import EncodedPart
from kvformat.write.staging import Plan, Receipt

__all__ = ["Stage", "Target"]


class Stage(Protocol):
    """The work of one writer at a target: shards in work, and the receipts of finished ones."""

    def shard(self, ordinal: int) -> Path:
        """Local path of a shard in work."""

    def add_receipt(self, receipt: Receipt) -> None:
        """Note that a shard is complete at its local path. Called by helper threads."""

    def deliver(self, receipt: Receipt) -> Receipt:
        """Bring a complete shard to where a later run finds it; returns the receipt that counts.

        Called by helper threads, with ascending ordinals.
        """

    def receipts(self) -> list[Receipt]:
        """Receipts of the shards an interrupted run of the same plan finished, from 0 on without a gap."""

    def check(self, receipt: Receipt) -> Receipt:
        """Look at one of those shards again. Called by helper threads."""

    def stop(self, after: int = -1) -> None:
        """Let what :meth:`deliver` has in work beyond this shard fail soon: nobody waits for it any more."""

    def publish(
        self,
        *,
        receipts: Sequence[Receipt],
        parts: Sequence[EncodedPart],
        covered: Mapping[str, bytes],
        manifest: Manifest,
        undo: bool,
    ) -> bytes:
        """Publish the dataset whose shards were delivered; returns the bytes of its root.

        Parameters
        ----------
        undo
            Remove what this made, where that can be told, when it fails.

        Raises
        ------
        ConflictError
            E113 where another writer published something else meanwhile.
        """

    def release(self) -> None:
        """End this writer's work; what a later run can continue stays."""

    def remove(self) -> None:
        """End this writer's work; nothing of it stays."""


class Target(Protocol):
    """Where a dataset goes."""

    @property
    def place(self) -> Path | str:
        """Path or URL, for messages."""

    @property
    def files(self) -> LocalFiles:
        """By which shards in work are written."""

    def require_free(self) -> None:
        """E100 where a dataset is there already."""

    def stage(self, plan: Plan, layout: Layout, *, resume: bool) -> Stage:
        """Begin, or continue what an interrupted run of the same plan left.

        Raises
        ------
        ConflictError
            E117 where what there is to resume belongs to a live writer.
        StorageError
            E207 where nothing can be written there, E209 where an object store cannot commit.
        """

    def remove(self) -> None:
        """Remove what was made of the way to the place, as far as it is empty."""

    def close(self) -> None:
        """Let go of the target. More than once is harmless."""
