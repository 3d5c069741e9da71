"""Shards and receipts of a run in its staging directory, looked at and changed by any number of workers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.layout import Layout
from kvformat.storage.faults import translated
from kvformat.storage.lease import exclusive
from kvformat.storage.local_write import LocalFiles
from kvformat.write.recheck import check_shard
from kvformat.write.run import RunIdentity
from kvformat.write.shard import hash_file
from kvformat.write.staging import COVERED, Receipt, place_file

__all__ = ["LocalShards", "shard_name"]

_BUSY_TIMEOUT_S = 60.0
_RECEIPT = re.compile(r"([0-9]{8})\.json")
_SHARD = re.compile(r"([0-9]{8})(?:-[0-9a-f]{16}\.shard|\.skipped)")
"""A shard; or what stands in its place where all of its documents were skipped."""


class LocalShards:
    """What a :class:`~kvformat.write.shared.Shared` in a directory does about shards.

    Parameters
    ----------
    token
        Of the worker: in the names of what it has in work.

    Attributes
    ----------
    run
        Set by whoever joins it.
    """

    def __init__(self, files: LocalFiles, path: Path, token: str) -> None:
        self._files = files
        self._path = path
        self._token = token
        self.run: RunIdentity

    @property
    def place(self) -> Path:
        """The directory."""
        return self._path

    @property
    def files(self) -> LocalFiles:
        """As given."""
        return self._files

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

    def _shard(self, receipt: Receipt) -> Path:
        name = f"{receipt.ordinal:08d}.skipped" if receipt.is_empty else shard_name(receipt.ordinal, receipt.sha256)
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


def shard_name(ordinal: int, sha256: str) -> str:
    """Name of a staged shard, by the SHA-256 of its bytes."""
    return f"{ordinal:08d}-{sha256[:16]}.shard"
