"""What an object store does for this library: one attempt of each operation.

A :class:`Store` neither retries nor waits longer than it is told; :class:`~kvformat.storage.remote.Remote` does
that for all of them. Its failures are :class:`StoreFault`, by what can be done about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = [
    "Buffer",
    "DeniedFault",
    "ExistsFault",
    "ExpiredFault",
    "FullFault",
    "MissingFault",
    "ShortFault",
    "Stat",
    "Store",
    "StoreFault",
    "ThrottledFault",
    "TransportFault",
    "UnsupportedFault",
    "Upload",
]

Buffer = bytes | bytearray | memoryview


class StoreFault(Exception):  # noqa: N818 -- errors are what callers see
    """One attempt failed. Never leaves the storage package: callers see the error of a code."""


class MissingFault(StoreFault):
    """No such object, bucket or container (404)."""


class DeniedFault(StoreFault):
    """The credentials do not permit it, or there are none (401, 403)."""


class ExpiredFault(DeniedFault):
    """The credentials, or the client's clock, are out of date: a new client may have better ones."""


class ThrottledFault(StoreFault):
    """The store asks for fewer requests (429, 503)."""


class TransportFault(StoreFault):
    """The answer did not come, or not whole: time-outs, resets, 5xx, bodies of another length."""


class ShortFault(TransportFault):
    """Fewer bytes than asked for: cut off on the way, or the object ends there (416)."""


class ExistsFault(StoreFault):
    """An object of this name is there already, or is being made (412, 409)."""


class UnsupportedFault(StoreFault):
    """The store, or its file system package, has no such operation or precondition."""


class FullFault(StoreFault):
    """The store has no room (507, quota, ENOSPC)."""


class Stat(NamedTuple):
    """An object: name below the store's URL, size in bytes, and ETag where there is one, without quotes."""

    name: str
    nbytes: int
    etag: str | None = None


class Upload(Protocol):
    """An object in the making, part by part. Nothing is visible before :meth:`complete`."""

    def part(self, number: int, data: Buffer, *, timeout_s: float) -> int | None:
        """Send part ``number``, counted from 1; may be repeated, and called from several threads.

        Returns the CRC-32 of what arrived, where the store says it.
        """

    def complete(self, *, timeout_s: float) -> None:
        """Make the object of parts 1 to the last one."""

    def abort(self, *, timeout_s: float) -> None:
        """Give up; frees what was sent. Never fails loudly."""


class Store(Protocol):
    """Objects below one URL. Names are relative, with ``/``. Safe to use in threads of one process.

    Every method raises a :class:`StoreFault`, and nothing else, where it fails; ``timeout_s`` bounds the one attempt.
    """

    @property
    def url(self) -> str:
        """Of the directory, without a final slash, and without credentials."""

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        """Exactly ``nbytes`` bytes (at least 1) from ``start``; :class:`ShortFault` where there are fewer."""

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        """A whole object; of one that is larger, ``max_nbytes + 1`` bytes or more, as it pleases the store."""

    def stat(self, name: str, *, timeout_s: float) -> Stat:
        """Size and ETag, not from a cache."""

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """Make an object, whole or not at all, in place of one that is there."""

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """Make an object unless one is there (``If-None-Match: *``); :class:`ExistsFault` where one is."""

    def begin(self, name: str, *, timeout_s: float) -> Upload:
        """Begin an upload in parts."""

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:
        """All objects whose names begin with ``prefix``, not from a cache; ``timeout_s`` bounds each page."""

    def delete(self, name: str, *, timeout_s: float) -> None:
        """Remove an object; no fault where there is none."""

    def close(self) -> None:
        """Let go of connections. The store is not used afterwards."""
