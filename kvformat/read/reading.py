"""Readers for one task that looks at whole files: let go of afterwards, and particular about sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvformat.storage.local_read import LocalReader, OpenFile
from kvformat.storage.readers import Location, Reader, reader_of
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.remote_read import RemoteReader

__all__ = ["SizingReader", "reading"]


class SizingReader(RemoteReader):
    """Asks for the size of every object first: what lies behind the bytes that are fetched would go unnoticed."""

    def open(self, name: str, *, nbytes: int | None = None, ranged: bool = False, **options: Any) -> OpenFile:
        """See :class:`RemoteReader`."""
        if nbytes is not None and not ranged:
            super().open(name, nbytes=nbytes, ranged=True)
        return super().open(name, nbytes=nbytes, ranged=ranged, **options)


@contextmanager
def reading(
    location: Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
) -> Iterator[Reader]:
    """The reader of a location for a block, without a cache; errors as for :func:`kvformat.open`."""
    reader = reader_of(location, storage_options=storage_options, remote_options=remote_options)
    if isinstance(reader, LocalReader):
        yield reader
        return
    try:
        yield SizingReader(reader.remote)
    finally:
        if reader.remote is not location:
            reader.remote.close()
