"""A record on its way: its slabs are summed where they are put, while they are in the processor's cache."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvformat.read.copyable import at_once
from kvformat.read.stored import StoredRecord
from kvformat.spec import digests
from kvformat.spec.layout import Placed, Placement
from kvformat.storage.obtaining import Write
from kvformat.storage.store import Buffer

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["WORTH_NBYTES", "Arriving"]

WORTH_NBYTES = 1 << 20
"""Of a smaller record, all that came is in the processor's cache when it is proved."""


class _Group(NamedTuple):
    """Neighbouring slabs of a tensor; ``number`` is that of the first among the sums."""

    start: int
    nbytes: int
    number: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Arriving:
    """Places the bytes of a whole record, in any order and from several threads, and sums the slabs among them.

    What is summed is what stands in its place, not what came. Slabs that came in parts, and all where the place is
    not memory, are left to :meth:`prove`.

    Parameters
    ----------
    write
        Takes (offset in the record, bytes).
    """

    def __init__(self, dataset: Dataset, placement: Placement, write: Write) -> None:
        self._dataset = dataset
        self._write = write
        self._groups = _groups(dataset, placement)
        self._starts = [group.start for group in self._groups]
        self._sums: dict[int, int] = {}
        self._spent: list[float] = []  # appending is atomic, adding is not

    def place(self, offset: int, data: Buffer) -> None:
        """Put bytes where they belong, ``offset`` from the start of the record on."""
        view = memoryview(data).cast("B")
        at, end = offset, offset + len(view)
        for group in self._groups[bisect_left(self._starts, offset) :]:
            if group.end > end:
                break
            if at < group.start:
                self._write(at, view[at - offset : group.start - offset])
            at = group.end
            held = self._write(group.start, view[group.start - offset : at - offset])
            if held is not None:
                self._sum(group, held)
        if at < end:
            self._write(at, view[at - offset :])

    def prove(self, record: StoredRecord) -> None:
        """Compare with what the record states; it is the one that was placed.

        Raises
        ------
        KVFormatError
            E070 to E074.
        """
        self._dataset.verify_s += sum(self._spent)
        stated = record.check_sums().tolist()
        tensors = [placed for placed in record.placement.tensors.values() if placed.bit >= 0]
        record.check_slabs([(placed.name, self._unproved(placed, stated)) for placed in tensors])

    def _sum(self, group: _Group, held: memoryview) -> None:
        begun = time.perf_counter()
        found = digests.slab_sums(held, group.rows)
        self._sums.update(zip(range(group.number, group.number + group.rows), found, strict=True))
        self._spent.append(time.perf_counter() - begun)

    def _unproved(self, placed: Placed, stated: Sequence[int]) -> list[tuple[int, int]]:
        """Runs of slabs that were not summed, or are not what is stated."""
        first, count = self._dataset.layout.first_sum[placed.name], self._dataset.slabs[placed.name]
        runs: list[tuple[int, int]] = []
        for row in range(count):
            if self._sums.get(first + row) == stated[first + row]:
                continue
            if runs and sum(runs[-1]) == row:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((row, 1))
        return runs


def _groups(dataset: Dataset, placement: Placement) -> list[_Group]:
    """What is summed at once, by its start in the record; of scales, the values matter as well."""
    found = []
    for placed in placement.tensors.values():
        if placed.bit < 0 or placed.name in dataset.scales or not placed.slab_nbytes:
            continue
        slab, first, count = placed.slab_nbytes, dataset.layout.first_sum[placed.name], dataset.slabs[placed.name]
        step = at_once(slab, count)
        for row in range(0, count, step):
            rows = min(step, count - row)
            found.append(_Group(placed.offset + row * slab, rows * slab, first + row, rows))
    return sorted(found)
