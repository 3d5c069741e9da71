"""Remote datasets on SeaweedFS on loopback: its own limits, reading, later epochs, other libraries, upload.

The client shares the processors with the server, so that what a client spends per GB counts twice: compare ratios.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Bar, print_bars, print_facts, single_threaded, workspace
from benchmarks.peers._remote import REMOTE_PEERS
from benchmarks.remote_cache import measure_cache
from benchmarks.remote_epochs import measure_epochs
from benchmarks.remote_origin import measure_limits
from benchmarks.remote_reading import measure_reading, measure_requests, publish
from benchmarks.remote_server import Origin, origin, print_server
from benchmarks.remote_upload import measure_upload
from benchmarks.shapes import SHAPES, Corpus, Shape

PARTS = ("limits", "reading", "cache", "peers", "upload")
_LARGER = {"large": 1.5, "small": 1.0}
_LIMIT_NBYTES = 512 << 20
_SHARD_NBYTES = {"large": 128 << 20, "small": 64 << 20}
"""Several shards, as a dataset of many GB has of the default size."""


def main(
    rounds: Annotated[int, typer.Option(help="Rounds that are counted.")] = 7,
    shape: Annotated[list[str] | None, typer.Option(help="large or small; both when absent.")] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; all when absent.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Peers that take part; all when absent.")] = None,
    fraction: Annotated[float, typer.Option(help="Part of the records, for a trial run.")] = 1.0,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds and records: an impression.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the data under .bench/; the server's is removed.")
    ] = False,
) -> None:
    """Remote datasets against bare requests and other libraries on the same server."""
    single_threaded()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, and its data
    if quick:
        rounds, fraction = min(rounds, 3), min(fraction, 0.34)
    parts = part or list(PARTS)
    bars: list[Bar] = []
    with workspace("remote", keep=keep) as path, origin(path) as server:
        print_facts(path)
        print_server(server)
        for chosen in shape or list(SHAPES):
            home = path / chosen
            home.mkdir()
            scaled = SHAPES[chosen].scaled(_LARGER[chosen] * fraction)
            bars += _measure(server, scaled, home, parts, rounds=rounds, names=peer or REMOTE_PEERS, fraction=fraction)
            if not keep:
                shutil.rmtree(home)
    print_bars(bars)


def _measure(
    server: Origin,
    shape: Shape,
    home: Path,
    parts: list[str],
    *,
    rounds: int,
    names: list[str] | tuple[str, ...],
    fraction: float,
) -> list[Bar]:
    corpus = Corpus(shape)
    bars: list[Bar] = []
    large = shape.name == "large"
    shard_nbytes = _SHARD_NBYTES[shape.name]
    bucket = server.bucket()
    local, url = publish(server, corpus, home / "kvformat", bucket, shard_nbytes=shard_nbytes)
    if large and {"limits", "reading", "upload"} & set(parts):
        limits = measure_limits(
            server, _folder(home / "limits"), rounds=max(2, rounds // 2), nbytes=int(_LIMIT_NBYTES * fraction)
        )
        shutil.rmtree(home / "limits")
        if "reading" in parts:
            bars += measure_reading(server, corpus, local, url, limits, rounds=rounds)
        if "upload" in parts:
            bars += measure_upload(
                server, corpus, local, limits, home / "spool", shard_nbytes=shard_nbytes, rounds=rounds
            )
    if "reading" in parts:
        bars += measure_requests(server, corpus, url, home)
    if "cache" in parts:
        bars += measure_cache(server, corpus, local, url, home / "cache", rounds=rounds)
        shutil.rmtree(home / "cache")
    if "peers" in parts and not large:
        bars += measure_epochs(server, corpus, url, home, rounds=rounds, names=names)
    server.drop(bucket)
    return bars


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


if __name__ == "__main__":
    typer.run(main)
