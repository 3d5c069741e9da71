"""Which faults are tried again, when, and for how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tenacity import DoSleep, RetryCallState, Retrying, retry_if_exception_type

from kvformat.storage.store import StoreFault, ThrottledFault, TransportFault

__all__ = ["Deadline", "ExhaustedFault", "Retries", "Timing"]

_FIRST_WAIT_S = 0.2
_MOST_WAIT_S = 10.0


class ExhaustedFault(StoreFault):
    """Tried again until the deadline, in vain.

    Attributes
    ----------
    attempts
        Of the request that failed.
    seconds
        Since the operation began.
    last
        How the last attempt failed; None where none came to an end.
    """

    def __init__(self, attempts: int, seconds: float, last: StoreFault | None) -> None:
        super().__init__(str(last) if last is not None else "no answer came")
        self.attempts = attempts
        self.seconds = seconds
        self.last = last


class Timing:
    """Clock and waits.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    sleep
        Waits, where nothing else can happen meanwhile; None is to wait for news until then.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] | None = None
    ) -> None:
        self.clock = clock
        self.sleep = sleep


class Deadline:
    """How long an operation goes on trying.

    Parameters
    ----------
    seconds
        From now, and from each :meth:`renew`.
    unheard_s
        From now, as long as nothing is heard of the store.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], *, unheard_s: float | None = None) -> None:
        self._seconds = seconds
        self._clock = clock
        self._begun = clock()
        self._end = self._begun + (seconds if unheard_s is None else min(seconds, unheard_s))

    def heard(self) -> None:
        """The store answered, if only to refuse: it is there."""
        self._end = max(self._end, self._begun + self._seconds)

    def renew(self) -> None:
        """Bytes arrived: a transfer may take as long as it gets on."""
        self._end = self._clock() + self._seconds

    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end - self._clock()

    def passed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._begun


class Retries:
    """The attempts of one request.

    Waits grow exponentially, and are drawn between nothing and all of that ("full jitter"): clients that failed
    together do not come back together. Nothing is remembered from one request to the next, so that a storm of
    refusals is over with the first answer. The draws are the system's: neither seeded by, nor taken from, the
    program's own random numbers, which are the same on all ranks.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._draw = random.SystemRandom().random
        self._retrying = Retrying(
            retry=retry_if_exception_type((TransportFault, ThrottledFault)),
            wait=self._wait,
            stop=self._is_over,
            reraise=True,
        )
        self._retrying.begin()
        self._state = RetryCallState(self._retrying, None, (), {})

    @property
    def attempts(self) -> int:
        """The attempt that is under way, counted from 1."""
        return self._state.attempt_number

    def after(self, fault: StoreFault) -> float:
        """Seconds to wait after this failure of the last attempt.

        Raises
        ------
        StoreFault
            The same fault where another attempt would not help; :class:`ExhaustedFault` where time is up.
        """
        self._state.set_exception((type(fault), fault, fault.__traceback__))
        try:
            do = self._retrying.iter(self._state)
        except (TransportFault, ThrottledFault):
            raise ExhaustedFault(self.attempts, self._deadline.passed(), fault) from None
        assert isinstance(do, DoSleep)
        self._state.prepare_for_next_attempt()
        return float(do)

    def _wait(self, state: RetryCallState) -> float:
        most = min(_FIRST_WAIT_S * 2.0 ** min(state.attempt_number - 1, 32), _MOST_WAIT_S)
        return most * self._draw()

    def _is_over(self, state: RetryCallState) -> bool:
        """A wait beyond the deadline would only make the failure late."""
        return state.upcoming_sleep >= self._deadline.left()
