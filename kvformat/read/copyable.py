"""A record as bytes that are copied, verified, to where they are wanted."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.read.stored import StoredRecord, Wanted
from kvformat.spec import digests
from kvformat.spec.layout import Placed

if TYPE_CHECKING:
    from kvformat.storage.local_read import FileIdentity

__all__ = ["CopyableRecord", "Proof", "Wanted", "at_once"]

# Copied and hashed in one go: small enough that what was copied is still in the processor's cache.
_GROUP_NBYTES = 1 << 18
_POPULATE_READ = 22  # Linux 5.14; Python has no name for it


class Proof(NamedTuple):
    """What one process verified of a record, for another one that finds the very same file there.

    Attributes
    ----------
    identity
        The shard's file.
    flags
        A bit for each tensor verified whole, as :attr:`Placed.bit` numbers them.
    slabs
        Of tensors not verified whole, (bit of the tensor, a bit for each verified slab).
    """

    identity: FileIdentity
    flags: int
    slabs: tuple[tuple[int, int], ...]


class CopyableRecord(StoredRecord):
    """One record of a dataset as bytes to copy; :class:`Record` adds names and tensors."""

    __slots__ = ()

    # -- copies --------------------------------------------------------------------------------------------------

    def copy_body(self, out: memoryview) -> int:
        """Copy all components, as stored and verified, to the start of ``out``; see ``Dataset.read_into``."""
        placement = self._placement
        start, nbytes = self._offset + placement.body, placement.body_nbytes
        out = _fitting(out, nbytes, self.index)
        flags = self._shard.checks.flags
        level = self._dataset.level
        self._need()
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
        begun = time.perf_counter()
        equal = digests.sums_of(data, bounds) == stated
        self._dataset.verify_s += time.perf_counter() - begun
        return equal and not self._dataset.scales

    def copy_slab(self, out: memoryview, name: str, row: int) -> int:
        """Copy one slab, verified, to the start of ``out``; see ``Dataset.read_slab_into``."""
        placement = self._placement
        placed = placement.tensors[name]
        nbytes = placed.slab_nbytes
        out = _fitting(out, nbytes, self.index)
        if self._shard.fetches:
            self._need([(name, [(row, 1)])])
        checks = self._shard.checks
        level = self._dataset.level
        self._shard.file.read_into(out, self._offset + placed.offset + row * nbytes)
        if level == 2 or not checks.flags[self._slot] >> placed.bit & 1:
            if level == 2 or (level and not checks.slabs.get((self._slot, placed.bit), 0) >> row & 1):
                self._compare(placed, row, 1, out, self._sums())
            self.slabs_done(placed, row, 1)
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
        if self._shard.fetches:
            self._need([(placed.name, [(0, self._dataset.slabs[placed.name])])])
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
        group = at_once(slab, count)
        for row in range(0, count, group):
            rows = min(group, count - row)
            part = out[row * slab : (row + rows) * slab]
            file.read_into(part, start + row * slab)
            self._compare(placed, row, rows, part, sums)
        flags[self._slot] |= 1 << placed.bit

    # -- pieces to copy from -------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """Where the record begins in its shard, in bytes."""
        return self._offset

    def proved(self, bits: int) -> NDArray[np.uint8] | None:
        """The mapped shard, ``[nbytes]`` uint8, where nothing is left to verify of the tensors ``bits``; else None."""
        shard = self._shard
        level = self._dataset.level
        if shard.memory is None or level == 2 or (level == 1 and shard.checks.flags[self._slot] & bits != bits):
            return None
        return shard.array

    def advise(self, wanted: Wanted) -> None:
        """Have the system read ahead what is wanted, and no more, where nothing of the record was touched yet.

        What is elsewhere is here when this returns.
        """
        self._need(wanted)
        self._advise_once(self.ranges(wanted))

    def pieces(self, placed: Placed, row: int, rows: int) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """Slabs ``row`` to ``row + rows`` of a tensor, verified just before they are given out.

        Yields
        ------
        tuple
            First slab and number of slabs of a piece, and its bytes, ``[slabs, slab_nbytes]`` uint8, row-major: a view
            of the mapping, or what was read into memory that the next piece overwrites.
        """
        shard, level, slab = self._shard, self._dataset.level, placed.slab_nbytes
        flags = shard.checks.flags
        verified = level == 0 or (level == 1 and flags[self._slot] >> placed.bit & 1)
        first = self._offset + placed.offset
        if verified and shard.memory is not None:
            begin = first + row * slab
            yield row, rows, shard.array[begin : begin + rows * slab].reshape(rows, slab)
            return
        group = at_once(slab, rows)
        scratch = np.empty(group * slab, dtype=np.uint8) if shard.memory is None else None
        sums = None if verified else self._sums()
        for at in range(row, row + rows, group):
            count = min(group, row + rows - at)
            begin = first + at * slab
            if scratch is None:
                part = shard.array[begin : begin + count * slab]
            else:
                part = scratch[: count * slab]
                shard.file.read_into(part.data, begin)
            if sums is not None:
                done = shard.checks.slabs.get((self._slot, placed.bit), 0)
                wanted = (1 << count) - 1 << at
                if level == 2 or done & wanted != wanted:
                    self._compare(placed, at, count, part.data, sums)
                    self.slabs_done(placed, at, count)
            yield at, count, part.reshape(count, slab)

    # -- proofs for other processes ------------------------------------------------------------------------------

    def prove(self, wanted: Wanted) -> Proof:
        """Verify tensors, and have their bytes in memory; what was verified, for another process."""
        if self._shard.fetches and not self._shard.shared:
            # What this process fetched would not be found by the other one.
            return Proof(self._shard.checks.identity, 0, ())
        self.advise(wanted)
        for name, runs in wanted:
            placed = self._placement.tensors[name]
            for row, rows in runs:
                for _ in self.pieces(placed, row, rows):
                    pass
        self._populate(wanted)
        checks = self._shard.checks
        if self._dataset.level == 2:
            return Proof(checks.identity, 0, ())
        bits = (self._placement.tensors[name].bit for name, _ in wanted)
        slabs = ((bit, checks.slabs.get((self._slot, bit), 0)) for bit in bits)
        return Proof(checks.identity, checks.flags[self._slot], tuple((bit, done) for bit, done in slabs if done))

    def accept(self, proof: Proof) -> None:
        """Count as verified what another process verified of this very file; of another file nothing is.

        Nor of one that was written to meanwhile: the proof is of the bytes that were there.
        """
        if self._dataset.level != 1:
            return
        self._shard.trust(proof.identity)
        checks = self._shard.checks
        if checks.identity != proof.identity:
            return
        flags = checks.flags[self._slot]
        known = {bit: checks.slabs.get((self._slot, bit), 0) for bit, _ in proof.slabs}
        news = [(bit, done) for bit, done in proof.slabs if not flags >> bit & 1 and done & ~known[bit]]
        if not (proof.flags & ~flags or news) or not self._shard.file.is_current():
            return
        checks.flags[self._slot] |= proof.flags
        counts = list(self._dataset.slabs.values())  # in the order of the bits
        for bit, done in news:
            self._mark(bit, counts[bit], done)

    def _populate(self, wanted: Wanted) -> None:
        """Have what is wanted in the page cache, where the system has a call that waits for it."""
        mapped = self._shard.file.mapped
        if mapped is None:
            return
        for start, nbytes in self.ranges(wanted):
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError, ValueError):
                mapped.madvise(_POPULATE_READ, begin, start + nbytes - begin)


def at_once(slab_nbytes: int, rows: int) -> int:
    """Slabs to copy and hash in one go, of so many."""
    return max(1, min(rows, _GROUP_NBYTES // slab_nbytes if slab_nbytes else rows))


def _fitting(out: memoryview, nbytes: int, record: int) -> memoryview:
    if len(out) < nbytes:
        raise make_error("E081", f"out has {len(out)} bytes, {nbytes} are needed", record=record)
    return out[:nbytes]
