"""Shards an earlier run finished, looked at again while new ones are made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Self

from kvformat.write.workshop import Workshop

__all__ = ["Recheck"]


class Recheck:
    """Looks at finished shards in a thread of its own, for a block; what turns out damaged counts as missing again.

    Parameters
    ----------
    ordinals
        The shards to look at: each worker those that are its own.
    allow_skips
        Whether a shard some of whose documents were skipped may stay.
    """

    def __init__(self, workshop: Workshop, ordinals: Sequence[int], *, allow_skips: bool) -> None:
        self._workshop = workshop
        self._allow_skips = allow_skips
        self._left = deque(ordinals)
        self._missing: set[int] = set()
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvformat-recheck", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()

    @property
    def running(self) -> bool:
        """Whether some are left to look at."""
        return self._thread.is_alive()

    def missing(self) -> Collection[int]:
        """Those found damaged so far; raises what looking failed with."""
        if self._failure is not None:
            raise self._failure
        return frozenset(self._missing)

    def wait(self) -> None:
        """Until all were looked at."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._left and not self._stopped:
                ordinal = self._left.popleft()
                if not self._workshop.check(ordinal, allow_skips=self._allow_skips):
                    self._missing.add(ordinal)
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that works
            self._failure = error
