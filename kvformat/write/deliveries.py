"""Complete shards on their way to where they count, in helper threads, within a bound of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvformat.write.staging import Receipt

__all__ = ["Deliveries"]

_THREADS = 2


class Deliveries:
    """Finishes shards while the next ones are written. Threads start with the first and end with :meth:`close`.

    Parameters
    ----------
    max_nbytes
        Most bytes of shards that wait or are in work; one shard may be larger.
    """

    def __init__(self, *, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._pool: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._waiting: dict[Future[Receipt], int] = {}
        self._failure: BaseException | None = None

    def submit(self, work: Callable[[], Receipt], nbytes: int) -> Future[Receipt]:
        """Let a helper thread do this, once there is room; raises what an earlier one failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._has_room(nbytes))
            self._raise_failure()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvformat-deliver")
            future = self._pool.submit(work)
            self._waiting[future] = nbytes
        future.add_done_callback(self._done)
        return future

    def flush(self) -> None:
        """Wait for all of them; raises what the first that failed did."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._failure is not None)
            self._raise_failure()

    def close(self, *, keep: bool) -> None:
        """End the threads. More than once is harmless.

        Parameters
        ----------
        keep
            Whether what waits is done first; what is in work is, in any case.
        """
        with self._changed:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=not keep)

    def _has_room(self, nbytes: int) -> bool:
        return not self._waiting or sum(self._waiting.values()) + nbytes <= self._max_nbytes

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _done(self, future: Future[Receipt]) -> None:
        with self._changed:
            del self._waiting[future]
            if not future.cancelled() and self._failure is None:
                self._failure = future.exception()
            self._changed.notify_all()
