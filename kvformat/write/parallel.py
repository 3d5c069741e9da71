"""A few requests side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["side_by_side"]

_THREADS = 8
T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of ``work`` for all items, in order; what has not begun when one fails is left out."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvformat-request") as pool:
        waiting = [pool.submit(work, item) for item in items]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
