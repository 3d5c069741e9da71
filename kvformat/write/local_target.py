"""A dataset that goes to a local directory: staged in it, and linked to its final names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvformat.errors import make_error
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest
from kvformat.spec.paths import ROOT, shard_path
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.write.directory import Directory
from kvformat.write.recheck import check_shard
from kvformat.write.rows import EncodedPart
from kvformat.write.seal import publish
from kvformat.write.staging import Plan, Receipt, Staging

__all__ = ["LocalStage", "LocalTarget"]


class LocalTarget:
    """A :class:`~kvformat.write.target.Target` that is a directory; made where it does not exist."""

    def __init__(self, root: Path, files: LocalFiles) -> None:
        self._root = root
        self._files = files
        self._directory = Directory(files, root)

    @property
    def place(self) -> Path:
        """The directory."""
        return self._root

    @property
    def files(self) -> LocalFiles:
        """As given."""
        return self._files

    def require_free(self) -> None:
        """E100 where a dataset is there already."""
        with translated(self._root):
            if (self._root / ROOT).exists():
                raise make_error("E100", "a dataset is here already; choose another location", path=self._root)

    def stage(self, plan: Plan, layout: Layout, *, resume: bool) -> LocalStage:
        """A staging directory of the plan; errors as for :meth:`Directory.stage`."""
        staging, _ = self._directory.stage(plan, resume=resume)
        return LocalStage(self._files, self._root, staging, plan, layout)

    def remove(self) -> None:
        """Remove the directories that were made, as far as they are empty."""
        self._directory.remove()

    def close(self) -> None:
        """Nothing to let go of."""


class LocalStage:
    """A :class:`~kvformat.write.target.Stage` that is a staging directory in the dataset's own."""

    def __init__(self, files: LocalFiles, root: Path, staging: Staging, plan: Plan, layout: Layout) -> None:
        self._files = files
        self._root = root
        self._staging = staging
        self._plan = plan
        self._layout = layout
        self.path = staging.path

    def shard(self, ordinal: int) -> Path:
        """Path of a shard in work or finished."""
        return self._staging.shard(ordinal)

    def add_receipt(self, receipt: Receipt) -> None:
        """Make a receipt durable."""
        self._staging.add_receipt(receipt)

    def deliver(self, receipt: Receipt) -> Receipt:
        """The shard is where it is needed already."""
        return receipt

    def receipts(self) -> list[Receipt]:
        """As for :meth:`Staging.receipts`."""
        return self._staging.receipts()

    def check(self, receipt: Receipt) -> Receipt:
        """Hash the shard again, and compare it with its receipt; E116."""
        plan = self._plan
        path = self.shard(receipt.ordinal)
        check_shard(path, receipt, self._layout, header_size=plan.header_size, version=plan.version)
        return receipt

    def stop(self, after: int = -1) -> None:
        """Nothing takes long here."""

    def publish(
        self,
        *,
        receipts: Sequence[Receipt],
        parts: Sequence[EncodedPart],
        covered: Mapping[str, bytes],
        manifest: Manifest,
        undo: bool,
    ) -> bytes:
        """As for :func:`kvformat.write.seal.publish`."""
        return publish(
            self._files,
            self._root,
            self._staging,
            shards=[
                (self._staging.shard(r.ordinal), shard_path(r.ordinal, bytes.fromhex(r.sha256))) for r in receipts
            ],
            parts=parts,
            covered=covered,
            manifest=manifest,
            undo=undo,
        )

    def release(self) -> None:
        """Give the lease back and leave the files for a later run."""
        self._staging.release()

    def remove(self) -> None:
        """Remove the staging directory."""
        self._staging.remove()
