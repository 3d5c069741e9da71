"""Small records that lie next to each other, fetched in one request."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from kvformat.storage.fetching import GAP_NBYTES, placing
from kvformat.storage.remote import Remote, Write

__all__ = ["Block", "grouped"]


class Block:
    """A part of a shard, fetched once when the first record in it is wanted, and given to each of them.

    Parameters
    ----------
    ranges
        (start in the shard, bytes) of what is wanted, ascending.
    """

    def __init__(self, remote: Remote, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        self._remote = remote
        self._name = name
        self._ranges = ranges
        self._lock = threading.Lock()
        self._first = ranges[0][0]
        self._starts = [start for start, _ in ranges]
        self._data: memoryview | None = None
        self._failure: Exception | None = None

    def covers(self, wanted: Sequence[tuple[int, int]]) -> bool:
        """Whether each of these ranges is part of one of the block's: between those, nothing was fetched."""
        for start, nbytes in wanted:
            at = bisect_right(self._starts, start) - 1
            if at < 0 or start + nbytes > sum(self._ranges[at]):
                return False
        return True

    def give(self, wanted: Sequence[tuple[int, int]], write: Write) -> None:
        """Write ranges, which it covers; what failed once is not tried again."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._data is None:
                try:
                    self._data = self._fetch()
                except Exception as error:
                    self._failure = error
                    raise
        for start, nbytes in wanted:
            write(start, self._data[start - self._first : start - self._first + nbytes])

    def _fetch(self) -> memoryview:
        last, size = self._ranges[-1]
        data = memoryview(bytearray(last + size - self._first))

        self._remote.fetch(self._name, self._ranges, placing(data, self._first))
        return data


def grouped(extents: Iterable[tuple[int, int]], most_nbytes: int) -> list[list[int]]:
    """Which of these (start, end), ascending, to fetch together: neighbours, as far as one request goes.

    Returns
    -------
    list
        Groups of positions among ``extents``.
    """
    groups: list[list[int]] = []
    first = last = 0
    for number, (start, end) in enumerate(extents):
        if groups and start - last <= GAP_NBYTES and end - first <= most_nbytes:
            groups[-1].append(number)
        else:
            groups.append([number])
            first = start
        last = end
    return groups
