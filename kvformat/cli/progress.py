"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from kvformat.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar", "Lines", "Meter", "Nothing", "meter"]

_INTERVAL_S = 10.0


class Meter(Protocol):
    """Shows how far a task got. Used by one thread at a time; leaving the block ends the display."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def begin(self, what: str, *, total: int | None = None) -> None:
        """Begin a phase of ``total`` bytes, or of unknown size."""

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """``done`` bytes of the phase are done; ``note`` says more, such as a rate."""


class Lines:
    """A line when a phase begins, then one every ten seconds at most.

    Parameters
    ----------
    clock
        Seconds from any origin; tests bring their own.
    phases
        Whether the beginning of a phase is worth a line.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, phases: bool = True) -> None:
        self._clock = clock
        self._phases = phases
        self._what = ""
        self._total: int | None = None
        self._said = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def begin(self, what: str, *, total: int | None = None) -> None:
        """Begin a phase."""
        self._what, self._total, self._said = what, total, self._clock()
        if self._phases:
            output.complain(f"{what}: {output.size_text(total)}" if total else what)

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """Say how far the phase is, unless something was said a moment ago."""
        now = self._clock()
        if now - self._said < _INTERVAL_S:
            return
        self._said = now
        whole = total or self._total
        parts = [output.size_text(done) + (f" of {output.size_text(whole)}, {done * 100 // whole} %" if whole else "")]
        output.complain(", ".join([f"{self._what}: {parts[0]}", *([note] if note else [])]))


class Bar:
    """A bar that is redrawn in place, and gone when the block is left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %", markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr, markup=False, emoji=False, highlight=False),
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, what: str, *, total: int | None = None) -> None:
        """Begin a phase in place of the one before."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total, note="")

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """Redraw, at the bar's own pace."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)


class Nothing:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def begin(self, what: str, *, total: int | None = None) -> None:
        """Show nothing."""

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """Show nothing."""


def meter(*, phases: bool = True, silent: bool = False) -> Meter:
    """The meter that suits standard error.

    Parameters
    ----------
    phases
        Whether plain lines announce what begins.
    silent
        Say nothing: another process does.
    """
    if silent:
        return Nothing()
    return Bar() if output.is_terminal(sys.stderr) else Lines(phases=phases)
