"""The records of a remote dataset that are here, or on their way."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvformat.errors import make_error
from kvformat.read.ahead import Ahead
from kvformat.read.blocks import Block, grouped
from kvformat.read.fetched import FetchedRecord
from kvformat.read.index import ShardRow
from kvformat.read.recent import Recent
from kvformat.read.shards import OpenShard, held_at_most
from kvformat.read.stored import StoredRecord, Wanted
from kvformat.storage.local_read import FileIdentity
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.remote_read import RemoteReader

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["RecordPool"]

_KEPT_NBYTES = 256 << 20
_KNOWN = 1 << 17
_CACHE_SHARE = 16
_ROWS = 256
_LISTED = 1 << 20


class _Coming(NamedTuple):
    """A record that was announced; ``ranges`` are (start in the shard, bytes) of what is wanted of it."""

    holder: FetchedRecord
    record: StoredRecord
    ranges: list[tuple[int, int]]
    cached: bool

    @property
    def extent(self) -> tuple[int, int]:
        """First and last byte of that in the shard."""
        start, nbytes = self.ranges[-1]
        return self.ranges[0][0], start + nbytes


class RecordPool:
    """Records of a remote dataset, each fetched as a part of its shard; stands where a :class:`ShardPool` would.

    At most ``max_open_files`` are kept, of those in memory 256 MiB, of those in a cache a small part of it, besides
    those that were announced and are not used yet. A record that is dropped lasts as long as tensors refer to it.

    Attributes
    ----------
    firsts, listed
        As those of a :class:`ShardPool` with too many shards to list.
    """

    def __init__(self, dataset: Dataset, reader: RemoteReader, *, max_open_files: int) -> None:
        if max_open_files < 1:
            raise make_error("E081", f"max_open_files must be at least 1, found {max_open_files}")
        self.firsts: list[int] = []
        self.listed: list[OpenShard | None] = [None]
        self._dataset = dataset
        self._reader = reader
        totals = dataset.manifest.totals
        self._most_ahead = max_open_files
        # What is kept, the cache cannot drop, in no process; and it is quickly opened again.
        self._limit = held_at_most(reader.cache_nbytes, _CACHE_SHARE, totals.nbytes, totals.records, max_open_files)
        self._starts: list[int] | None = None
        self._rows: Recent[int, ShardRow] = Recent(_ROWS)
        self._known: Recent[int, FileIdentity] = Recent(_KNOWN)
        self._ahead = Ahead(_threads(reader.remote.options, totals.nbytes // max(totals.records, 1)))
        self._begin()
        reader.held_by(self)

    @property
    def num_open(self) -> int:
        """Records kept."""
        return len(self._kept)

    def open_shards(self) -> list[OpenShard]:
        """What is kept."""
        return [*self._kept.values()]

    def holding(self, number: int) -> FetchedRecord:
        """A record of the dataset, of which nothing may be here yet."""
        if self._process != os.getpid():
            self._begin()
        found = self._announced.pop(number, None)
        if found is None:
            found = self._kept.get(number)
            if found is not None:
                if not self._kept.touch(number):  # another thread dropped it meanwhile
                    self._kept.put(number, found)
                return found
            found = self._make(number)
        self._keep(number, found)
        return found

    def announce(self, numbers: Sequence[int], wanted: Wanted) -> int:
        """Have what is wanted of these records fetched meanwhile; the bytes that are on their way for it.

        They stay here until they are used, or :meth:`forget` is called.
        """
        if self._process != os.getpid():
            self._begin()
        by_shard: dict[int, list[_Coming]] = {}
        turns = {number: turn for turn, number in reversed(list(enumerate(numbers)))}
        for number in sorted(turns):
            if number not in self._announced and number not in self._kept:
                coming = self._coming(number, wanted)
                self._announced[number] = coming.holder
                by_shard.setdefault(coming.holder.row.ordinal, []).append(coming)
        groups = [group for ordered in by_shard.values() for group in self._groups(ordered)]
        # In the order in which the first of each is going to be used.
        for members in sorted(groups, key=lambda group: min(turns[coming.record.index] for coming in group)):
            # A file of a cache costs a descriptor while it is held, and is found again without it.
            hold = len(self._announced) <= self._most_ahead or self._reader.cache_nbytes is None
            self._ahead.submit(partial(_fetch_all, members, wanted, hold=hold))
        return sum(size for group in groups for coming in group for _, size in coming.ranges)

    def _groups(self, ordered: Sequence[_Coming]) -> list[list[_Coming]]:
        """Records of a shard, ascending, by what is fetched in one request.

        What the cache holds is not fetched with its neighbours: the block would bring it once more.
        """
        here = [coming for coming in ordered if coming.cached]
        missing = [coming for coming in ordered if not coming.cached]
        most = self._reader.remote.options.request_nbytes
        groups = [[missing[at] for at in group] for group in grouped([c.extent for c in missing], most)]
        for members in groups:
            if len(members) > 1:
                ranges = [extent for coming in members for extent in coming.ranges]
                block = Block(self._reader.remote, members[0].holder.row.path, ranges)
                for coming in members:
                    coming.holder.from_block(block)
        return [*groups, here] if here else groups

    def _coming(self, number: int, wanted: Wanted) -> _Coming:
        holder = self._make(number)
        record = StoredRecord(self._dataset, number, holder)
        ranges = holder.ranges(record, wanted)
        absolute = [(holder.origin + at, size) for at, size in ranges]
        return _Coming(holder, record, absolute, holder.seems_cached(ranges))

    def forget(self) -> None:
        """Drop what was announced and not used."""
        self._ahead.forget()
        self._announced.clear()

    def let_go(self) -> None:
        """Hold no file open for later; what was proved stays known."""
        if self._process != os.getpid():
            return
        self._drop_beyond(0)
        for number, holder in list(self._announced.items()):
            identity = holder.cached
            # Another in its place, not this one closed: somebody may be about to use it.
            if identity is not None and self._announced.get(number) is holder:
                fresh = self._announced[number] = self._make(number)
                fresh.trust(identity)

    def _make(self, number: int) -> FetchedRecord:
        made = FetchedRecord(self._dataset, self._reader, self._row(number), number)
        known = self._known.get(number)
        if known is not None:
            made.trust(known)
        return made

    def _keep(self, number: int, record: FetchedRecord) -> None:
        self._kept.put(number, record)
        self._drop_beyond(self._limit)
        if self._reader.cache_nbytes is None or self._reader.is_bypassed:
            while (count := len(self._kept)) > 1 and sum(k.held_nbytes for k in self._kept.values()) > _KEPT_NBYTES:
                self._drop_beyond(count - 1)

    def _drop_beyond(self, most: int) -> None:
        for dropped, was in self._kept.beyond(most):
            identity = was.cached
            if identity is not None:
                self._known.put(dropped, identity)

    def _row(self, number: int) -> ShardRow:
        index = self._dataset.index
        if self._starts is None:
            self._starts = index.first_records(at_most=_LISTED)
        ordinal = bisect_right(self._starts, number) - 1 if self._starts else index.shard_of(number)
        found = self._rows.get(ordinal)
        if found is None:
            found = index.shard(ordinal)
            self._rows.put(ordinal, found)
        return found

    def _begin(self) -> None:
        """Begin anew: after a fork, what the threads of the parent had in work never comes."""
        self._process = os.getpid()
        self._kept: Recent[int, FetchedRecord] = Recent()
        self._announced: dict[int, FetchedRecord] = {}


def _threads(options: RemoteOptions, nbytes: int) -> int:
    """Threads that wait for records of this size on average: enough for as many requests as may be under way.

    More of them only have more memory in use at once: with eight for records of six requests each, a tenth slower.
    """
    requests = max(1, -(-nbytes // options.request_nbytes))
    return max(2, min(options.max_requests, -(-options.max_requests // requests)))


def _fetch_all(members: Sequence[_Coming], wanted: Wanted, *, hold: bool) -> None:
    for coming in members:
        coming.holder.fetch_ahead(coming.record, wanted, hold=hold)
