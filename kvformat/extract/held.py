"""What is staged of a plan is held as long as the model is loaded, and no longer."""

from __future__ import annotations

import os
from pathlib import Path

from kvformat.extract.meter import PipelineTimes
from kvformat.extract.options import WorkOptions
from kvformat.extract.plan import Plan
from kvformat.extract.progress import Phase, Progress, Share, ShareTold
from kvformat.storage.remote import Remote
from kvformat.write.holding import Hold, hold_staged

__all__ = ["LettingGo", "hold_of"]


def hold_of(plan: Plan, target: Path | Remote, work: WorkOptions, *, spool: str | os.PathLike[str] | None) -> Hold:
    """A hold on what is staged of a plan; errors as for :func:`kvformat.write.holding.hold_staged`."""
    return hold_staged(target, plan.digest, rank=work.world.rank, world_size=work.world.size, spool=spool)


class LettingGo:
    """Passes on how a job of other processes gets on, and lets go once one of them is at work: it holds the rest."""

    def __init__(self, report: Progress, hold: Hold) -> None:
        self._report = report
        self._hold = hold

    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """See :class:`Progress`."""
        if name == "publish":
            self._hold.release()
        self._report.phase(name, tokens=tokens, nbytes=nbytes)

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """See :class:`Progress`."""
        if computed:
            self._hold.release()
        self._report.advance(tokens=tokens, nbytes=nbytes, computed=computed)

    def elsewhere(self, *, nbytes: int) -> None:
        """See :class:`Progress`."""
        self._report.elsewhere(nbytes=nbytes)

    def times(self, times: PipelineTimes) -> None:
        """See :class:`Progress`."""
        self._report.times(times)

    def share(self, share: Share) -> None:
        """See :class:`ShareTold`."""
        if isinstance(self._report, ShareTold):
            self._report.share(share)
