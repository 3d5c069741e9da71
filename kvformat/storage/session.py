"""What one process has of an object store: its client, and the threads of its requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvformat.storage.operation import Operation, Task
from kvformat.storage.requests import Pool, closed
from kvformat.storage.retry import Deadline, Timing
from kvformat.storage.silence import Silence
from kvformat.storage.store import Store

__all__ = ["Session"]

_MOST_GRACE_S = 5.0
_FIRST_DEADLINE_S = 60.0


class Session:
    """Client and requests of one process; neither exists before it is needed.

    Parameters
    ----------
    connect
        Makes a client.
    max_requests, max_nbytes
        See :class:`~kvformat.storage.requests.Pool`.
    attempt_timeout_s, deadline_s
        See :class:`~kvformat.storage.remote_options.RemoteOptions`.
    describe
        See :class:`~kvformat.storage.silence.Silence`.

    Attributes
    ----------
    silence
        What is told of requests that are tried again.
    says_md5
        False once an object of right content was said to have another MD5, or none.
    """

    says_md5 = True

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        max_requests: int,
        max_nbytes: int,
        attempt_timeout_s: float,
        deadline_s: float,
        timing: Timing,
        describe: Callable[[str], str],
    ) -> None:
        self.process = os.getpid()
        self._connect = connect
        self._attempt_timeout_s = attempt_timeout_s
        self._deadline_s = deadline_s
        self._timing = timing
        self.silence = Silence(describe, timing.clock)
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._retired: list[Store] = []
        self._closed = False
        self._heard = False
        self._grace_s = min(_MOST_GRACE_S, attempt_timeout_s)
        self._pool = Pool(max_requests=max_requests, max_nbytes=max_nbytes, grace_s=self._grace_s, clock=timing.clock)

    @property
    def store(self) -> Store:
        """The client."""
        store = self._store
        if store is None:
            with self._lock:
                if self._closed:
                    raise closed()
                if self._store is None:
                    self._store = self._connect()
                store = self._store
        return store

    def renew(self, outdated: Store) -> None:
        """Make another client, which looks for credentials anew; unless that was done meanwhile."""
        with self._lock:
            if self._store is outdated:
                self._store = self._connect()
                self._retired.append(outdated)  # requests are under way in it

    def deadline(self) -> Deadline:
        """For an operation that begins now; a store that never answered is not waited for as long as one that did."""
        return Deadline(self._deadline_s, self._timing.clock, unheard_s=None if self._heard else _FIRST_DEADLINE_S)

    def hear(self) -> None:
        """The store answered, if only to refuse."""
        self._heard = True

    def last_words(self) -> Deadline:
        """For cleaning up after a failure."""
        return Deadline(self._grace_s, self._timing.clock)

    def run(
        self,
        tasks: Sequence[Task],
        deadline: Deadline,
        *,
        answered: Callable[[int], None] | None = None,
        settle: bool = False,
    ) -> None:
        """Have all tasks done, in parallel.

        Parameters
        ----------
        answered
            Told, in this thread, the place of each task that was answered.
        settle
            After a failure, wait a little for requests that are under way.

        Raises
        ------
        StoreFault
            The first that another attempt would not mend; :class:`~kvformat.storage.retry.ExhaustedFault`.
        """
        _ = self.store  # where it cannot be made, that is raised here
        operation = Operation(
            tasks,
            clients=self,
            pool=self._pool,
            deadline=deadline,
            timing=self._timing,
            attempt_timeout_s=self._attempt_timeout_s,
            poll_s=self._attempt_timeout_s + self._grace_s,
            answered=answered,
        )
        operation.run(settle_s=self._grace_s if settle else 0.0)

    def ask(
        self, attempt: Callable[[Store, float], Any], deadline: Deadline, *, nbytes: int = 0, renews: bool = True
    ) -> Any:
        """The answer of one task."""
        answers: list[Any] = []
        self.run([Task(attempt, answers.append, nbytes, renews)], deadline)
        return answers[0]

    def close(self) -> None:
        """End threads, close clients."""
        self._pool.close()
        with self._lock:
            stores = [*self._retired, *([] if self._store is None else [self._store])]
            self._retired, self._store, self._closed = [], None, True
        for store in stores:
            store.close()
