"""Requests under way: how many at once, in whose turn, and in which threads.

The threads belong to one process and one :class:`Pool`; they begin when there is work, and end when there is none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, NamedTuple

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.store import StoreFault, TransportFault

__all__ = ["Batch", "Call", "Outcome", "Pool", "closed"]

_IDLE_S = 5.0
_MOST_STUCK = 64
_CLOSING_S = 5.0


class Call:
    """One request: what an attempt of it does, and what becomes of the answer.

    Parameters
    ----------
    attempt
        Takes seconds it may last, and gives the answer; runs in a thread of the pool.
    deliver
        Takes the answer of the one attempt that counts, in the same thread.
    nbytes
        Bytes in memory meanwhile.
    """

    __slots__ = ("attempt", "deliver", "nbytes")

    def __init__(
        self, attempt: Callable[[float], Any], deliver: Callable[[Any], None] | None = None, *, nbytes: int = 0
    ) -> None:
        self.attempt = attempt
        self.deliver = deliver
        self.nbytes = nbytes


class Outcome(NamedTuple):
    """News of a call: answered, or how it failed. ``final`` failures are not the store's."""

    call: Call
    answer: Any = None
    error: BaseException | None = None
    final: bool = False


class Batch:
    """The calls of one operation.

    Attributes
    ----------
    news
        What happened to them.
    timeout
        Says how long an attempt that begins now may last; not above zero where it is too late to begin.
    """

    def __init__(self, timeout: Callable[[], float]) -> None:
        self.news: SimpleQueue[Outcome] = SimpleQueue()
        self.timeout = timeout
        self.queued: deque[Call] = deque()
        self.held: set[Call] = set()
        self.delivering: set[Call] = set()
        self.cancelled = False


class _Attempt:
    __slots__ = ("batch", "call", "overdue")

    def __init__(self, batch: Batch, call: Call) -> None:
        self.batch = batch
        self.call = call
        self.overdue = float("inf")


class Pool:
    """Runs calls in threads, bounded in number and bytes; batches take turns, and within one the first comes first.

    A call that failed keeps its place until :meth:`again` or :meth:`cancel`: while a store refuses, waiting calls
    keep others from being refused as well. Whoever waits for news calls :meth:`expire`, for all batches.

    Parameters
    ----------
    max_requests, max_nbytes
        Bounds of what is under way; a single call larger than ``max_nbytes`` goes alone.
    grace_s
        An attempt that lasts this much longer than it may is given up: its thread is left to itself, and its answer
        dropped when it comes.
    """

    def __init__(self, *, max_requests: int, max_nbytes: int, grace_s: float, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_nbytes = max_nbytes
        self._grace_s = grace_s
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._delivered = threading.Condition(self._lock)
        self._batches: set[Batch] = set()
        self._turns: deque[Batch] = deque()
        self._ready: deque[_Attempt] = deque()
        self._running: set[_Attempt] = set()
        self._held = 0
        self._held_nbytes = 0
        self._threads: set[threading.Thread] = set()
        self._idle = 0  # of them: those that will look for work next
        self._stuck = 0
        self._closed = False

    # -- for operations -------------------------------------------------------------------------------------------

    def submit(self, batch: Batch, calls: Iterable[Call]) -> None:
        """Queue the calls of a new batch."""
        with self._lock:
            if self._closed:
                raise closed()
            self._batches.add(batch)
            batch.queued.extend(calls)
            if batch.queued:
                self._turns.append(batch)
            self._admit()

    def again(self, batch: Batch, call: Call) -> None:
        """Attempt a call that failed once more, in the place it has."""
        with self._lock:
            if call in batch.held:
                self._ready.append(_Attempt(batch, call))
                self._wake()

    def expire(self) -> float:
        """Give up attempts that are overdue; when the next one will be."""
        with self._lock:
            now = self._clock()
            for attempt in [attempt for attempt in self._running if attempt.overdue <= now]:
                self._running.remove(attempt)
                self._stuck += 1
                if attempt.batch.cancelled:
                    self._release(attempt.batch, attempt.call)
                else:
                    fault = TransportFault("no answer, and no end, within the time given")
                    attempt.batch.news.put(Outcome(attempt.call, error=fault))
            self._admit()
            return min((attempt.overdue for attempt in self._running), default=float("inf"))

    def cancel(self, batch: Batch) -> None:
        """Drop what is queued and waits; of what is under way, the answers. Nothing is delivered after this."""
        batch.cancelled = True
        with self._lock:
            self._batches.discard(batch)
            self._withdraw(batch)
            running = {attempt.call for attempt in self._running if attempt.batch is batch}
            for call in batch.held - running - batch.delivering:
                self._release(batch, call)
            self._admit()
            try:
                self._delivered.wait_for(lambda: not batch.delivering)
            except KeyboardInterrupt:  # the promise is kept, unless the user insists
                self._delivered.wait_for(lambda: not batch.delivering)
                raise

    def settle(self, batch: Batch, timeout_s: float) -> None:
        """Wait a while for attempts of a cancelled batch that are under way."""
        with self._lock:
            self._delivered.wait_for(lambda: not batch.held, timeout=timeout_s)

    def close(self) -> None:
        """End the threads. Operations under way fail; threads that a store does not let go are left to it."""
        with self._lock:
            self._closed = True
            for batch in self._batches:
                batch.news.put(Outcome(Call(lambda _: None), error=closed(), final=True))
            self._work.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        end = time.monotonic() + _CLOSING_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    # -- the threads ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free places to the batches in turn. None overtakes one that waits for bytes."""
        while self._turns and self._held < self._max_requests:
            batch = self._turns[0]
            call = batch.queued[0]
            if self._held and self._held_nbytes + call.nbytes > self._max_nbytes:
                break
            self._turns.popleft()
            batch.queued.popleft()
            if batch.queued:
                self._turns.append(batch)
            batch.held.add(call)
            self._held += 1
            self._held_nbytes += call.nbytes
            self._ready.append(_Attempt(batch, call))
        self._wake()

    def _withdraw(self, batch: Batch) -> None:
        """Begin no more of it."""
        batch.queued.clear()
        if batch in self._turns:
            self._turns.remove(batch)
        for attempt in [attempt for attempt in self._ready if attempt.batch is batch]:
            self._ready.remove(attempt)

    def _release(self, batch: Batch, call: Call) -> None:
        batch.held.remove(call)
        self._held -= 1
        self._held_nbytes -= call.nbytes
        self._delivered.notify_all()

    def _wake(self) -> None:
        if not self._ready:
            return
        self._work.notify(len(self._ready))
        for _ in range(len(self._ready) - self._idle):
            thread = threading.Thread(target=self._serve, name="kvformat-remote", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system allows no more; those there are will do
                if len(self._threads) > self._stuck:
                    return
                raise make_error("E203", f"no thread could be started ({error}): raise `ulimit -u`") from error
            self._threads.add(thread)
            self._idle += 1

    def _serve(self) -> None:
        try:
            while (attempt := self._next()) is not None:
                if not self._run(attempt):
                    break
                del attempt
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self) -> _Attempt | None:
        with self._lock:
            try:
                while not self._ready:
                    if self._closed or not (self._work.wait(_IDLE_S) or self._ready):
                        return None
                if self._closed:
                    return None
                attempt = self._ready.popleft()
            finally:
                self._idle -= 1
            attempt.overdue = self._clock() + max(0.0, attempt.batch.timeout()) + self._grace_s
            self._running.add(attempt)
            return attempt

    def _run(self, attempt: _Attempt) -> bool:
        """Make an attempt; False where it was given up meanwhile, and the thread replaced."""
        batch, call = attempt.batch, attempt.call
        try:
            outcome = Outcome(call, answer=self._attempt(attempt))
        except StoreFault as fault:
            outcome = Outcome(call, error=fault)
        except KVFormatError as error:
            outcome = Outcome(call, error=error, final=True)
        except BaseException as error:  # noqa: BLE001 -- a thread that dies of it would leave its operation waiting
            outcome = Outcome(call, error=StoreFault(f"{type(error).__name__}: {error}"))
        with self._lock:
            if attempt not in self._running:
                self._stuck -= 1
                return False
            self._running.remove(attempt)
            if batch.cancelled:
                self._idle += 1
                self._withdraw(batch)
                self._release(batch, call)
                self._admit()
                return True
            if outcome.error is not None:
                self._idle += 1
                batch.news.put(outcome)  # and keeps its place
                return True
            batch.delivering.add(call)
        try:
            if call.deliver is not None:
                call.deliver(outcome.answer)
                outcome = Outcome(call)
        except BaseException as error:  # noqa: BLE001 -- it is raised where the operation is waited for
            outcome = Outcome(call, error=error, final=True)
        with self._lock:
            if outcome.final:
                batch.cancelled = True
                self._withdraw(batch)
            batch.delivering.remove(call)
            self._idle += 1
            self._release(batch, call)  # tells who waits in `cancel` as well
            self._admit()
        batch.news.put(outcome)
        return True

    def _attempt(self, attempt: _Attempt) -> Any:
        timeout_s = attempt.batch.timeout()
        if timeout_s <= 0:
            raise TransportFault("no time was left")
        if self._stuck >= _MOST_STUCK:
            raise TransportFault(f"{self._stuck} earlier requests never came back")
        return attempt.call.attempt(timeout_s)


def closed() -> KVFormatError:
    """What an operation says that was under way when its remote was closed."""
    return make_error("E203", "the remote storage was closed meanwhile: open it again")
