"""Writing one shard into staging, and finishing it in the background."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from kvformat.codec.shard import encode_header
from kvformat.errors import make_error
from kvformat.spec import limits
from kvformat.spec.layout import Layout, Placement
from kvformat.storage.faults import translated
from kvformat.storage.local_write import Buffer, LocalFiles
from kvformat.write.appender import Appender
from kvformat.write.staging import Receipt, StagedRecord

__all__ = ["ShardWriter", "Shards", "hash_file"]

_HASH_BLOCK = 1 << 20
_ZEROS = bytes(limits.ALIGNMENT)


class Shards(Protocol):
    """Where shards in work lie, and who is told when one is complete."""

    def shard(self, ordinal: int) -> Path:
        """Path of a shard."""

    def add_receipt(self, receipt: Receipt) -> None:
        """A shard is complete."""


class ShardWriter:
    """A shard in work. Records are appended; :meth:`finish` makes it durable and writes its receipt."""

    def __init__(
        self, files: LocalFiles, staging: Shards, layout: Layout, *, ordinal: int, version: str, header_size: int
    ) -> None:
        self._files = files
        self._staging = staging
        self._layout = layout
        self._version = version
        self._header_size = header_size
        self.ordinal = ordinal
        self.path = staging.shard(ordinal)
        self.nbytes = 0
        self.num_records = 0
        self._records: list[tuple[Placement, bytes, bytes]] = []
        self._fd = files.create(self.path)
        self._appender = Appender(files, self._fd, self.path, header_size)

    def add(self, placement: Placement, buffers: Sequence[Buffer], *, document: bytes, record_sum: bytes) -> int:
        """Append a record, whose tensors are given in stored order; returns its offset in the data."""
        offset = self.nbytes
        if self._header_size + offset + placement.nbytes > limits.MAX_FILE_NBYTES:
            raise make_error("E111", "the shard would have 2^48 bytes or more")
        pad = _ZEROS[: placement.nbytes - placement.end]
        written = self._appender.append([*buffers, pad])
        if written != placement.nbytes:
            raise make_error("E101", f"{written} bytes were given for a record of {placement.nbytes}", path=self.path)
        self.nbytes += placement.nbytes
        self.num_records += 1
        self._records.append((placement, document, record_sum))
        return offset

    def finish(self) -> Receipt:
        """Write the header, make the file durable, hash it, write the receipt. Runs in a helper thread."""
        try:
            header = encode_header(
                self._layout,
                version=self._version,
                ordinal=self.ordinal,
                placements=[placement for placement, _, _ in self._records],
                header_size=self._header_size,
            )
            self._appender.flush()
            self._files.write(self._fd, [header], 0, self.path)
            # Beside each other: one waits for the disk, the other keeps a processor busy.
            with ThreadPoolExecutor(1, thread_name_prefix="kvformat-sync") as helper:
                synced = helper.submit(self._files.sync, self._fd, self.path)
                digest = hash_file(self._fd, self.path)
                synced.result()
        finally:
            self.close()
        receipt = Receipt(
            ordinal=self.ordinal,
            records=tuple(
                StagedRecord(dims=placement.dims, document=document.hex(), record_sum=record_sum.hex())
                for placement, document, record_sum in self._records
            ),
            sha256=digest.hex(),
            size=self._header_size + self.nbytes,
        )
        self._staging.add_receipt(receipt)
        return receipt

    def close(self) -> None:
        """Close the descriptor; more than once is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self, *, close: Callable[[int], object] = os.close) -> None:
        # A writer that fails drops the shards whose turn to be finished has not come. When the interpreter exits, the
        # module's names may be None by now, so the function is bound here. Without a descriptor yet, there is nothing
        # to close.
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            self._fd = -1
            try:  # noqa: SIM105 - contextlib may be gone too
                close(fd)
            except OSError:
                pass


def hash_file(source: int | Path, path: Path) -> bytes:
    """SHA-256 of a file, by descriptor or by path, in blocks that stay in the processor's cache."""
    with translated(path):
        fd = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            digest = hashlib.sha256()
            block = bytearray(_HASH_BLOCK)
            view = memoryview(block)
            offset = 0
            while count := os.preadv(fd, [view], offset):
                digest.update(view[:count])
                offset += count
        finally:
            if not isinstance(source, int):
                os.close(fd)
    return digest.digest()
