"""One attempt of a call, bounded in time: as a coroutine that is cancelled, or in a thread that is given up."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

__all__ = ["run_coroutine", "run_in_thread"]

_T = TypeVar("_T")
_GRACE_S = 1.0


def run_coroutine(
    loop: asyncio.AbstractEventLoop, call: Callable[..., Coroutine[Any, Any, _T]], *args: Any, timeout_s: float
) -> _T:
    """Run a coroutine on the loop of another thread; it is cancelled at the time-out, or when the caller is.

    Raises
    ------
    TimeoutError
        At the time-out, also where the loop itself is stuck.
    """
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call(*args), timeout_s), loop)
    try:
        return future.result(timeout_s + _GRACE_S)
    except asyncio.CancelledError as error:
        raise TimeoutError("the request was cancelled") from error
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {timeout_s:g} s") from error
    finally:
        future.cancel()


def run_in_thread(call: Callable[..., _T], *args: Any, timeout_s: float) -> _T:
    """Run a blocking call in a thread of its own. At the time-out the thread is left to itself: none can be ended.

    Raises
    ------
    TimeoutError
        At the time-out.
    """
    outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((call(*args), None))
        except BaseException as error:  # noqa: BLE001 -- raised in the caller's thread
            outcome.put((None, error))

    threading.Thread(target=work, name="kvformat-attempt", daemon=True).start()
    try:
        result, error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return cast("_T", result)
