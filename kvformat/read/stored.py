"""A record as bytes of its shard: where it lies, and what of it was verified."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError, make_error
from kvformat.read.shards import SUMS_CHECKED, TOUCHED, OpenShard
from kvformat.spec import digests, limits
from kvformat.spec.layout import Placed, Placement
from kvformat.spec.values import all_positive

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["StoredRecord", "Wanted"]

Wanted = Sequence[tuple[str, Sequence[tuple[int, int]]]]
"""By tensor, runs of (first slab, number of slabs)."""

_PAGE = mmap.PAGESIZE


class StoredRecord:
    """One record of a dataset as bytes; :class:`CopyableRecord` adds copies, :class:`Record` names and tensors.

    Attributes
    ----------
    index
        Number of the record in the dataset.
    """

    __slots__ = ("_dataset", "_offset", "_placement", "_shard", "_slot", "index")

    def __init__(self, dataset: Dataset, index: int, shard: OpenShard) -> None:
        self._dataset = dataset
        self.index = index
        self._shard = shard
        slot = self._slot = index - shard.first
        place = shard.places[slot]
        if place is None:
            place = shard.places[slot] = self._find_place()
        self._placement, self._offset = place

    @property
    def placement(self) -> Placement:
        """Where the tensors of the record stand."""
        return self._placement

    # -- place ---------------------------------------------------------------------------------------------------

    def _find_place(self) -> tuple[Placement, int]:
        """Layout of the record and its start in the file, checked against its neighbours; E053, E054."""
        path = self._shard.file.path
        row = self._shard.row
        flat = row.rows.flat
        at = row.row + self.index - row.first
        num_dims = self._dataset.num_dims
        dims = tuple(flat["dims"][at * num_dims : (at + 1) * num_dims])
        offset = flat["offset"][at]
        if not 1 <= dims[0] <= limits.MAX_TOKENS:
            raise make_error(
                "E053", f"{dims[0]} tokens: 1 to {limits.MAX_TOKENS} are allowed", path=path, record=self.index
            )
        try:
            placement = self._dataset.layout.place(dims)
        except KVFormatError as error:
            raise make_error("E053", error.message, path=path, record=self.index) from None
        header_size = self._dataset.manifest.header_size
        data_end = row.size - header_size
        end = flat["offset"][at + 1] if self.index + 1 < row.end else data_end
        wrong = offset % limits.ALIGNMENT or offset + placement.nbytes != end or end > data_end
        if wrong or (self.index == row.first and offset != 0):
            raise make_error(
                "E054",
                f"the record lies at {offset}, its dims {dims} make it {placement.nbytes} bytes, the next is at "
                f"{end}; the shard has {data_end} bytes of data",
                path=path,
                record=self.index,
            )
        return placement, header_size + offset - self._shard.origin

    def ranges(self, wanted: Wanted, *, sums: bool = False) -> Iterator[tuple[int, int]]:
        """Start in the file and number of bytes of what is wanted, and of the sums; what lies together in one."""
        start = end = 0
        tensors = self._placement.tensors
        entries: list[tuple[str, Sequence[tuple[int, int]]]] = list(wanted)
        if sums:
            entries.append((self._placement.sums.name, ((0, 1),)))
        for name, runs in sorted(entries, key=lambda entry: tensors[entry[0]].offset):
            placed = tensors[name]
            for row, rows in sorted(runs):
                begin = self._offset + placed.offset + row * placed.slab_nbytes
                if begin != end:
                    if end > start:
                        yield start, end - start
                    start = begin
                end = begin + rows * placed.slab_nbytes
        if end > start:
            yield start, end - start

    def _advise(self, start: int, nbytes: int) -> None:
        """Have the system read ahead what is touched next, in one sequential pass."""
        mapped = self._shard.file.mapped
        if mapped is not None and nbytes:
            begin = start // _PAGE * _PAGE
            mapped.madvise(mmap.MADV_WILLNEED, begin, start + nbytes - begin)

    def _advise_once(self, ranges: Iterable[tuple[int, int]] | None = None) -> None:
        """Announce (start in the file, bytes) of what is read next, or else the record, if nothing was touched yet."""
        steps = self._shard.checks.steps
        if not steps[self._slot] & TOUCHED:
            for start, nbytes in ranges or ((self._offset, self._placement.nbytes),):
                self._advise(start, nbytes)
            steps[self._slot] |= TOUCHED

    def _need(self, wanted: Wanted | None = None) -> None:
        """Have what is read next on this machine: all of the record, or what is wanted of it."""
        if self._shard.fetches:
            self._shard.fetch(self, wanted)

    # -- bytes, not verified -------------------------------------------------------------------------------------

    def stored(self, name: str) -> memoryview:
        """Bytes of a tensor as stored, not verified."""
        return self._bytes(self._placement.tensors[name])

    def padding(self) -> memoryview:
        """Bytes after the last tensor, not verified."""
        end = self._placement.end
        return self._shard.file.read(self._offset + end, self._placement.nbytes - end)

    def _read(self, placed: Placed, row: int, rows: int, *, fresh: bool) -> memoryview:
        """Bytes of slabs that were read, not mapped; ``fresh`` ones are verified where the dataset is."""
        data = self._bytes(placed, row, rows)
        if fresh and self._dataset.level:
            self._compare(placed, row, rows, data, self._sums())
        return data

    def _bytes(self, placed: Placed, row: int = 0, rows: int | None = None) -> memoryview:
        nbytes = placed.nbytes if rows is None else rows * placed.slab_nbytes
        return self._shard.file.read(self._offset + placed.offset + row * placed.slab_nbytes, nbytes)

    # -- verification --------------------------------------------------------------------------------------------

    def check_sums(self) -> memoryview:
        """The table of sums, uint64, proved; E070."""
        return self._sums()

    def check_slabs(self, wanted: Wanted) -> None:
        """Compare slabs with their sums, whatever was verified before; E070 to E074."""
        sums = self._sums()
        for name, runs in wanted:
            placed = self._placement.tensors[name]
            for row, rows in runs:
                self._compare(placed, row, rows, self._bytes(placed, row, rows), sums)

    def faults(self) -> Iterator[KVFormatError]:
        """Every slab and extra that is not what its sum states; the table of sums must be proved."""
        sums = self._sums()
        for placed in self._placement.tensors.values():
            if placed.bit < 0:
                continue
            count = self._dataset.slabs[placed.name]
            data = self._bytes(placed)
            try:
                self._compare(placed, 0, count, data, sums)
            except KVFormatError:
                for row in range(count):
                    part = data[row * placed.slab_nbytes : (row + 1) * placed.slab_nbytes]
                    try:
                        self._compare(placed, row, 1, part, sums)
                    except KVFormatError as error:
                        yield error

    def _sums(self) -> memoryview:
        """The table of sums, proved by ``record_sum``; where files are read, what was read this time."""
        placed = self._placement.sums
        start, memory = self._offset + placed.offset, self._shard.memory
        end = start + placed.nbytes
        raw = memory[start:end] if memory is not None else self._shard.file.read(start, placed.nbytes)
        steps = self._shard.checks.steps
        if self._dataset.level == 2 or memory is None or not steps[self._slot] & SUMS_CHECKED:
            row = self._shard.row
            at = (row.row + self.index - row.first) * 16
            if digests.record_sum(self._placement.dims, raw) != row.rows.flat["record_sum"][at : at + 16]:
                raise make_error(
                    "E070",
                    "the record's sums do not match its row: restore the shard, or extract it again",
                    path=self._shard.file.path,
                    record=self.index,
                )
            steps[self._slot] |= SUMS_CHECKED
        return raw.cast("Q")

    def _touch(self, placed: Placed) -> None:
        """First touch of a whole tensor, or any touch of one that is verified every time."""
        self._advise_once()
        if self._dataset.level:
            self._compare(placed, 0, self._dataset.slabs[placed.name], self._bytes(placed), self._sums())
        self._shard.checks.flags[self._slot] |= 1 << placed.bit

    def _touch_slab(self, placed: Placed, row: int) -> None:
        """Touch of a slab of a tensor that was not touched whole."""
        checks = self._shard.checks
        key = (self._slot, placed.bit)
        done = checks.slabs.get(key, 0)
        if done >> row & 1 and self._dataset.level != 2:
            return
        if not done >> row & 1:
            self._advise(self._offset + placed.offset + row * placed.slab_nbytes, placed.slab_nbytes)
        if self._dataset.level:
            self._compare(placed, row, 1, self._bytes(placed, row, 1), self._sums())
        self.slabs_done(placed, row, 1)

    def slabs_done(self, placed: Placed, row: int, count: int) -> None:
        """Note that slabs of a tensor are verified."""
        self._mark(placed.bit, self._dataset.slabs[placed.name], (1 << count) - 1 << row)

    def _mark(self, bit: int, slabs: int, done: int) -> None:
        """Note that slabs of a tensor, a bit each, are verified."""
        checks = self._shard.checks
        key = (self._slot, bit)
        done |= checks.slabs.get(key, 0)
        if done == (1 << slabs) - 1:
            checks.slabs.pop(key, None)
            checks.flags[self._slot] |= 1 << bit
        else:
            checks.slabs[key] = done

    def _compare(self, placed: Placed, row: int, rows: int, data: memoryview, sums: memoryview) -> None:
        """Compare ``rows`` slabs from ``row`` on, whose bytes ``data`` are, with their sums; E071 to E074."""
        slab = placed.slab_nbytes
        first = self._dataset.layout.first_sum[placed.name] + row
        begun = time.perf_counter()
        found = digests.slab_sums(data, rows)
        self._dataset.verify_s += time.perf_counter() - begun
        stated = sums[first : first + rows].tolist()
        if found != stated:
            at = next(at for at in range(rows) if found[at] != stated[at])
            raise self._slab_error(placed, row + at, found[at], stated[at])
        if placed.name in self._dataset.scales and not all_positive(data):
            at = next(at for at in range(rows) if not all_positive(data[at * slab : (at + 1) * slab]))
            raise make_error(
                "E074",
                f"{placed.name!r}: a scale is not finite and positive: extract again",
                path=self._shard.file.path,
                record=self.index,
                layer=self._dataset.layer_of(placed.name, row + at),
            )

    def _slab_error(self, placed: Placed, row: int, found: int, stated: int) -> KVFormatError:
        dataset = self._dataset
        path, layer = self._shard.file.path, dataset.layer_of(placed.name, row)
        if placed.bit >= dataset.num_components:
            return make_error(
                "E073",
                f"extra {placed.name!r}: XXH3 {found:016x}, expected {stated:016x}: restore the shard",
                path=path,
                record=self.index,
            )
        twin = dataset.twin_of(placed.name, layer)
        if twin is not None:
            other, other_row = self._placement.tensors[twin[0]], twin[1]
            data = self._bytes(other, other_row, 1)
            sums = self._sums()
            if digests.slab_sum(data) == stated and found == sums[dataset.layout.first_sum[other.name] + other_row]:
                return make_error(
                    "E071",
                    f"{placed.name!r} and {other.name!r} stand exchanged: extract again",
                    path=path,
                    record=self.index,
                    layer=layer,
                )
        return make_error(
            "E072",
            f"{placed.name!r}: XXH3 {found:016x}, expected {stated:016x}: restore the shard, or extract it again",
            path=path,
            record=self.index,
            layer=layer,
        )
