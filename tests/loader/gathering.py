"""Ranks that are threads of one process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Ranks:
    """Runs a function on several ranks, each with an ``all_gather_object`` of its own.

    Attributes
    ----------
    messages
        Pickled size of every object that was gathered.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self.slots: list[Any] = [None] * count
        self.messages: list[int] = []

    def run(self, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
        """What the function returned or raised on each rank."""

        def on(rank: int) -> Any:
            def gather(obj: Any) -> list[Any]:
                data = pickle.dumps(obj)
                self.messages.append(len(data))
                self.slots[rank] = pickle.loads(data)
                self.barrier.wait(timeout=20)
                found = list(self.slots)
                self.barrier.wait(timeout=20)
                return found

            try:
                return function(rank, gather)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(on, range(self.count)))
