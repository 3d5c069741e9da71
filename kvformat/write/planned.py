"""What writing a dataset needs to know of the plan it is written by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvformat.spec.manifest import Skipped

__all__ = ["Planned"]


class Planned(Protocol):
    """Which documents stand in which shard, in which order, under which names: known before any value is."""

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, in hexadecimal."""

    @property
    def num_shards(self) -> int:
        """Shards."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Inputs that were left out when planning, with the reason; in input order."""

    def shard(self, ordinal: int) -> range:
        """Records of a shard."""

    def shard_documents(self, ordinal: int) -> Sequence[bytes]:
        """Digests (32 bytes) of the documents of a shard, in record order."""

    def names(self) -> Iterator[tuple[int, int, bytes]]:
        """(record, input, UTF-8 of the name) of every name, by record, then input."""
