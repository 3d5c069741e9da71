"""Threads that pack: they end with the iteration they belong to, and hold up the end of no process."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Packers"]

_PATIENCE_S = 5.0
"""For work that is under way at the end."""

_Job = tuple[Future[Any], Callable[[], Any]]
_OPEN: weakref.WeakSet[Packers] = weakref.WeakSet()


class Packers:
    """At most so many threads, begun as there is work for them.

    They are daemons: one that waits for an object store would else hold up the end of the process for as long as the
    store is waited for. What is under way when the process ends is waited for, but not longer than a little.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have a thread do it."""
        future: Future[Any] = Future()
        if len(self._threads) < self._most:
            # It is given the queue alone: an iteration that nobody refers to shall not be kept by its threads.
            thread = threading.Thread(target=_serve, args=(self._jobs,), name="kvformat-load", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
                _OPEN.add(self)
            except RuntimeError:  # the system allows no more; those there are will do
                if not self._threads:
                    raise
        self._jobs.put((future, work))
        return future

    def close(self) -> None:
        """Begin nothing more, end the threads, and wait for them a little, unless it is one of them that calls."""
        _OPEN.discard(self)
        if self._process != os.getpid():  # a fork has none of its threads, and perhaps their locks
            return
        with contextlib.suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        if threading.current_thread() not in self._threads:
            end = time.monotonic() + _PATIENCE_S
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 -- raised where the result is asked for
                future.set_exception(error)
        del job, future, work  # else they last until the next one


@atexit.register
def _end() -> None:
    """No thread shall be in the midst of a copy when the interpreter goes."""
    for packers in list(_OPEN):
        packers.close()
