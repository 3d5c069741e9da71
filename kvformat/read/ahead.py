"""Work that is done ahead of its use, by threads that never keep a process alive."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Ahead"]

_IDLE_S = 10.0


class Ahead:
    """Runs jobs in the order they were submitted; what is still to be done is dropped by :meth:`forget`.

    Jobs do not raise: whoever needs a result finds its failure where the result would be. Threads begin with the first
    job, end when there has been none for a while, and are daemons. A forked child begins with none of either.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._begin()

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done."""
        if self._process != os.getpid():
            self._begin()
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):  # of those that were told before, some may not have woken up yet
                self._changed.notify()
            elif self._running < self._threads:
                self._running += 1
                try:
                    threading.Thread(target=_work, args=(self,), name="kvformat-ahead", daemon=True).start()
                except RuntimeError:  # the system allows no more, or the interpreter ends: it is done at its use
                    self._running -= 1

    def forget(self) -> None:
        """Drop the jobs that were not begun."""
        if self._process == os.getpid():
            with self._changed:
                self._jobs.clear()

    def take(self) -> Callable[[], None] | None:
        """The next job for a thread; None where the thread shall end."""
        with self._changed:
            self._idle += 1
            try:
                self._changed.wait_for(lambda: self._jobs, timeout=_IDLE_S)
            finally:
                self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._running -= 1
            return None

    def _begin(self) -> None:
        self._process = os.getpid()
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running = self._idle = 0


def _work(ahead: Ahead) -> None:
    while (job := ahead.take()) is not None:
        job()
        del job  # what it fetched would else be held until the next one
