"""A store from which nothing is got, told to the log: whoever waits for it would else not know for what."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Silence"]

_FIRST_S = 10.0
_NEXT_S = 60.0
_LOG = logging.getLogger("kvformat")


class Silence:
    """Says how long requests have failed that are tried again.

    Nothing here waits, locks or raises: of two threads at once, each may say it.

    Parameters
    ----------
    describe
        The store, and what a fault says, fit for a message.
    """

    def __init__(self, describe: Callable[[str], str], clock: Callable[[], float]) -> None:
        self._describe = describe
        self._clock = clock
        self._answered = self._next = float("-inf")

    def answered(self) -> None:
        """The store answered a request, if only to refuse it for good."""
        self._answered = self._clock()

    def failed(self, fault: Exception, *, seconds: float, left_s: float) -> None:
        """A request failed, and is tried again.

        Parameters
        ----------
        seconds
            How long its operation has been under way: before, nothing was waited for.
        left_s
            For how long it is tried at most.
        """
        now = self._clock()
        silent = min(seconds, now - self._answered)
        if silent >= _FIRST_S and now >= self._next:
            self._next = now + _NEXT_S
            what = self._describe(str(fault))
            _LOG.warning("%s; no success for %.0f s, trying again for up to %.0f s", what, silent, left_s)
