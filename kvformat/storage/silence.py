"""A store that gives no answer, told to the log: whoever waits for it would else not know for what."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Silence"]

_FIRST_S = 10.0
_NEXT_S = 60.0
_LOG = logging.getLogger("kvformat")


class Silence:
    """Requests that fail and are tried again, from the first of them to the next answer.

    Nothing here waits, locks or raises: an answer that comes meanwhile ends it, and lines are at most one too many.

    Parameters
    ----------
    describe
        The store, and what a fault says, fit for a message.
    """

    def __init__(self, describe: Callable[[str], str], clock: Callable[[], float]) -> None:
        self._describe = describe
        self._clock = clock
        self._since: float | None = None
        self._next = 0.0

    def end(self) -> None:
        """The store answered."""
        self._since = None

    def failed(self, fault: Exception, left_s: float) -> None:
        """A request failed, and is tried again for ``left_s`` seconds at most."""
        now = self._clock()
        since = self._since
        if since is None:
            self._since, self._next = now, now + _FIRST_S
        elif now >= self._next:
            self._next = now + _NEXT_S
            what = self._describe(str(fault))
            _LOG.warning("%s; no answer for %.0f s, trying again for up to %.0f s", what, now - since, left_s)
