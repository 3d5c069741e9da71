"""What the server gives and takes at most: bare ranged GETs and multipart PUTs, with every client and some numbers."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Contender
from benchmarks.peers import Destination
from benchmarks.remote_clients import CLIENTS, Fetch, Piece, place, split
from benchmarks.remote_measure import Metered, measure_all, print_metered
from benchmarks.remote_senders import SENDERS
from benchmarks.remote_server import Origin

__all__ = ["Limits", "measure_limits"]

RING_NBYTES = 256 << 20
SIZES = (5 << 20, 8 << 20)
IN_FLIGHT = (4, 8, 16)
_OBJECT_NBYTES = 128 << 20


class Limits(NamedTuple):
    """Requests under way at once with which each bare client was quickest."""

    get: dict[str, int]
    put: dict[str, int]


def measure_limits(origin: Origin, path: Path, *, rounds: int, nbytes: int) -> Limits:
    """Print both tables."""
    objects = max(2, nbytes // _OBJECT_NBYTES)
    files = []
    for number in range(objects):
        file = path / f"object-{number:03d}"
        file.write_bytes(random.Random(number).randbytes(_OBJECT_NBYTES))  # the server compresses what it can
        files.append((file.name, file))
    bucket = origin.bucket()
    try:
        for key, file in files:
            SENDERS["boto3 threads"](origin.s3, 8 << 20, 4)(bucket, [(key, file)])
        get = _gets(origin, bucket, objects, rounds=rounds)
    finally:
        origin.drop(bucket)
    put = _puts(origin, files, rounds=rounds)
    return Limits(get, put)


def _gets(origin: Origin, bucket: str, objects: int, *, rounds: int) -> dict[str, int]:
    target = Destination(RING_NBYTES)
    pieces = {
        size: place([part for n in range(objects) for part in split(f"object-{n:03d}", 0, _OBJECT_NBYTES, size)])
        for size in SIZES
    }
    contenders, kinds = [], {}
    with ExitStack() as stack:
        for client, make in CLIENTS.items():
            for in_flight in IN_FLIGHT:
                fetch = stack.enter_context(make(origin.s3, bucket, target, in_flight))
                for size in SIZES:
                    name = f"{client}, {in_flight} x {size >> 20} MiB"
                    kinds[name] = client, in_flight, size
                    run = partial(_fetch_all, fetch, pieces[size])
                    contenders.append(Contender(name=name, run=run, bare=True))
        found = measure_all(contenders, server_pid=origin.pid, rounds=rounds, work=lambda _: range(1))
    title = f"bare ranged GETs: {objects} objects of {_OBJECT_NBYTES >> 20} MiB, into a reused buffer; {rounds} rounds"
    _print(title, found)
    best: dict[str, tuple[float, int]] = {}
    for series in found:
        client, in_flight, size = kinds[series.contender.name]
        if size == SIZES[-1]:
            micros = statistics.median(series.micros)
            best[client] = min(best.get(client, (micros, in_flight)), (micros, in_flight))
    return {client: in_flight for client, (_, in_flight) in best.items()}


def _fetch_all(fetch: Fetch, pieces: list[Piece], _work: object) -> int:
    fetch(pieces)
    return sum(piece.nbytes for piece in pieces)


def _puts(origin: Origin, files: list[tuple[str, Path]], *, rounds: int) -> dict[str, int]:
    buckets = [origin.bucket()]

    def renew() -> None:
        origin.drop(buckets.pop())
        buckets.append(origin.bucket())

    contenders, kinds = [], {}
    for client, make in SENDERS.items():
        for in_flight in IN_FLIGHT:
            send = make(origin.s3, SIZES[-1], in_flight)

            def run(_work: object, send: object = send) -> int:
                send(buckets[0], files)  # type: ignore[operator]
                return sum(file.stat().st_size for _, file in files)

            name = f"{client}, {in_flight} x {SIZES[-1] >> 20} MiB"
            kinds[name] = client, in_flight
            contenders.append(Contender(name=name, run=run, before=renew, bare=True))
    try:
        found = measure_all(contenders, server_pid=origin.pid, rounds=rounds, work=lambda _: range(1), warmup=0)
    finally:
        origin.drop(buckets.pop())
    _print(
        f"bare multipart PUTs: {len(files)} files of {_OBJECT_NBYTES >> 20} MiB, page cache hot; {rounds} rounds",
        found,
    )
    best: dict[str, tuple[float, int]] = {}
    for series in found:
        client, in_flight = kinds[series.contender.name]
        micros = statistics.median(series.micros)
        best[client] = min(best.get(client, (micros, in_flight)), (micros, in_flight))
    return {client: in_flight for client, (_, in_flight) in best.items()}


def _print(title: str, found: list[Metered]) -> None:
    best = min(found, key=lambda series: statistics.median(series.micros))
    print_metered(title, found, against=[best.contender.name], note="in flight x most bytes of a request")
