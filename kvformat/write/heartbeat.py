"""Something done every so often in the background, as long as its owner lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Heartbeat"]


class Heartbeat:
    """Calls a function every ``every_s`` seconds in a thread of its own, from :meth:`start` to :meth:`stop`.

    ``every_s`` may be a function, which is asked before each pause.
    """

    def __init__(self, beat: Callable[[], None], *, every_s: float | Callable[[], float]) -> None:
        self._beat = beat
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvformat-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; returns when the last beat is over. More than once is harmless."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s() if callable(self._every_s) else self._every_s):
            self._beat()
