"""Peers on an object store: a module with ``REMOTE``, ``write_remote`` and ``open_remote``.

``write_remote(path, records)`` leaves the files the library's own writer makes, to be uploaded as they are.
``open_remote(source, shape, variant, cache, batch_size)`` opens them from the server, with an empty directory for
whatever the library caches; a loader with workers shuffles, and packs in the worker as the local peers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from benchmarks.peers._loading import Batch
    from benchmarks.shapes import Record, Shape

__all__ = ["NUM_WORKERS", "REMOTE_PEERS", "RemoteLoader", "RemotePeer", "Source", "Variant"]

REMOTE_PEERS = ("mosaic", "litdata_", "webdataset_")
NUM_WORKERS = 2


class Variant(NamedTuple):
    """One way to set a library up.

    Parameters
    ----------
    key
        What ``open_remote`` goes by.
    verify
        What it checks of what it reads.
    cache
        What stays on this machine after the first epoch.
    """

    key: str
    name: str
    verify: str
    cache: str
    note: str


class Source(NamedTuple):
    """Files on the server.

    Parameters
    ----------
    url
        Of their directory, ``s3://``. Credentials are in the environment as well.
    signed
        URLs of the single files for clients of HTTP, in order of their names.
    """

    url: str
    signed: list[str]
    endpoint: str
    key: str
    secret: str
    region: str

    @property
    def options(self) -> dict[str, Any]:
        """What fsspec's ``s3`` takes."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": self.region},
        }

    @property
    def environment(self) -> dict[str, str]:
        """What libraries look for in the environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "S3_ENDPOINT_URL": self.endpoint,
        }


class RemoteLoader(Protocol):
    """An open loader, whose workers live until ``close``."""

    def epoch(self) -> Iterator[Batch]:
        """All records once, shuffled."""

    def close(self) -> None:
        """Stop the workers."""


class RemotePeer(Protocol):
    """What the module of a peer offers."""

    NAME: str
    REMOTE: Sequence[Variant]

    def write_remote(self, path: Path, records: Sequence[Record]) -> None:
        """Write all records below ``path``, which exists and is empty."""

    def open_remote(self, source: Source, shape: Shape, variant: str, cache: Path, batch_size: int) -> RemoteLoader:
        """Open what was written, from the server."""
