"""Who made what of a plan, as one worker sees it: every shard counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from kvformat.extract.plan import Plan
from kvformat.extract.progress import Progress, Share, ShareTold

__all__ = ["Tally"]


class Tally:
    """Counts shards, and tells it as it goes. Safe in threads, which is why the report is told under its lock.

    A shard was there when the worker came, or this worker made it, or another one did. What was computed of a shard
    of which another worker's counts is taken back.
    """

    def __init__(self, plan: Plan, report: Progress) -> None:
        self._size = plan.shard_size
        self._report = report
        self._lock = threading.Lock()
        self._kept: set[int] = set()
        self._others: set[int] = set()
        self._elsewhere_nbytes = 0
        self._computed: dict[int, list[int]] = {}  # by shard: records, tokens, bytes
        self._made: set[int] = set()

    def keep(self, ordinals: Collection[int]) -> None:
        """Count shards that are there; those that were counted before stay what they are."""
        with self._lock:
            for ordinal in sorted({*ordinals} - self._kept - self._others - self._computed.keys()):
                tokens, nbytes = self._size(ordinal)
                self._kept.add(ordinal)
                self._report.advance(tokens=tokens, nbytes=nbytes, computed=False)

    def add(self, ordinal: int, *, tokens: int, nbytes: int, records: int = 1) -> None:
        """Count records that this worker computed."""
        with self._lock:
            if ordinal in self._kept | self._made:  # it turned out damaged, and is made again
                self._kept.discard(ordinal)
                self._forget(ordinal)
                self._tell()
            counts = self._computed.setdefault(ordinal, [0, 0, 0])
            for place, number in enumerate((records, tokens, nbytes)):
                counts[place] += number
            self._report.advance(tokens=tokens, nbytes=nbytes, computed=True)

    def settle(self, made: Collection[int], *, lost: Collection[int]) -> None:
        """Count whole shards of this worker, and take back those of which another worker's counts."""
        with self._lock:
            self._made |= {*made} - {*lost}
            for ordinal in self._made - self._computed.keys():  # all of its documents were skipped
                self._computed[ordinal] = [0, 0, 0]
            gone = self._computed.keys() & {*lost}
            for ordinal in gone:
                self._forget(ordinal)
            if gone:
                self._tell()

    def finished(self, ordinals: Collection[int]) -> None:
        """Count shards that are finished by now, by whomever."""
        with self._lock:
            others = {*ordinals} - self._kept - self._computed.keys()
            for ordinal in others ^ self._others:
                nbytes = self._size(ordinal)[1]
                self._elsewhere_nbytes += nbytes if ordinal in others else -nbytes
            if others != self._others:
                self._others = others
                self._report.elsewhere(nbytes=self._elsewhere_nbytes)

    def tell(self) -> None:
        """Tell how it stands."""
        with self._lock:
            self._tell()

    def measure(self, size: Callable[[int], int]) -> None:
        """Tell how it stands, by what shards hold in truth: fewer bytes than planned where documents were skipped.

        Parameters
        ----------
        size
            Bytes of payload of a shard.
        """
        with self._lock:
            self._tell(sum(map(size, self._kept)), sum(map(size, self._others)))

    def _forget(self, ordinal: int) -> None:
        self._computed.pop(ordinal, None)
        self._made.discard(ordinal)

    def _tell(self, kept_nbytes: int | None = None, elsewhere_nbytes: int | None = None) -> None:
        if not isinstance(self._report, ShareTold):
            return
        if kept_nbytes is None:
            kept_nbytes = sum(self._size(ordinal)[1] for ordinal in self._kept)
        records, tokens, nbytes = (sum(counts[place] for counts in self._computed.values()) for place in range(3))
        self._report.share(
            Share(
                shards=len(self._made),
                records=records,
                tokens=tokens,
                nbytes=nbytes,
                kept_nbytes=kept_nbytes,
                elsewhere_nbytes=self._elsewhere_nbytes if elsewhere_nbytes is None else elsewhere_nbytes,
            )
        )
