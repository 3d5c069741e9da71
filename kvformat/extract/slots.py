"""Places of names in a dataset's table of names, many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvformat.spec import digests

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset

__all__ = ["slots_of_names", "slots_of_records"]


def slots_of_names(dataset: Dataset, names: Sequence[str]) -> NDArray[np.int64]:
    """Slot of each name in the table of names, -1 where the dataset has none of it: ``[n]`` int64."""
    index = dataset.index
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    keys = np.array([digests.name_key(one) for one in encoded], np.uint64)
    found = np.full(len(names), -1, np.int64)
    total = dataset.num_names
    # Equal keys may lie in two parts; all parts are asked, and few datasets have more than one.
    for number in range(len(index.name_keys.parts)):
        columns = index.name_keys.part(number)
        table, slots = columns.arrays["key"], columns.arrays["slot"]
        first, last = np.searchsorted(table, keys), np.searchsorted(table, keys, side="right")
        for at in np.flatnonzero(last > first).tolist():
            for place in range(first[at], last[at]):
                slot = int(slots[place])
                if slot < total and index.name_at(slot) == names[at]:
                    found[at] = slot
    return found


def slots_of_records(dataset: Dataset, records: Iterable[int]) -> NDArray[np.bool_]:
    """Which slots of the table of names belong to these records: ``[names]`` bool."""
    numbers = np.array(sorted(records), np.int64)
    chosen = np.zeros(dataset.num_names, np.bool_)
    begins, ends = (dataset.index.first_names(numbers + more) for more in (0, 1))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        chosen[begin:end] = True
    return chosen
