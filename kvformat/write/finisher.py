"""Work on complete shards in helper threads, given back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kvformat.write.staging import Receipt

__all__ = ["MOST_WAITING", "Finisher"]

_THREADS = 2
MOST_WAITING = 3
"""Complete shards a writer goes on before."""


class Finisher:
    """Completes shards, or checks those of an earlier run, while the next one is written.

    Threads start with the first shard and end with :meth:`close`.

    Parameters
    ----------
    keep
        Whether closing lets shards that wait become complete: they are what a later run starts from.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[Receipt]] = deque()

    def submit(self, work: Callable[[], Receipt]) -> None:
        """Let a helper thread do this."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvformat-finish")
        self._waiting.append(self._pool.submit(work))

    def ready(self) -> Iterator[Receipt]:
        """Receipts of what is done, in the order it was submitted; waits only where too much is in work."""
        while self._waiting and (len(self._waiting) > MOST_WAITING or self._waiting[0].done()):
            yield self._waiting.popleft().result()

    def rest(self) -> Iterator[Receipt]:
        """All receipts that were not given back yet, in order; waits for them."""
        while self._waiting:
            yield self._waiting.popleft().result()

    def close(self) -> None:
        """End the threads; what is in work is completed first. More than once is harmless."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=not self._keep)
        self._waiting.clear()
