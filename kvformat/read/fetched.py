"""Records of a remote dataset: fetched and verified when they are wanted, whole or in part."""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError
from kvformat.read.arriving import WORTH_NBYTES, Arriving
from kvformat.read.shards import SUMS_CHECKED, TOUCHED, Checks, OpenShard
from kvformat.read.stored import StoredRecord, Wanted
from kvformat.storage.local_read import FileIdentity, OpenFile
from kvformat.storage.obtaining import MemoryFile, Write
from kvformat.storage.remote_read import RemoteReader
from kvformat.storage.store import Buffer

if TYPE_CHECKING:
    from kvformat.read.blocks import Block
    from kvformat.read.dataset import Dataset
    from kvformat.read.index import ShardRow

__all__ = ["FetchedRecord"]

_NOWHERE = FileIdentity(0, 0, 0, 0, 0)
Ranges = list[tuple[int, int]]
"""(start, bytes), ascending, none touching another."""


class FetchedRecord(OpenShard):
    """The part of a remote shard that holds one record.

    Nothing of it is here at first. Its :attr:`file` then holds what was asked for, and fetches what is read beyond
    that; once all of the record is here, it is a file of its own, mapped like any other. What is here is verified,
    unless the dataset is read with ``verify="off"``.
    """

    __slots__ = ("_block", "_dataset", "_failure", "_known", "_lock", "_name", "_process", "_reader", "_whole")

    fetches = True

    def __init__(self, dataset: Dataset, reader: RemoteReader, row: ShardRow, record: int) -> None:
        at = row.row + record - row.first
        origin = dataset.manifest.header_size + int(row.rows.flat["offset"][at])
        self._name = row.path
        super().__init__(
            row,
            PartFile(reader, row.path, origin),
            Checks(_NOWHERE, 1, len(dataset.slabs)),
            record=record,
            origin=origin,
        )
        self._dataset = dataset
        self._reader = reader
        self._whole = False
        self._known: FileIdentity | None = None
        self._block: Block | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def shared(self) -> bool:  # type: ignore[override]  # a constant of other shards
        """Whether other processes find what this one fetched."""
        return self._reader.cache_nbytes is not None

    @property
    def held_nbytes(self) -> int:
        """Bytes that are here."""
        file = self.file  # once: another thread may put the whole record in its place
        return file.held_nbytes if isinstance(file, PartFile) else file.identity.nbytes

    @property
    def cached(self) -> FileIdentity | None:
        """Identity of the cached file that holds all of the record, where that is held open."""
        return self.file.identity if self._whole and self.shared and not isinstance(self.file, MemoryFile) else None

    def trust(self, identity: FileIdentity) -> None:
        """A cached file of this identity was proved by another process, or by this one before."""
        if not self._whole:
            self._known = identity

    def seems_cached(self, ranges: Ranges) -> bool:
        """Whether these ranges of the record will probably be found in the cache."""
        nbytes = sum(nbytes for _, nbytes in ranges)
        return self._reader.seems_to_hold(_key(self.row.sha256, self.origin, ranges), nbytes)

    def from_block(self, block: Block) -> None:
        """Take the bytes from what is fetched together with other records'; what that gives is proved all the same."""
        self._block = block

    def fetch(self, record: StoredRecord, wanted: Wanted | None) -> None:
        """Have what is wanted of the record here, or all of it.

        Raises
        ------
        KVFormatError
            E002, E005, E070 to E074 of the shard as it is in the store: what differs was fetched twice; E200, E203,
            E207, E208, E210.
        """
        if self._whole:
            return
        with self._own_lock():
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._fetch(record, wanted)

    def fetch_ahead(self, record: StoredRecord, wanted: Wanted | None, *, hold: bool) -> None:
        """As :meth:`fetch`, and never past the cache; an error is raised where the record is used.

        Parameters
        ----------
        hold
            Else the cached file is closed, and opened again at its use.
        """
        with self._own_lock():
            try:
                self._fetch(record, wanted, ahead=True, hold=hold)
            except KVFormatError as error:
                # Where the cache has no room, memory would have no bound: that is left to the use.
                self._failure = None if self.shared and error.code == "E210" else error
            except Exception as error:  # noqa: BLE001 -- raised again, all of them, by `fetch`
                self._failure = error

    def _fetch(self, record: StoredRecord, wanted: Wanted | None, *, ahead: bool = False, hold: bool = True) -> None:
        if self._whole:
            self._block = None
            return
        ranges = self.ranges(record, wanted)
        whole = wanted is None or (len(ranges) == 1 and ranges[0][1] == record.placement.nbytes)
        if not whole and self._part.holds(ranges):
            return
        file = self._obtain(record, ranges, None if whole else wanted, ahead=ahead)
        if not hold:
            self._known = file.identity
        elif whole:
            self._use_whole(file)
        else:
            self._use_part(record, wanted or (), ranges, file)

    def ranges(self, record: StoredRecord, wanted: Wanted | None) -> Ranges:
        """What is fetched for it: that and the sums, or all of the record where that is half of it or more."""
        if wanted is not None:
            found = list(record.ranges(wanted, sums=self._dataset.level > 0))
            if found and 2 * sum(nbytes for _, nbytes in found) < record.placement.body_nbytes:
                return found
        return [(0, record.placement.nbytes)]

    def _use_whole(self, file: OpenFile) -> None:
        checks = Checks(file.identity, 1, len(self._dataset.slabs))
        if self._dataset.level:
            checks.flags[0] = (1 << len(self._dataset.slabs)) - 1
            checks.steps[0] = TOUCHED | SUMS_CHECKED
        self.checks = checks
        self.use(file)
        self._whole = True

    def _use_part(self, record: StoredRecord, wanted: Wanted, ranges: Ranges, file: OpenFile) -> None:
        self._part.add(ranges, file)
        if self._dataset.level:
            for name, runs in wanted:
                placed = record.placement.tensors[name]
                for row, rows in runs:
                    record.slabs_done(placed, row, rows)

    def _obtain(self, record: StoredRecord, ranges: Ranges, wanted: Wanted | None, *, ahead: bool) -> OpenFile:
        """A file of these ranges of the record, one behind the other, proved."""
        starts = [start for start, _ in ranges]
        positions = list(accumulate((nbytes for _, nbytes in ranges), initial=0))
        origin, name = self.origin, self._name
        summed = wanted is None and not self.shared and self._dataset.level and positions[-1] >= WORTH_NBYTES
        arriving: Arriving | None = None

        def fill(write: Write) -> None:
            nonlocal arriving
            arriving = Arriving(self._dataset, record.placement, write) if summed else None
            put = write if arriving is None else arriving.place

            def place(at: int, data: Buffer) -> None:
                number = bisect_right(starts, at - origin) - 1
                put(positions[number] + at - origin - starts[number], data)

            absolute = [(origin + start, nbytes) for start, nbytes in ranges]
            block, self._block = self._block, None  # a second time, from the store itself
            if block is None or not block.covers(absolute):  # something else than announced is wanted first
                self._reader.remote.fetch(name, absolute, place)
            else:
                block.give(absolute, place)

        def check(file: OpenFile) -> None:
            if arriving is not None:
                arriving.prove(self._over(record, file))
            elif wanted is None:
                found = self._over(record, file)
                found.check_sums()
                for fault in found.faults():
                    raise fault
            else:
                part = PartFile(self._reader, name, origin)
                part.add(ranges, file)
                found = self._over(record, part)
                found.check_sums()
                found.check_slabs(wanted)

        try:
            return self._reader.obtain(
                _key(self.row.sha256, origin, ranges),
                positions[-1],
                path=self.file.path,
                fill=fill,
                check=check if self._dataset.level else None,
                known=self._known,
                required=ahead and self.shared,
            )
        finally:
            self._block = None

    def _over(self, record: StoredRecord, file: OpenFile) -> StoredRecord:
        """The record in a file that is to be proved."""
        checks = Checks(file.identity, 1, len(self._dataset.slabs))
        shard = OpenShard(self.row, file, checks, record=record.index, origin=self.origin)
        return StoredRecord(self._dataset, record.index, shard)

    @property
    def _part(self) -> PartFile:
        assert isinstance(self.file, PartFile)
        return self.file

    def _own_lock(self) -> threading.Lock:
        if self._process != os.getpid():  # a thread of the parent may have held it, or the block's, at the fork
            self._lock, self._process, self._block = threading.Lock(), os.getpid(), None
        return self._lock


class PartFile(OpenFile):
    """Ranges of a record that are here, read as if all of it were: what is not is fetched, and not proved."""

    __slots__ = ("_held", "_name", "_origin", "_reader")

    def __init__(self, reader: RemoteReader, name: str, origin: int) -> None:
        super().__init__(-1, reader.path(name), _NOWHERE, None)
        self._reader = reader
        self._name = name
        self._origin = origin
        self._held: list[tuple[int, int, int, OpenFile]] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes that are here."""
        return sum(end - start for start, end, _, _ in self._held)

    def add(self, ranges: Ranges, file: OpenFile) -> None:
        """Hold ranges that stand in a file one behind the other."""
        at = 0
        for start, nbytes in ranges:
            self._held.append((start, start + nbytes, at, file))
            at += nbytes

    def holds(self, ranges: Ranges) -> bool:
        """Whether all of these are here."""
        return all(self._find(start, nbytes) is not None for start, nbytes in ranges)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Exactly these bytes."""
        found = self._find(offset, nbytes)
        if found is None:
            return super().read(offset, nbytes)
        file, at = found
        return file.read(at, nbytes)

    def read_into(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset``."""
        found = self._find(offset, len(into))
        if found is not None:
            file, at = found
            file.read_into(into, at)
            return
        self._reader.remote.read_into(self._name, self._origin + offset, into)

    def is_current(self) -> bool:
        """Nothing vouches for what is not whole."""
        return False

    def _find(self, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        for start, end, at, file in self._held:
            if start <= offset and offset + nbytes <= end:
                return file, at + offset - start
        return None


def _key(sha256: bytes, origin: int, ranges: Ranges) -> str:
    """Name in the cache: what the bytes are a part of, and which part."""
    (start, nbytes), *more = ranges
    if not more and start == 0:
        return f"{sha256.hex()}-{origin:x}-{nbytes:x}"
    text = ",".join(f"{start}+{nbytes}" for start, nbytes in ranges)
    return f"{sha256.hex()}-{origin:x}-part-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
