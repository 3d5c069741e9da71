"""Work on its way from one thread to another, bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["LISTEN_S", "Handover"]

T = TypeVar("T")

LISTEN_S = 0.2
"""How long the main thread waits at a time: a signal that comes just before a wait is noticed only when it ends."""


class Handover(Generic[T]):
    """A queue between a giving and a taking thread.

    Room is reserved before something is made, and released when it is done with: what is being made, waits, or is
    worked on, has no more bytes than allowed. Something larger passes alone.

    Who waits for room is woken once half of it is free: threads that woke each other for every item would spend more
    time on that than on small items.

    Parameters
    ----------
    most_nbytes
        Bytes that may be on the way.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most = most_nbytes
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._nbytes = 0
        self._ended = False
        self._failure: BaseException | None = None

    # -- the giving thread

    def reserve(self, nbytes: int) -> None:
        """Wait until so many bytes may be added.

        Raises
        ------
        BaseException
            What the taking thread failed with.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: self._failure is not None or self._has_room(nbytes), LISTEN_S):
                pass
            self._raise_failure()
            self._nbytes += nbytes

    def put(self, items: list[T], *, reserved: int, nbytes: int) -> None:
        """Give items that have ``nbytes`` together, for which ``reserved`` were reserved.

        Raises
        ------
        BaseException
            As :meth:`reserve`.
        """
        with self._changed:
            self._raise_failure()
            self._nbytes += nbytes - reserved
            self._items.extend(items)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is given."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing more is given, and what waits is not wanted."""
        with self._changed:
            self._ended = True
            self._items.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what the taking thread failed with, if it did."""
        with self._changed:
            self._raise_failure()

    # -- the taking thread

    def take(self) -> T | None:
        """The next item, once there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended)
            return self._items.popleft() if self._items else None

    def release(self, nbytes: int) -> None:
        """So many bytes are done with."""
        with self._changed:
            self._nbytes -= nbytes
            if 2 * self._nbytes <= self._most:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing is taken any more, for this reason."""
        with self._changed:
            self._failure = error
            self._items.clear()
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return not self._nbytes or self._nbytes + nbytes <= self._most

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
