"""How large the dataset of a plan will be, and whether it fits."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.extract.staged import SHARD_SLOTS
from kvformat.spec import limits
from kvformat.spec.layout import Layout
from kvformat.spec.schema import Schema
from kvformat.write.spool import MOST_SHARDS

__all__ = ["Estimate", "estimate_size", "require_space"]

# Bytes of the index tables for each record and each name (SPEC.md, "Index tables"), and room for the rest.
_INDEX_RECORD = 8 + 4 + 32 + 16 + 16
_INDEX_NAME = 8 + 8 + 8 + 16
_SLACK = 1 << 20


class Estimate(Struct, frozen=True, kw_only=True):
    """What an extraction will write.

    Attributes
    ----------
    documents, records
        Lines of the file, and how many different documents they hold.
    tokens, longest
        Tokens of all records, and of the longest.
    nbytes, shards
        Size of the shards, and their number. ``header_nbytes`` of that are headers; each has room for as many records
        as a shard may hold.
    index_nbytes
        Room for everything else, generously counted: hardly ever is so much written.
    free_nbytes, staged_nbytes
        Free space where the dataset goes, and what an interrupted run left there for this one to continue.
    spool_nbytes
        Where the dataset goes to an object store: the most bytes that wait for their upload at once. ``free_nbytes``
        is that of the spool then. None for a local dataset.
    family, compute_dtype, schema
        Of the model.
    finished
        Whether a dataset of these very documents is there already. Only the loaded model tells whether its context is
        the same; where it is, nothing is written, and where not, extraction refuses.
    """

    documents: int
    records: int
    tokens: int
    longest: int
    nbytes: int
    shards: int
    header_nbytes: int
    index_nbytes: int
    free_nbytes: int
    staged_nbytes: int
    family: str
    compute_dtype: str
    schema: Schema
    spool_nbytes: int | None = None
    finished: bool = False

    @property
    def needed_nbytes(self) -> int:
        """Space that must be free: everything, less what is staged; none where the dataset is finished.

        For an object store, what the spool takes.
        """
        if self.finished:
            return 0
        if self.spool_nbytes is not None:
            return self.spool_nbytes
        return max(0, self.nbytes + self.index_nbytes - self.staged_nbytes)

    @property
    def fits(self) -> bool:
        """Whether it is."""
        return self.needed_nbytes <= self.free_nbytes


def estimate_size(
    records: Iterable[int],
    *,
    documents: int,
    name_nbytes: int,
    schema: Schema,
    out: Path,
    shard_nbytes: int,
    shard_slots: int = SHARD_SLOTS,
    staged_nbytes: int = 0,
    spooled: bool = False,
    family: str,
    compute_dtype: str,
) -> Estimate:
    """Lay every record out as the writer will.

    Parameters
    ----------
    records
        Tokens of each record, in order.
    out
        Where the dataset goes; need not exist. Its spool, where that is an object store.
    staged_nbytes
        Bytes of finished shards that this very run will find there.
    spooled
        Whether shards only wait at ``out`` for their upload.

    Raises
    ------
    InputError
        E111 for a record beyond the limits.
    """
    layout = Layout(schema)
    header = layout.header_size(limits.VERSION, shard_slots)
    count = tokens = longest = payload = shards = filled = slots = largest = 0
    for num_tokens in records:
        nbytes = layout.place((num_tokens,)).nbytes
        if shards == 0 or slots >= shard_slots or filled + nbytes > shard_nbytes:
            shards, filled, slots = shards + 1, 0, 0
        filled, slots = filled + nbytes, slots + 1
        largest = max(largest, filled)
        count, tokens, longest, payload = count + 1, tokens + num_tokens, max(longest, num_tokens), payload + nbytes
    return Estimate(
        documents=documents,
        records=count,
        tokens=tokens,
        longest=longest,
        nbytes=payload + shards * header,
        shards=shards,
        header_nbytes=shards * header,
        index_nbytes=count * _INDEX_RECORD + documents * _INDEX_NAME + name_nbytes + _SLACK,
        free_nbytes=shutil.disk_usage(_existing(out)).free,
        staged_nbytes=staged_nbytes,
        spool_nbytes=min(shards, MOST_SHARDS) * (largest + header) if spooled else None,
        family=family,
        compute_dtype=compute_dtype,
        schema=schema,
    )


def require_space(estimate: Estimate, out: Path) -> None:
    """Refuse when space is short.

    Raises
    ------
    StorageError
        E200 with the number of bytes needed.
    """
    if not estimate.fits:
        short = estimate.needed_nbytes - estimate.free_nbytes
        remedy = "store fewer layers or documents, or choose another location"
        if estimate.spool_nbytes is not None:
            remedy = "choose smaller shards, or another spool"
        raise make_error(
            "E200",
            f"{estimate.needed_nbytes:,} bytes are needed and {estimate.free_nbytes:,} are free; free {short:,} "
            f"bytes, {remedy}",
            path=out,
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
