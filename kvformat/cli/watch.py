"""What an extraction says of itself, as progress and as a summary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvformat.cli import output
from kvformat.cli.progress import Meter

if TYPE_CHECKING:
    from kvformat.extract import Phase, PipelineTimes
    from kvformat.extract.progress import Share

__all__ = ["Watch"]

_PHASES = {
    "read": "reading documents",
    "load": "loading the model",
    "identify": "hashing the weights",
    "check": "trying batches",
    "extract": "extracting",
    "wait": "waiting for other workers",
    "prove": "hashing shards of an earlier run",
    "publish": "publishing",
}


class Watch:
    """Turns what a job reports into progress, and counts for the summary. Rates are of what this process computed.

    Attributes
    ----------
    extracted
        Whether anything had to be written.
    shards, records
        Made by this process; None as long as nobody told, and where other processes do the work.
    tokens, nbytes
        Computed by this process; ``resumed_nbytes`` were there when it began, ``elsewhere_nbytes`` are what other
        workers made meanwhile. At the end each shard is in one of them: what was computed of one that another worker
        finished first, or of one found damaged, is not counted.
    spent
        Times of the steps of this process; None where nothing was computed.
    """

    def __init__(self, shown: Meter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._lock = threading.Lock()  # several threads of the job report
        self._begun = clock()
        self._ended: float | None = None
        self.extracted = False
        self.shards: int | None = None
        self.records: int | None = None
        self.tokens = self.nbytes = self.resumed_nbytes = self.elsewhere_nbytes = 0
        self.spent: PipelineTimes | None = None

    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """A phase begins."""
        what = _PHASES.get(name, name)
        with self._lock:
            if name == "extract":
                self.extracted = True
                self._begun = self._clock()
                self._shown.begin(f"{what} {tokens:,} tokens", total=nbytes)
                return
            if self.extracted and self._ended is None:
                self._ended = self._clock()
            self._shown.begin(what)

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """Records are there."""
        with self._lock:
            if computed:
                self.tokens += tokens
                self.nbytes += nbytes
            else:
                self.resumed_nbytes += nbytes
            self._show()

    def elsewhere(self, *, nbytes: int) -> None:
        """Other workers got on."""
        with self._lock:
            self.elsewhere_nbytes = nbytes
            self._show()

    def share(self, share: Share) -> None:
        """How it stands, in place of what was counted."""
        with self._lock:
            self.shards, self.records = share.shards, share.records
            self.tokens, self.nbytes = share.tokens, share.nbytes
            self.resumed_nbytes, self.elsewhere_nbytes = share.kept_nbytes, share.elsewhere_nbytes
            self._show()

    def times(self, times: PipelineTimes) -> None:
        """Times of the steps so far."""
        self.spent = times

    @property
    def seconds(self) -> float:
        """How long extraction took, or takes so far."""
        return max((self._clock() if self._ended is None else self._ended) - self._begun, 1e-9)

    def rates(self) -> str:
        """Tokens and bytes a second."""
        return f"{self.tokens / self.seconds:,.0f} tokens/s, {output.rate_text(self.nbytes / self.seconds)}"

    @property
    def limit(self) -> str | None:
        """What limits the rate."""
        found = None if self.spent is None else self.spent.limit
        return None if found is None else str(found)

    def _show(self) -> None:
        limit = self.limit
        note = self.rates() + ("" if limit is None else f", limited by {limit}")
        self._shown.update(self.nbytes + self.resumed_nbytes + self.elsewhere_nbytes, note=note)
