"""What waits on this machine for its upload to an object store, or was left by a writer that was killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from kvformat.errors import KVFormatError
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease
from kvformat.write.spool import state_of
from kvformat.write.spool_places import plan_of, spools

__all__ = ["Spooled", "look_spools", "nbytes_of"]


class Spooled(Struct, frozen=True, kw_only=True):
    """One spool directory.

    Attributes
    ----------
    plan
        Digest of what is written.
    state
        ``live`` while a writer holds it; ``unknown`` on file systems without leases.
    """

    path: str
    plan: str
    files: int
    nbytes: int
    state: Literal["live", "abandoned", "unknown"]


def look_spools(base: Path, url: str) -> Iterator[Spooled]:
    """Describe the spool directories of a URL below ``base``, without changing them."""
    for path in spools(base, url):
        try:
            lease = DirectoryLease.take(path)
        except KVFormatError as error:
            if error.code == "E002":  # its writer finished meanwhile
                continue
            raise
        state = state_of(lease)
        if lease is not None:
            lease.release()
        sizes = nbytes_of(path)
        yield Spooled(path=str(path), plan=plan_of(path), files=len(sizes), nbytes=sum(sizes), state=state)


def nbytes_of(path: Path) -> list[int]:
    """Sizes of the files in a spool directory."""

    def sizes() -> Iterator[int]:
        try:
            for entry in path.iterdir():
                yield entry.lstat().st_size
        except FileNotFoundError:  # its writer goes on
            return

    with translated(path):
        return list(sizes())
