"""What a job tells whoever watches it."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

from kvformat.extract.meter import PipelineTimes

__all__ = ["Phase", "Progress", "Share", "ShareTold", "Silent"]

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
        """Other workers finished shards of so many bytes in all since this one began, as far as is known."""

    def times(self, times: PipelineTimes) -> None:
        """Times of this worker's steps so far."""


class Share(Struct, frozen=True, kw_only=True):
    """Who made what of a dataset, as one worker sees it. All bytes together are those of the shards finished so far.

    Attributes
    ----------
    shards, records, tokens, nbytes
        Made by this worker, and counting: what it computed of a shard that another worker finished first is not in it.
    kept_nbytes
        In shards that were there when it began, and were not found damaged.
    elsewhere_nbytes
        In shards that other workers made.
    """

    shards: int = 0
    records: int = 0
    tokens: int = 0
    nbytes: int = 0
    kept_nbytes: int = 0
    elsewhere_nbytes: int = 0


@runtime_checkable
class ShareTold(Protocol):
    """A :class:`Progress` that is told the share of its worker as well."""

    def share(self, share: Share) -> None:
        """How it stands now, in place of all that was told of records and bytes before; at the end in any case."""


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

    def share(self, share: Share) -> None:
        """See :class:`ShareTold`."""
