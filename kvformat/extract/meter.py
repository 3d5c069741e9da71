"""How long each step of an extraction was busy, and which of them limits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from msgspec import Struct

__all__ = ["Limit", "PipelineMeter", "PipelineTimes", "Step", "Wait"]

Step = Literal["documents", "model", "copy", "hash", "disk"]
Wait = Literal["blocked", "starved"]

_STEPS: tuple[Step, ...] = ("documents", "model", "copy", "hash", "disk")
# Steps of one line take turns, lines run beside each other.
_HOST_LINES: tuple[tuple[Step, ...], ...] = (("documents", "model", "copy"), ("hash", "disk"))
_DEVICE_LINES: tuple[tuple[Step, ...], ...] = (("documents",), ("model",), ("copy",), ("hash", "disk"))
_WORTH_NAMING = 0.25
_WHOLE = -1  # in the place of a thread


class Limit(NamedTuple):
    """What keeps an extraction from being faster.

    Attributes
    ----------
    steps
        The steps of the line that is busy most, those that matter, the longest first.
    share
        Part of the time they were busy, 0 to 1.
    """

    steps: tuple[Step, ...]
    share: float

    def __str__(self) -> str:
        return f"{' and '.join(self.steps)} ({self.share * 100:.0f} % of the time)"


class PipelineTimes(Struct, frozen=True, kw_only=True):
    """Times of a pipeline so far, in seconds.

    Steps run beside each other, so busy times add up to more than ``elapsed_s``; a step that is busy all of that time
    is what limits the others. Where the device computes in the background and copies the results itself
    (``device_timed``, on CUDA), ``model_s`` and ``copy_s`` are the device's own times, and so is ``blocked_s``: it is
    how long the device had nothing to compute. Elsewhere these are times of the thread that runs the model.

    Attributes
    ----------
    elapsed_s
        From beginning to end, or to now.
    documents_s
        Getting the next documents from the plan.
    model_s
        Forward passes, until K and V exist on the device.
    copy_s
        From there to host memory; nothing on CPU.
    hash_s
        Checking values, the checksum of every slab, and bringing odd strides in order.
    disk_s
        Handing records to the storage. It takes them at once as long as it keeps up, so what this holds besides
        copying into the page cache is waiting for finished shards: their SHA-256, their sync, their upload.
    blocked_s
        The model waited, since as many bytes as are allowed waited to be stored; at the end, for the last ones.
    starved_s
        Storing waited for the model or the copy.
    records, skipped, tokens, nbytes
        Records handed to the storage and their tokens and bytes of tensors; documents left out.
    """

    elapsed_s: float = 0.0
    documents_s: float = 0.0
    model_s: float = 0.0
    copy_s: float = 0.0
    hash_s: float = 0.0
    disk_s: float = 0.0
    blocked_s: float = 0.0
    starved_s: float = 0.0
    device_timed: bool = False
    records: int = 0
    skipped: int = 0
    tokens: int = 0
    nbytes: int = 0

    def busy_s(self, step: Step) -> float:
        """Seconds a step was busy."""
        seconds: float = getattr(self, f"{step}_s")
        return seconds

    @property
    def limit(self) -> Limit | None:
        """What limits the pipeline; None where nothing was measured yet."""
        lines = _DEVICE_LINES if self.device_timed else _HOST_LINES
        line = max(lines, key=lambda steps: sum(map(self.busy_s, steps)))
        total = sum(map(self.busy_s, line))
        if not total or not self.elapsed_s:
            return None
        named = sorted((step for step in line if self.busy_s(step) >= _WORTH_NAMING * total), key=self.busy_s)
        return Limit(tuple(reversed(named)), sum(map(self.busy_s, named)) / self.elapsed_s)

    def since(self, earlier: PipelineTimes) -> PipelineTimes:
        """What was added after an earlier look at the same meter: for a display of what limits it now."""
        added = {
            name: getattr(self, name) - getattr(earlier, name)
            for name in self.__struct_fields__
            if name != "device_timed"
        }
        return PipelineTimes(**added, device_timed=self.device_timed)

    def __str__(self) -> str:
        limit = self.limit
        if limit is None:
            return "nothing measured yet"
        shares = ", ".join(f"{step} {self.busy_s(step) / self.elapsed_s * 100:.0f} %" for step in _STEPS)
        return f"limited by: {limit} [{shares}]"


class PipelineMeter:
    """Adds up the times of a pipeline. Safe in threads; may be read at any time, and used by several runs in turn.

    Parameters
    ----------
    clock
        Seconds that only grow.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys((f"{what}_s" for what in (*_STEPS, "blocked", "starved", "elapsed")), 0.0)
        self._counts = dict.fromkeys(("records", "skipped", "tokens", "nbytes"), 0)
        self._device_timed = False
        self._busy: dict[int, tuple[str, float]] = {}  # by thread: what it is doing, and since when

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block as elapsed."""
        with self._timed("elapsed", _WHOLE):
            yield

    @contextmanager
    def during(self, what: Step | Wait) -> Iterator[None]:
        """Count the time of the block. Blocks of one thread do not nest."""
        with self._timed(what, threading.get_ident()):
            yield

    def add(self, what: Step | Wait, seconds: float) -> None:
        """Count what something else measured: the device."""
        with self._lock:
            self._seconds[f"{what}_s"] += seconds

    def count(self, *, tokens: int, nbytes: int) -> None:
        """A record was handed to the storage."""
        with self._lock:
            self._counts["records"] += 1
            self._counts["tokens"] += tokens
            self._counts["nbytes"] += nbytes

    def skip(self) -> None:
        """A document was left out."""
        with self._lock:
            self._counts["skipped"] += 1

    def timed_by_device(self) -> None:
        """From now on, ``model``, ``copy`` and ``blocked`` are measured by the device."""
        with self._lock:
            self._device_timed = True

    def times(self) -> PipelineTimes:
        """Times so far, those under way included."""
        with self._lock:
            now = self._clock()
            sums: dict[str, Any] = self._seconds | self._counts
            for what, begun in self._busy.values():
                sums[f"{what}_s"] += now - begun
            return PipelineTimes(device_timed=self._device_timed, **sums)

    @contextmanager
    def _timed(self, what: str, line: int) -> Iterator[None]:
        with self._lock:
            self._busy[line] = what, self._clock()
        try:
            yield
        finally:
            with self._lock:
                _, begun = self._busy.pop(line)
                self._seconds[f"{what}_s"] += self._clock() - begun
