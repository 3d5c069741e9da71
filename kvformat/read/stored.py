"""A record as bytes of its shard: where it lies, what of it was verified, and copies of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError, make_error
from kvformat.read.shards import SUMS_CHECKED, TOUCHED, OpenShard
from kvformat.spec import digests, limits
from kvformat.spec.layout import Placed, Placement
from kvformat.spec.values import all_positive

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["StoredRecord"]

_PAGE = mmap.PAGESIZE
# Copied and hashed in one go: small enough that what was copied is still in the processor's cache.
_GROUP_NBYTES = 1 << 18


class StoredRecord:
    """One record of a dataset as bytes; :class:`Record` adds names and tensors.

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

    # -- place ---------------------------------------------------------------------------------------------------

    def _find_place(self) -> tuple[Placement, int]:
        """Layout of the record and its start in the file, checked against its neighbours; E053, E054."""
        path = self._shard.file.path
        row = self._shard.row
        flat = row.rows.flat
        at = row.row + self._slot
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
        if wrong or (self._slot == 0 and offset != 0):
            raise make_error(
                "E054",
                f"the record lies at {offset}, its dims {dims} make it {placement.nbytes} bytes, the next is at "
                f"{end}; the shard has {data_end} bytes of data",
                path=path,
                record=self.index,
            )
        return placement, header_size + offset

    def _advise(self, start: int, nbytes: int) -> None:
        """Have the system read ahead what is touched next, in one sequential pass."""
        mapped = self._shard.file.mapped
        if mapped is not None and nbytes:
            begin = start // _PAGE * _PAGE
            mapped.madvise(mmap.MADV_WILLNEED, begin, start + nbytes - begin)

    def _advise_once(self) -> None:
        steps = self._shard.checks.steps
        if not steps[self._slot] & TOUCHED:
            self._advise(self._offset, self._placement.nbytes)
            steps[self._slot] |= TOUCHED

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

    def check_sums(self) -> None:
        """Prove the table of sums; E070."""
        self._sums()

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
            at = (row.row + self._slot) * 16
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
        self._slab_done(placed, row)

    def _slab_done(self, placed: Placed, row: int) -> None:
        checks = self._shard.checks
        key = (self._slot, placed.bit)
        done = checks.slabs.get(key, 0) | 1 << row
        if done == (1 << self._dataset.slabs[placed.name]) - 1:
            checks.slabs.pop(key, None)
            checks.flags[self._slot] |= 1 << placed.bit
        else:
            checks.slabs[key] = done

    def _compare(self, placed: Placed, row: int, rows: int, data: memoryview, sums: memoryview) -> None:
        """Compare ``rows`` slabs from ``row`` on, whose bytes ``data`` are, with their sums; E071 to E074."""
        slab = placed.slab_nbytes
        first = self._dataset.layout.first_sum[placed.name] + row
        found = digests.slab_sums(data, rows)
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

    # -- copies --------------------------------------------------------------------------------------------------

    def copy_body(self, out: memoryview) -> int:
        """Copy all components, as stored and verified, to the start of ``out``; see ``Dataset.read_into``."""
        placement = self._placement
        start, nbytes = self._offset + placement.body, placement.body_nbytes
        out = _fitting(out, nbytes, self.index)
        flags = self._shard.checks.flags
        level = self._dataset.level
        self._advise_once()
        verified = self._body_is_verified()
        if verified or nbytes <= _GROUP_NBYTES:
            if self._shard.memory is None:
                self._shard.file.read_into(out, start)
            else:
                out[:] = self._shard.memory[start : start + nbytes]
        if not verified and not (nbytes <= _GROUP_NBYTES and self._is_body(out)):
            for name in self._dataset.layout.body:
                placed = placement.tensors[name]
                at = placed.offset - placement.body
                self.copy_tensor(out[at : at + placed.nbytes], placed)
        flags[self._slot] |= placement.body_bits
        if level != 2:
            self._keep_span()
        return nbytes

    def _is_body(self, data: memoryview) -> bool:
        """Whether a copy of the body is what the sums state: in one go, where calls cost more than bytes."""
        stated = self._sums().tolist()
        numbers, bounds = self._dataset.layout.body_slabs(self._placement)
        if len(numbers) < len(stated):
            stated = [stated[number] for number in numbers]
        return digests.sums_of(data, bounds) == stated and not self._dataset.scales

    def copy_slab(self, out: memoryview, name: str, row: int) -> int:
        """Copy one slab, verified, to the start of ``out``; see ``Dataset.read_slab_into``."""
        placement = self._placement
        placed = placement.tensors[name]
        nbytes = placed.slab_nbytes
        out = _fitting(out, nbytes, self.index)
        checks = self._shard.checks
        level = self._dataset.level
        self._shard.file.read_into(out, self._offset + placed.offset + row * nbytes)
        if level == 2 or not checks.flags[self._slot] >> placed.bit & 1:
            if level == 2 or (level and not checks.slabs.get((self._slot, placed.bit), 0) >> row & 1):
                self._compare(placed, row, 1, out, self._sums())
            self._slab_done(placed, row)
        if self._body_is_verified():
            self._keep_span()
        return nbytes

    def _body_is_verified(self) -> bool:
        """Whether nothing is left to verify of the components."""
        level, bits = self._dataset.level, self._placement.body_bits
        return level == 0 or (level == 1 and self._shard.checks.flags[self._slot] & bits == bits)

    def _keep_span(self) -> None:
        if self._shard.memory is not None:
            begin = self._offset + self._placement.body
            # The end last: it is what says that both are there.
            self._shard.spans[2 * self._slot] = begin
            self._shard.spans[2 * self._slot + 1] = begin + self._placement.body_nbytes

    def copy_tensor(self, out: memoryview, placed: Placed) -> None:
        """Copy a tensor, verified, to ``out``, which has its size."""
        file = self._shard.file
        flags = self._shard.checks.flags
        start = self._offset + placed.offset
        level = self._dataset.level
        if placed.bit < 0 or level == 0 or (level == 1 and flags[self._slot] >> placed.bit & 1):
            file.read_into(out, start)
            return
        # A few slabs at a time: what is verified is the copy, while it is in the processor's cache.
        sums = self._sums()
        slab, count = placed.slab_nbytes, self._dataset.slabs[placed.name]
        group = max(1, _GROUP_NBYTES // slab) if slab else count
        for row in range(0, count, group):
            rows = min(group, count - row)
            part = out[row * slab : (row + rows) * slab]
            file.read_into(part, start + row * slab)
            self._compare(placed, row, rows, part, sums)
        flags[self._slot] |= 1 << placed.bit


def _fitting(out: memoryview, nbytes: int, record: int) -> memoryview:
    if len(out) < nbytes:
        raise make_error("E081", f"out has {len(out)} bytes, {nbytes} are needed", record=record)
    return out[:nbytes]
