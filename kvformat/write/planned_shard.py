"""A shard in work by a plan: just the planned documents, in order, each stored or skipped with a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.layout import Layout, Placement
from kvformat.storage.local_write import Buffer, LocalFiles
from kvformat.write.shard import ShardWriter
from kvformat.write.staging import Receipt, SkippedDocument

__all__ = ["PlannedShard", "documents_fault"]


class PlannedShard:
    """One shard, written by one thread and completed by another. Made by :meth:`Workshop.begin`.

    A call that fails leaves nothing of the shard: it can be begun again. ``num_done`` of its ``num_records`` planned
    records are stored or skipped so far.
    """

    def __init__(
        self,
        files: LocalFiles,
        path: Path,
        layout: Layout,
        *,
        ordinal: int,
        documents: Sequence[bytes],
        version: str,
        header_size: int,
    ) -> None:
        self._files = files
        self._documents = documents
        self._skipped: list[SkippedDocument] = []
        self._there = True
        self.ordinal = ordinal
        self.path = path
        self.num_records = len(documents)
        self.num_done = 0
        try:
            self._writer = ShardWriter(
                files, _Place(path), layout, ordinal=ordinal, version=version, header_size=header_size
            )
        except FileExistsError:
            raise make_error("E115", f"shard {ordinal} was begun already", path=path) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the records so far."""
        return self._writer.nbytes

    def add(self, placement: Placement, buffers: Sequence[Buffer], *, document: bytes, record_sum: bytes) -> None:
        """Append the next record, as :meth:`RecordEncoder.encode` gave it; ``document`` is its digest.

        Raises
        ------
        ConflictError
            E112 where another document is planned next.
        StorageError
            E200 where the disk is full.
        """
        try:
            self._take(document)
            self._writer.add(placement, buffers, document=document, record_sum=record_sum)
        except BaseException:
            self.discard()
            raise

    def skip(self, document: bytes, reason: str) -> None:
        """Leave out the next document, with the reason.

        Raises
        ------
        ConflictError
            E112 where another document is planned next.
        UsageError
            E081 where the reason is no Unicode text.
        """
        try:
            words = _unicode(reason)
            self._take(document)
        except BaseException:
            self.discard()
            raise
        self._skipped.append(SkippedDocument(document=document.hex(), reason=words))

    def check_complete(self) -> None:
        """Refuse a shard that is not whole; nothing of it stays.

        Raises
        ------
        ConflictError
            E115 where documents are missing.
        """
        if self.num_done != self.num_records or not self._there:
            what = f"{self.num_done} of {self.num_records} documents" if self._there else "discarded"
            self.discard()
            raise make_error("E115", f"shard {self.ordinal} is not complete: {what}", path=self.path)

    def complete(self) -> Receipt:
        """Write the header, make the file durable, hash it; for a helper thread.

        Where all documents were skipped, the file goes: a shard holds at least one record.
        """
        if len(self._skipped) == self.num_records:
            self.discard()
            return Receipt.without_records(self.ordinal, self._skipped)
        receipt = self._writer.finish()
        return replace(receipt, skipped=tuple(self._skipped)) if self._skipped else receipt

    def discard(self) -> None:
        """Remove what there is of the file in work; more than once is harmless."""
        if self._there:
            self._there = False
            self._writer.close()
            with contextlib.suppress(KVFormatError):  # swept by a later worker
                self._files.unlink(self.path)

    def _take(self, document: bytes) -> None:
        if not self._there:
            raise make_error("E115", f"shard {self.ordinal} was discarded: begin it again", path=self.path)
        if self.num_done == self.num_records or self._documents[self.num_done] != document:
            raise make_error(
                "E112",
                f"document {document.hex()[:16]} is not number {self.num_done} of the {self.num_records} that are "
                f"planned for shard {self.ordinal}: add them all, in the order of the plan",
                path=self.path,
            )
        self.num_done += 1


def _unicode(reason: object) -> str:
    """A reason as a plain string that every encoder takes."""
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(reason, str) and reason:
            return reason.encode().decode()
    raise make_error("E081", f"a skipped document needs a reason in Unicode, found {reason!r:.80}")


class _Place:
    """Where the one shard in work lies; who is told when it is complete is for others to decide."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def shard(self, ordinal: int) -> Path:  # noqa: ARG002 -- the one there is
        return self._path

    def add_receipt(self, receipt: Receipt) -> None:
        pass


def documents_fault(receipt: Receipt, documents: Sequence[bytes]) -> str | None:
    """How the documents of a receipt are not the planned ones, in order, less those it lists as skipped."""
    stored, skipped = iter(receipt.records), iter(receipt.skipped)
    record, left_out = next(stored, None), next(skipped, None)
    for number, digest in enumerate(documents):
        document = digest.hex()
        if left_out is not None and left_out.document == document:
            left_out = next(skipped, None)
        elif record is not None and record.document == document:
            record = next(stored, None)
        else:
            return (
                f"document {document[:16]}, number {number} of the shard, is planned, and neither stored nor skipped"
            )
    if record is not None or left_out is not None:
        one = record or left_out
        assert one is not None
        return f"document {one.document[:16]} is not planned there"
    return None
