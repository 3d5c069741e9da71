"""What a loader has done so far, in numbers."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["LoaderStats"]


class LoaderStats(Struct, frozen=True, kw_only=True):
    """Sums over all iterations of a loader in this process.

    Attributes
    ----------
    batches, records, tokens
        Handed out.
    nbytes
        Bytes of the batches handed out, padding included.
    nbytes_copied
        Bytes copied to make them: packed, of mapped files, one for each byte of a batch.
    fresh_nbytes
        Bytes of memory taken from the system for batches of these datasets, by whatever packs them: it stops growing
        once buffers come back. 0 where memory is pinned: torch keeps account of that.
    wait_s
        Seconds the consumer waited for a batch.
    pack_s
        Seconds of all threads spent on packing, ``verify_s`` included.
    verify_s
        Seconds this process has spent on hashing values of these datasets.
    elapsed_s
        Seconds from the first batch asked for to the last one handed out, the consumer's own work included.
    open_shards, mapped_nbytes
        Shards held open now, and how much of them is mapped; that is page cache, not memory of the process.
    """

    batches: int
    records: int
    tokens: int
    nbytes: int
    nbytes_copied: int
    fresh_nbytes: int
    wait_s: float
    pack_s: float
    verify_s: float
    elapsed_s: float
    open_shards: int
    mapped_nbytes: int

    @property
    def records_per_s(self) -> float:
        """Records handed out a second, over :attr:`elapsed_s`."""
        return self.records / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9 bytes) handed out a second, over :attr:`elapsed_s`."""
        return self.nbytes / self.elapsed_s / 1e9 if self.elapsed_s else 0.0
