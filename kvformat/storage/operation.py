"""One operation: its requests in parallel, each repeated as its faults allow, until all are answered or one failed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any, NamedTuple, Protocol

from kvformat.storage.requests import Batch, Call, Outcome, Pool
from kvformat.storage.retry import Deadline, ExhaustedFault, Retries, Timing
from kvformat.storage.silence import Silence
from kvformat.storage.store import ExpiredFault, Store, StoreFault, ThrottledFault, TransportFault

__all__ = ["Clients", "Operation", "Task"]


class Clients(Protocol):
    """The client of this process, and a way to a better one."""

    @property
    def store(self) -> Store:
        """The client."""

    def renew(self, outdated: Store) -> None:
        """Make another one, unless this one was replaced already."""

    def hear(self) -> None:
        """The store answered, if only to refuse."""

    @property
    def silence(self) -> Silence:
        """What is told of requests that are tried again."""


class Task(NamedTuple):
    """A request to be answered.

    Attributes
    ----------
    attempt
        Takes the client and the seconds it may last; runs in another thread.
    deliver
        Takes the answer, once, in that thread.
    nbytes
        Bytes in memory meanwhile.
    renews
        Attempt it with a new client where the credentials have expired, once.
    """

    attempt: Callable[[Store, float], Any]
    deliver: Callable[[Any], None]
    nbytes: int = 0
    renews: bool = True


class Operation:
    """Drives tasks from the calling thread, where interrupts arrive.

    Parameters
    ----------
    attempt_timeout_s
        Most seconds of an attempt.
    poll_s
        No attempt that begins now is overdue before this many seconds.
    answered
        Told, in the calling thread, the place of each task that was answered.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        clients: Clients,
        pool: Pool,
        deadline: Deadline,
        timing: Timing,
        attempt_timeout_s: float,
        poll_s: float,
        answered: Callable[[int], None] | None = None,
    ) -> None:
        self._clients = clients
        self._pool = pool
        self._deadline = deadline
        self._timing = timing
        self._poll_s = poll_s
        self._answered = answered
        self._batch = Batch(lambda: min(attempt_timeout_s, deadline.left()))
        self._tasks = tasks
        self._used: list[Store | None] = [None] * len(tasks)
        self._calls = [
            Call(self._attempt_of(place), task.deliver, nbytes=task.nbytes) for place, task in enumerate(tasks)
        ]
        self._places = {call: place for place, call in enumerate(self._calls)}
        self._left = len(tasks)
        self._retries: dict[Call, Retries] = {}
        self._renewed: set[Call] = set()
        self._resting: list[tuple[float, int]] = []
        self._last: StoreFault | None = None

    def run(self, *, settle_s: float = 0.0) -> None:
        """Return when every answer was taken. After it raises, none is taken any more.

        Parameters
        ----------
        settle_s
            After a failure, wait this long for requests that are under way.
        """
        try:
            self._pool.submit(self._batch, self._calls)
            while self._left:
                self._handle(self._wait())
        finally:
            self._pool.cancel(self._batch)
            if self._left and settle_s:
                self._pool.settle(self._batch, settle_s)
            # Calls refer to this object, and to the memory their answers went to: nothing is to wait for a collection.
            self._calls, self._tasks, self._places = [], (), {}
            self._retries.clear()
            self._renewed.clear()

    def _attempt_of(self, place: int) -> Callable[[float], Any]:
        def attempt(timeout_s: float) -> Any:
            store = self._used[place] = self._clients.store
            return self._tasks[place].attempt(store, timeout_s)

        return attempt

    def _wait(self) -> Outcome | None:
        """The next news; None where it is time to look at the clock instead."""
        overdue = self._pool.expire()
        now = self._timing.clock()
        while self._resting and self._resting[0][0] <= now:
            self._pool.again(self._batch, self._calls[heapq.heappop(self._resting)[1]])
        try:
            return self._batch.news.get_nowait()
        except Empty:
            left = self._deadline.left()
        if left <= 0:
            attempts = max((retries.attempts for retries in self._retries.values()), default=1)
            raise ExhaustedFault(attempts, self._deadline.passed(), self._last)
        due = self._resting[0][0] if self._resting else float("inf")
        pause = max(0.0, min(overdue - now, due - now, left, self._poll_s))
        if self._timing.sleep is not None and len(self._resting) == len(self._batch.held):
            self._timing.sleep(pause)
            return None
        try:
            return self._batch.news.get(timeout=pause)
        except Empty:
            return None

    def _handle(self, news: Outcome | None) -> None:
        if news is None:
            return
        call, error = news.call, news.error
        if not isinstance(error, TransportFault):
            self._clients.hear()
            self._deadline.heard()
            if not isinstance(error, ThrottledFault):
                self._clients.silence.answered()
        if error is None:
            self._left -= 1
            if self._answered is not None:
                self._answered(self._places[call])
            return
        if news.final or not isinstance(error, StoreFault):
            raise error
        self._last = error
        place = self._places[call]
        if isinstance(error, ExpiredFault) and self._tasks[place].renews and call not in self._renewed:
            self._renewed.add(call)
            used = self._used[place]
            if used is not None:
                self._clients.renew(used)
            self._pool.again(self._batch, call)
            return
        retries = self._retries.get(call)
        if retries is None:
            retries = self._retries[call] = Retries(self._deadline)
        wait_s = retries.after(error)
        self._clients.silence.failed(error, seconds=self._deadline.passed(), left_s=self._deadline.left())
        heapq.heappush(self._resting, (self._timing.clock() + wait_s, place))
