"""Draws looked at before their turn, so that what is elsewhere is on its way by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvformat.loader.batch import Batch

if TYPE_CHECKING:
    from kvformat.loader.source import Source
    from kvformat.read.stored import Wanted

__all__ = ["Foresight", "Sized"]

_MOST_RECORDS = 1 << 17
"""Looked at ahead: of records whose shards are all here, there would be no end."""


class Sized(NamedTuple):
    """A batch, and about how many bytes it will have."""

    batch: Batch
    nbytes: int


class _Seen(NamedTuple):
    sized: Sized
    coming: int


class Foresight:
    """Batches in their order, some of which were announced before they are asked for.

    Parameters
    ----------
    draw
        Gives the next batch, or None.
    wanted
        What is wanted of each record.
    most_nbytes
        Bytes that are fetched for batches not asked for yet; one batch at least is looked at ahead.
    """

    def __init__(self, draw: Callable[[], Sized | None], source: Source, wanted: Wanted, most_nbytes: int) -> None:
        self._draw = draw
        self._source = source
        self._wanted = wanted
        self._most = most_nbytes
        self._seen: deque[_Seen] = deque()
        self._coming = 0
        self._records = 0
        self._ended = False
        self._remote = source.is_remote
        self._by_record = source.fetches_records

    def next(self) -> Sized | None:
        """The next batch; None behind the last."""
        if not self._remote:
            return self._draw()
        self._look()
        if not self._seen:
            return None
        seen = self._seen.popleft()
        self._coming -= seen.coming
        self._records -= len(seen.sized.batch)
        self._look()
        return seen.sized

    def close(self) -> None:
        """Fetch nothing more for what was not asked for."""
        self._seen.clear()
        if self._remote:
            self._source.forget()

    def _look(self) -> None:
        """Announce what there is room for. Where records are fetched, in few calls: neighbours come together then."""
        if self._ended or (self._seen and self._coming > (self._most // 2 if self._by_record else self._most)):
            return
        while not self._ended and (not self._seen or (self._coming < self._most and self._records < _MOST_RECORDS)):
            drawn: list[Sized] = []
            nbytes = 0
            while not drawn or (self._by_record and self._coming + nbytes < self._most):
                sized = self._draw()
                if sized is None:
                    self._ended = True
                    break
                drawn.append(sized)
                nbytes += sized.nbytes
            numbers = [number for sized in drawn for number in sized.batch.records]
            coming = self._source.announce(numbers, self._wanted)
            for sized in drawn:
                share = coming * sized.nbytes // max(nbytes, 1)
                self._seen.append(_Seen(sized, share))
                self._coming += share
            self._records += len(numbers)
