"""What a job tells whoever watches it."""

from __future__ import annotations

from typing import Literal, Protocol

from kvformat.extract.meter import PipelineTimes

__all__ = ["Phase", "Progress", "Silent"]

Phase = Literal["read", "load", "identify", "check", "extract", "wait", "prove", "publish"]
"""What a job is at, in this order; what it has no need of is left out. See :meth:`Progress.phase`."""


class Progress(Protocol):
    """Told how a job gets on, by several of its threads, one at a time."""

    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """A phase begins; ``extract`` says how many tokens and bytes of payload the whole dataset will have.

        ``load`` includes hashing the weights where a context is derived; ``identify`` is the same for an unknown one.
        ``check`` computes a few documents together and alone. In ``wait`` other workers are at what is left;
        ``prove`` looks again at shards of an earlier run, of workers that are not there.
        """

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """A record is there; or, where ``computed`` is False, the records of a shard that was there before."""

    def elsewhere(self, *, nbytes: int) -> None:
        """Other workers finished so many bytes in all since this one began, as far as is known."""

    def times(self, times: PipelineTimes) -> None:
        """Times of this worker's steps so far."""


class Silent:
    """Says nothing."""

    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """See :class:`Progress`."""

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """See :class:`Progress`."""

    def elsewhere(self, *, nbytes: int) -> None:
        """See :class:`Progress`."""

    def times(self, times: PipelineTimes) -> None:
        """See :class:`Progress`."""
