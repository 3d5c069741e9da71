"""Bare clients of an object store that fetch ranges into one reused buffer. No retries, no checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.peers import Destination

__all__ = ["CLIENTS", "S3", "Fetch", "Piece", "boto_of", "obstore_of", "place", "split"]

_RING_NBYTES = 256 << 20


class S3(NamedTuple):
    """Where the server is, and how to get in.

    Parameters
    ----------
    options
        What fsspec's ``s3`` takes.
    """

    endpoint: str
    options: dict[str, Any]

    @property
    def region(self) -> str:
        """Of the server."""
        return str(self.options["client_kwargs"]["region_name"])


class Piece(NamedTuple):
    """One request: ``nbytes`` from ``start`` of an object, to ``at`` in the buffer."""

    key: str
    start: int
    nbytes: int
    at: int


def split(key: str, start: int, nbytes: int, request_nbytes: int) -> list[tuple[str, int, int]]:
    """As few equal ranges as fit ``request_nbytes`` each."""
    count = -(-nbytes // request_nbytes)
    step = -(-nbytes // count)
    return [(key, start + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


def place(ranges: Sequence[tuple[str, int, int]]) -> list[Piece]:
    """Ranges behind each other in a ring of 256 MiB: what a loader that is ahead writes to again and again."""
    pieces, at = [], 0
    for key, start, nbytes in ranges:
        if at + nbytes > _RING_NBYTES:
            at = 0
        pieces.append(Piece(key, start, nbytes, at))
        at += nbytes
    return pieces


# ------------------------------------------------------------------------------------------------------------- ranges

Fetch = Callable[[Sequence[Piece]], None]


def obstore_of(s3: S3, bucket: str, **config: Any) -> Any:
    """A store of obstore."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        config={
            "endpoint": s3.endpoint,
            "access_key_id": s3.options["key"],
            "secret_access_key": s3.options["secret"],
            "region": s3.region,
            "virtual_hosted_style_request": False,
            **config,
        },
        client_options={"allow_http": True, "timeout": "120s"},
    )


def boto_of(s3: S3, connections: int) -> Any:
    """A client of boto3, without the checksums it would add."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=s3.endpoint,
        aws_access_key_id=s3.options["key"],
        aws_secret_access_key=s3.options["secret"],
        region_name=s3.region,
        config=Config(
            max_pool_connections=connections,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


def _s3fs(s3: S3, connections: int) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        **s3.options,
        config_kwargs={"max_pool_connections": connections},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@contextmanager
def obstore_async(s3: S3, bucket: str, target: Destination, in_flight: int) -> Iterator[Fetch]:
    """obstore on one event loop."""
    import obstore

    store, view = obstore_of(s3, bucket), target.view

    async def fetch(pieces: Sequence[Piece]) -> None:
        left = iter(pieces)

        async def work() -> None:
            for key, start, nbytes, at in left:
                data = await obstore.get_range_async(store, key, start=start, length=nbytes)
                view[at : at + nbytes] = memoryview(data)

        await asyncio.gather(*(work() for _ in range(in_flight)))

    with asyncio.Runner() as runner:
        yield lambda pieces: runner.run(fetch(pieces))


@contextmanager
def _threads(in_flight: int, get: Callable[[Piece], None]) -> Iterator[Fetch]:
    with ThreadPoolExecutor(in_flight) as pool:

        def fetch(pieces: Sequence[Piece]) -> None:
            for _ in pool.map(get, pieces):
                pass

        yield fetch


@contextmanager
def obstore_threads(s3: S3, bucket: str, target: Destination, in_flight: int) -> Iterator[Fetch]:
    """Blocking calls of obstore, in threads."""
    import obstore

    store, view = obstore_of(s3, bucket), target.view

    def get(piece: Piece) -> None:
        data = obstore.get_range(store, piece.key, start=piece.start, length=piece.nbytes)
        view[piece.at : piece.at + piece.nbytes] = memoryview(data)

    with _threads(in_flight, get) as fetch:
        yield fetch


@contextmanager
def boto_threads(s3: S3, bucket: str, target: Destination, in_flight: int) -> Iterator[Fetch]:
    """boto3 in threads, its bodies read into the buffer."""
    client, view = boto_of(s3, in_flight), target.view

    def get(piece: Piece) -> None:
        last = piece.start + piece.nbytes - 1
        body = client.get_object(Bucket=bucket, Key=piece.key, Range=f"bytes={piece.start}-{last}")["Body"]
        at, end = piece.at, piece.at + piece.nbytes
        while at < end:
            taken = body.readinto(view[at:end])
            if not taken:
                raise OSError(f"{piece.key}: the answer ends {end - at} bytes early")
            at += taken
        body.close()

    with _threads(in_flight, get) as fetch:
        yield fetch
    client.close()


@contextmanager
def s3fs_gather(s3: S3, bucket: str, target: Destination, in_flight: int) -> Iterator[Fetch]:
    """``_cat_file`` of s3fs, gathered on its event loop."""
    from fsspec.asyn import sync

    fs, view = _s3fs(s3, in_flight), target.view

    async def fetch(pieces: Sequence[Piece]) -> None:
        left = iter(pieces)

        async def work() -> None:
            for key, start, nbytes, at in left:
                view[at : at + nbytes] = await fs._cat_file(f"{bucket}/{key}", start=start, end=start + nbytes)  # noqa: SLF001 - its coroutine has no public name

        await asyncio.gather(*(work() for _ in range(in_flight)))

    yield lambda pieces: sync(fs.loop, fetch, pieces)


@contextmanager
def cat_ranges(s3: S3, bucket: str, target: Destination, in_flight: int) -> Iterator[Fetch]:
    """``cat_ranges`` of s3fs, each call for as much as the buffer holds."""
    fs, view = _s3fs(s3, in_flight), target.view

    def fetch(pieces: Sequence[Piece]) -> None:
        for group in _laps(pieces):
            found = fs.cat_ranges(
                [f"{bucket}/{piece.key}" for piece in group],
                [piece.start for piece in group],
                [piece.start + piece.nbytes for piece in group],
                batch_size=in_flight,
                on_error="raise",
            )
            for piece, data in zip(group, found, strict=True):
                view[piece.at : piece.at + piece.nbytes] = data

    yield fetch


def _laps(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces of each time round the ring."""
    lap: list[Piece] = []
    for piece in pieces:
        if lap and not piece.at:
            yield lap
            lap = []
        lap.append(piece)
    if lap:
        yield lap


CLIENTS = {
    "obstore async": obstore_async,
    "obstore threads": obstore_threads,
    "s3fs _cat_file": s3fs_gather,
    "s3fs cat_ranges": cat_ranges,
    "boto3 threads": boto_threads,
}
