"""How long each step of an extraction was busy, and which of them limits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
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
        self._seconds = dict.fromkeys((*_STEPS, "blocked", "starved", "elapsed"), 0.0)
        self._counts = dict.fromkeys(("records", "skipped", "tokens", "nbytes"), 0)
        self._device_timed = False
        self._busy: dict[int, _Span] = {}  # by thread

    def running(self) -> AbstractContextManager[None]:
        """Count the time of the block as elapsed."""
        return _Span(self._clock, self._lock, self._busy, self._seconds, "elapsed", _WHOLE)

    def during(self, what: Step | Wait) -> AbstractContextManager[None]:
        """Count the time of the block. Blocks of one thread do not nest."""
        return _Span(self._clock, self._lock, self._busy, self._seconds, what, threading.get_ident())

    def add(self, what: Step | Wait, seconds: float) -> None:
        """Count what something else measured: the device."""
        with self._lock:
            self._seconds[what] += seconds

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
            seconds = dict(self._seconds)
            busy = list(self._busy.values())
            now = self._clock()
            for span in busy:
                seconds[span.what] += now - span.begun
            sums: dict[str, Any] = {f"{what}_s": amount for what, amount in seconds.items()}
            return PipelineTimes(device_timed=self._device_timed, **sums, **self._counts)


class _Span:
    """A block whose time is counted. There are several a record, and a generator would take twice the time."""

    __slots__ = ("_busy", "_clock", "_line", "_lock", "_seconds", "begun", "what")

    def __init__(
        self,
        clock: Callable[[], float],
        lock: threading.Lock,
        busy: dict[int, _Span],
        seconds: dict[str, float],
        what: str,
        line: int,
    ) -> None:
        self._clock = clock
        self._lock = lock
        self._busy = busy
        self._seconds = seconds
        self._line = line
        self.what = what
        self.begun = 0.0

    def __enter__(self) -> None:
        self.begun = self._clock()
        self._busy[self._line] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._busy.pop(self._line, None)
            self._seconds[self.what] += self._clock() - self.begun
