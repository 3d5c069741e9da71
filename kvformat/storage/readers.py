"""The reader of a location: a local directory, or anything an object store holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from kvformat.errors import make_error
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.local_read import LocalReader
from kvformat.storage.location import resolve
from kvformat.storage.mounts import prefers_pread
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.remote_read import RemoteReader

__all__ = ["IO", "Location", "Reader", "reader_of", "remote_of"]

IO = Literal["auto", "mmap", "pread"]
Reader = LocalReader | RemoteReader
Location = str | os.PathLike[str] | Remote
"""A path, a URL, or an object store with a client of one's own."""


def reader_of(
    location: Location,
    *,
    io: IO = "auto",
    cache: CacheOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
    verify: bool = True,
) -> Reader:
    """What reads the files of a location; parameters as for :func:`kvformat.open`.

    Raises
    ------
    KVFormatError
        E081, E206 for a location there is no reader of; E205 where it needs a package that is not installed; E211,
        E207 of the cache's directory.
    """
    if cache is not None and not isinstance(cache, CacheOptions):
        raise make_error("E081", f"cache must be kvformat.CacheOptions, found {type(cache).__name__}")
    found = remote_of(location, storage_options=storage_options, remote_options=remote_options)
    if isinstance(found, Path):
        use_mmap = io == "mmap" or (io == "auto" and not prefers_pread(found))
        return LocalReader(found, use_mmap=use_mmap, or_read=io == "auto")
    kept_on = None if cache is None else Path(cache.dir)
    use_mmap = io == "mmap" or (io == "auto" and (kept_on is None or not prefers_pread(kept_on)))
    return RemoteReader(found, cache=cache, use_mmap=use_mmap, verify=verify)


def remote_of(
    location: Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
) -> Path | Remote:
    """The local path of a location, or the object store it is in; errors as :func:`reader_of`."""
    if isinstance(location, Remote):
        return location
    found = resolve(location)
    if isinstance(found, Path):
        return found
    return Remote(found, storage_options=dict(storage_options or {}), options=remote_options)
