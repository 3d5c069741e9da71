"""Open shards: a bounded number of files, their typed views, and what was verified of their records."""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.read.ahead import Ahead
from kvformat.read.index import IndexReader, ShardRow
from kvformat.read.recent import Recent
from kvformat.spec.layout import Placement
from kvformat.spec.manifest import Totals
from kvformat.storage.local_read import FileIdentity, OpenFile
from kvformat.storage.readers import Reader
from kvformat.storage.remote_read import RemoteReader
from kvformat.tensors import from_buffer

if TYPE_CHECKING:
    import torch

    from kvformat.read.stored import StoredRecord, Wanted

__all__ = ["Checks", "OpenShard", "ShardPool", "held_at_most"]

TOUCHED = 1
SUMS_CHECKED = 2
_BITS = 64
_LISTED = 1 << 14
_THREADS = 2
_CACHE_SHARE = 2


class Checks:
    """What was verified of the records of one file.

    Attributes
    ----------
    flags
        By record of the shard, a bit for each tensor that was verified whole, as :attr:`Placed.bit` numbers them.
    slabs
        Slabs verified of tensors that are not verified whole, by (record in the shard, tensor).
    steps
        By record of the shard, ``TOUCHED`` and ``SUMS_CHECKED``.
    """

    __slots__ = ("flags", "identity", "slabs", "steps")

    def __init__(self, identity: FileIdentity, records: int, tensors: int) -> None:
        self.identity = identity
        self.flags: MutableSequence[int] = array("Q", bytes(8 * records)) if tensors <= _BITS else [0] * records
        self.slabs: dict[tuple[int, int], int] = {}
        self.steps = bytearray(records)


class OpenShard:
    """A shard file, checked for its size, with views of it by dtype; or the part of one that holds some records.

    Attributes
    ----------
    first, end
        Numbers of its first record, and of the one behind its last.
    origin
        Where the file begins in the shard, in bytes.
    memory
        The mapped file, or None where it is read by ranges.
    places
        By record of the shard, its layout and its start in the file, once they were checked.
    spans
        Two numbers a record: first and last byte of its body in the file, once nothing is left to verify of that; else
        zeros. One array: a record costs one line of the processor's cache.
    """

    __slots__ = ("_array", "_views", "checks", "end", "file", "first", "memory", "origin", "places", "row", "spans")

    fetches = False
    """Whether its bytes come from elsewhere, by :meth:`fetch`."""
    shared = True
    """Whether other processes find the same file."""

    def __init__(
        self, row: ShardRow, file: OpenFile, checks: Checks, *, record: int | None = None, origin: int = 0
    ) -> None:
        self.row = row
        self.first = row.first if record is None else record
        self.end = row.end if record is None else record + 1
        self.origin = origin
        self.checks = checks
        self.places: list[tuple[Placement, int] | None] = [None] * (self.end - self.first)
        self.spans = array("Q", bytes(16 * (self.end - self.first)))
        self.use(file)

    def use(self, file: OpenFile) -> None:
        """Read from this file."""
        self._views: dict[str, torch.Tensor] = {}
        self._array: NDArray[np.uint8] | None = None
        self.file = file
        self.memory = None if file.mapped is None else memoryview(file.mapped)

    def fetch(self, record: StoredRecord, wanted: Wanted | None) -> None:
        """Have what is wanted of a record here, or all of it; what is on this machine is here."""

    def trust(self, identity: FileIdentity) -> None:
        """Another process has proved the file of this identity; nothing to do for a file that is open."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """The whole mapped file, ``[nbytes]``."""
        if self._array is None:
            assert self.file.mapped is not None
            self._array = np.frombuffer(self.file.mapped, dtype=np.uint8)
        return self._array

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

    Attributes
    ----------
    firsts
        By ordinal, the first record of every shard, in ascending order; empty where there are too many to list.
    listed
        None, and behind it by ordinal the open shards, None in place of others. So the shard of a record is the one at
        ``bisect_right(firsts, record)``, and None while :attr:`firsts` is empty.
    """

    def __init__(
        self, reader: Reader, index: IndexReader, *, max_open_files: int, tensors: int, totals: Totals
    ) -> None:
        if max_open_files < 1:
            raise make_error("E081", f"max_open_files must be at least 1, found {max_open_files}")
        self._reader = reader
        self._index = index
        self._limit = max_open_files
        if isinstance(reader, RemoteReader):
            # What is held open, the cache cannot drop; the other half is for what comes next.
            self._limit = held_at_most(reader.cache_nbytes, _CACHE_SHARE, totals.nbytes, totals.shards, max_open_files)
            reader.held_by(self)
        self._tensors = tensors
        self._open: Recent[int, OpenShard] = Recent()
        self.firsts: list[int] = []
        shards = index.shards.starts[-1]
        self.listed: list[OpenShard | None] = [None] * (1 + (shards if shards <= _LISTED else 0))
        self._checks: dict[int, Checks] = {}
        self._ahead = Ahead(_THREADS)
        self._announced: set[int] = set()
        self._locks: dict[int, threading.Lock] = {}
        self._process = os.getpid()

    @property
    def num_open(self) -> int:
        """Shards held open."""
        return len(self._open)

    def open_shards(self) -> list[OpenShard]:
        """The shards held open."""
        return self._open.values()

    def holding(self, record: int) -> OpenShard:
        """The open shard that holds a record of the dataset."""
        return self.get(self._ordinal(record))

    def get(self, ordinal: int) -> OpenShard:
        """An open shard."""
        found = self._open.get(ordinal)
        if found is None:
            found = self._open_shard(ordinal)
            self._keep(ordinal, found)
        # While none will be dropped, their order is of no account. One that is gone, another thread dropped meanwhile.
        elif len(self._open) >= self._limit and not self._open.touch(ordinal):
            self._keep(ordinal, found)
        return found

    def announce(self, numbers: Sequence[int], wanted: Wanted) -> int:  # noqa: ARG002 -- a shard comes whole
        """Have the shards of these records fetched meanwhile; the bytes of those that nobody announced before."""
        nbytes = 0
        for ordinal in {self._ordinal(number) for number in numbers} - self._announced:
            self._announced.add(ordinal)
            if ordinal not in self._open:
                nbytes += self._index.shard(ordinal).size
                self._ahead.submit(partial(self._get_ahead, ordinal))
        return nbytes

    def forget(self) -> None:
        """Fetch no more than is under way."""
        self._ahead.forget()
        self._announced.clear()

    def let_go(self) -> None:
        """Hold no shard open."""
        self._drop_beyond(0)

    def _get_ahead(self, ordinal: int) -> None:
        # What fails now is tried, and raised, where a record of it is used. It is not kept, in place of one in use.
        with contextlib.suppress(KVFormatError):
            self._open_shard(ordinal)

    def _ordinal(self, record: int) -> int:
        return bisect_right(self.firsts, record) - 1 if self.firsts else self._index.shard_of(record)

    def _open_shard(self, ordinal: int) -> OpenShard:
        if not self.firsts:
            self.firsts = self._index.first_records(at_most=len(self.listed) - 1)
        row = self._index.shard(ordinal)
        if isinstance(self._reader, RemoteReader):
            with self._lock_of(ordinal):  # who waits for another thread to fetch it knows then that it was proved
                return self._opened(row, self._fetched(self._reader, row))
        return self._opened(row, self._reader.open(row.path, nbytes=row.size))

    def _fetched(self, reader: RemoteReader, row: ShardRow) -> OpenFile:
        before = self._checks.get(row.ordinal)
        return reader.open(
            row.path,
            nbytes=row.size,
            sha256=row.sha256.hex(),
            code="E077",
            required=True,
            known=None if before is None else before.identity,
        )

    def _opened(self, row: ShardRow, file: OpenFile) -> OpenShard:
        checks = self._checks.get(row.ordinal)
        if checks is None or checks.identity != file.identity:
            checks = self._checks[row.ordinal] = Checks(file.identity, row.end - row.first, self._tensors)
        return OpenShard(row, file, checks)

    def _lock_of(self, ordinal: int) -> threading.Lock:
        if self._process != os.getpid():  # threads of the parent may have held them at the fork
            self._locks, self._process = {}, os.getpid()
        return self._locks.setdefault(ordinal, threading.Lock())

    def _keep(self, ordinal: int, shard: OpenShard) -> None:
        # Listed before it can be dropped: another thread that drops it takes it off the list afterwards.
        if self.firsts:
            self.listed[ordinal + 1] = shard
        self._open.put(ordinal, shard)
        self._drop_beyond(self._limit)

    def _drop_beyond(self, most: int) -> None:
        for dropped, _ in self._open.beyond(most):
            if self.firsts:
                self.listed[dropped + 1] = None
            self._announced.discard(dropped)


def held_at_most(cache_nbytes: int | None, share: int, nbytes: int, count: int, limit: int) -> int:
    """How many of ``count`` files, ``nbytes`` together, to hold open: a share of a cache that has no room for all."""
    if cache_nbytes is None or cache_nbytes >= nbytes or not nbytes:
        return limit
    return max(1, min(limit, cache_nbytes * count // (share * nbytes)))
