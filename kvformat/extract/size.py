"""How large the dataset of a plan will be, and whether it fits."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.extract.plan import Plan
from kvformat.spec.schema import Schema
from kvformat.write.spool import MOST_SHARDS

__all__ = ["Estimate", "Space", "require_space", "space_of"]

# Bytes of the index tables for each record and each name (SPEC.md, "Index tables"), and room for the rest.
_INDEX_RECORD = 8 + 4 + 32 + 16 + 16
_INDEX_NAME = 8 + 8 + 8 + 16
_SLACK = 1 << 20


class Space(Struct, frozen=True, kw_only=True):
    """What an extraction needs of a disk, and what that has; :class:`Estimate` says what the fields are."""

    nbytes: int
    header_nbytes: int
    index_nbytes: int
    free_nbytes: int
    staged_nbytes: int
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
        """Whether that much is free."""
        return self.needed_nbytes <= self.free_nbytes


class Estimate(Space, frozen=True, kw_only=True):
    """What an extraction will write, what it needs of a disk, and what that has.

    Attributes
    ----------
    documents, records
        Names, and how many different documents they stand for.
    tokens, longest
        Tokens of all records, and of the longest.
    shards, groups
        How many shards, and forwards of the model, there will be.
    family, compute_dtype, schema
        Of the model.
    nbytes
        Size of the shards; ``header_nbytes`` of that are headers, each with room for as many records as a shard may
        hold.
    index_nbytes
        Room for everything else, generously counted: hardly ever is so much written.
    free_nbytes, staged_nbytes
        Free space where the dataset goes, and what an interrupted run left there for this one to continue.
    spool_nbytes
        Where the dataset goes to an object store: the most bytes that wait for their upload at once. ``free_nbytes``
        is that of the spool then. None for a local dataset.
    finished
        Whether a dataset of these very documents is there already. Only the loaded model tells whether its context is
        the same; where it is, nothing is written, and where not, extraction refuses.
    needed_nbytes, fits
        Space that must be free, and whether it is.
    """

    documents: int
    records: int
    tokens: int
    longest: int
    shards: int
    groups: int
    family: str
    compute_dtype: str
    schema: Schema


def space_of(plan: Plan, out: Path, *, staged_nbytes: int, spooled: bool, finished: bool = False) -> Space:
    """What the dataset of a plan needs.

    Parameters
    ----------
    out
        Where the dataset goes; need not exist. Its spool, where that is an object store.
    staged_nbytes
        Bytes of finished shards that this very run will find there.
    spooled
        Whether shards only wait at ``out`` for their upload.
    """
    headers = plan.num_shards * plan.header_size
    index = plan.num_records * _INDEX_RECORD + plan.num_names * _INDEX_NAME + plan.names_nbytes + _SLACK
    waiting = min(plan.num_shards, MOST_SHARDS) * (plan.largest_shard_nbytes + plan.header_size)
    return Space(
        nbytes=plan.nbytes + headers,
        header_nbytes=headers,
        index_nbytes=index,
        free_nbytes=shutil.disk_usage(_existing(out)).free,
        staged_nbytes=staged_nbytes,
        spool_nbytes=waiting if spooled else None,
        finished=finished,
    )


def require_space(space: Space, out: Path) -> None:
    """Refuse when space is short.

    Raises
    ------
    StorageError
        E200 with the number of bytes needed.
    """
    if not space.fits:
        short = space.needed_nbytes - space.free_nbytes
        remedy = "store fewer layers or documents, or choose another location"
        if space.spool_nbytes is not None:
            remedy = "choose smaller shards, or another spool"
        raise make_error(
            "E200",
            f"{space.needed_nbytes:,} bytes are needed and {space.free_nbytes:,} are free; free {short:,} "
            f"bytes, {remedy}",
            path=out,
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
