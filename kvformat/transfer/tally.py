"""How far a copy got, told to its caller; and how the threads of a copy learn that it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvformat.transfer.contents import Item

__all__ = ["Progress", "Share", "StoppedError", "Tally"]

Progress = Callable[[int, int], None]


class StoppedError(Exception):
    """Another thread of the copy failed, or it was interrupted. Never leaves the copy."""


class Tally:
    """Bytes that are at the target, proved.

    Parameters
    ----------
    total
        Bytes of all files.
    progress
        Called with (bytes done, bytes in all), from any thread, by one at a time.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let every thread stop at the next byte it counts."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether it is over."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Raise :class:`StoppedError` where it is over."""
        if self._stopped.is_set():
            raise StoppedError

    def add(self, nbytes: int) -> None:
        """Count bytes, and tell."""
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


class Share:
    """The bytes of one file: counted once, even where some are moved again."""

    def __init__(self, tally: Tally, item: Item) -> None:
        self._tally = tally
        self._left = item.nbytes
        self._lock = threading.Lock()

    def check(self) -> None:
        """As :meth:`Tally.check`."""
        self._tally.check()

    def add(self, nbytes: int) -> None:
        """Bytes of the file went their way."""
        self._tally.check()
        with self._lock:
            counted = min(nbytes, self._left)
            self._left -= counted
        if counted:
            self._tally.add(counted)

    def finish(self) -> None:
        """The whole file is at the target."""
        self.add(self._left)
