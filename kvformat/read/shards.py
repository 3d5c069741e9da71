"""Open shards: a bounded number of files, their typed views, and what was verified of their records."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence
from typing import TYPE_CHECKING

from kvformat.errors import make_error
from kvformat.read.index import IndexReader, ShardRow
from kvformat.storage.local_read import FileIdentity, LocalReader, OpenFile
from kvformat.tensors import from_buffer

if TYPE_CHECKING:
    import torch

__all__ = ["Checks", "OpenShard", "ShardPool"]

SUMS_CHECKED = 1 << 62
ROW_CHECKED = 1 << 63
_BITS = 60


class Checks:
    """What was verified of the records of one file: a bit a tensor, and two for sums and row."""

    __slots__ = ("flags", "identity", "slabs")

    def __init__(self, identity: FileIdentity, records: int, tensors: int) -> None:
        self.identity = identity
        self.flags: MutableSequence[int] = array("Q", bytes(8 * records)) if tensors <= _BITS else [0] * records
        self.slabs: dict[tuple[int, int], int] = {}
        """Slabs verified of tensors that are not verified whole, by (record in the shard, tensor)."""


class OpenShard:
    """A shard file, checked for its size, with views of it by dtype."""

    __slots__ = ("_views", "checks", "file", "row")

    def __init__(self, row: ShardRow, file: OpenFile, checks: Checks) -> None:
        self.row = row
        self.file = file
        self.checks = checks
        self._views: dict[str, torch.Tensor] = {}

    def view(self, dtype: str) -> torch.Tensor:
        """The whole mapped file as a one-dimensional tensor."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = from_buffer(self.file.mapped, dtype)
        return found


class ShardPool:
    """The shards of a dataset, of which at most ``max_open_files`` are held open.

    A shard that is dropped stays mapped as long as tensors refer to it. What was verified is kept, and forgotten when
    the file turns out to be another one.
    """

    def __init__(self, reader: LocalReader, index: IndexReader, *, max_open_files: int, tensors: int) -> None:
        if max_open_files < 1:
            raise make_error("E081", f"max_open_files must be at least 1, found {max_open_files}")
        self._reader = reader
        self._index = index
        self._limit = max_open_files
        self._tensors = tensors
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._checks: dict[int, Checks] = {}

    @property
    def num_open(self) -> int:
        """Shards held open."""
        return len(self._open)

    def get(self, ordinal: int) -> OpenShard:
        """An open shard."""
        found = self._open.get(ordinal)
        if found is not None:
            try:
                self._open.move_to_end(ordinal)
            except KeyError:  # another thread dropped it meanwhile
                self._open[ordinal] = found
            return found
        row = self._index.shard(ordinal)
        file = self._reader.open(row.path, nbytes=row.size)
        checks = self._checks.get(ordinal)
        if checks is None or checks.identity != file.identity:
            checks = self._checks[ordinal] = Checks(file.identity, row.end - row.first, self._tensors)
        shard = OpenShard(row, file, checks)
        self._open[ordinal] = shard
        while len(self._open) > self._limit:
            try:
                self._open.popitem(last=False)
            except KeyError:
                break
        return shard
