"""Writing a corpus from memory until it is durable: digests, headers, index and every fsync included.

kvformat computes a SHA-256 of every file, an XXH3 of every layer and record, and refuses values that are not finite.
The bare operation writes the same payload to one file and syncs it. What a peer does not sync itself is synced for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ours, peers
from benchmarks.command import run_command
from benchmarks.contenders import check_records, reason
from benchmarks.harness import (
    Bar,
    Contender,
    Series,
    alternate,
    best_peer,
    missing_bars,
    print_missing,
    print_notes,
    print_table,
    write_synced,
)
from benchmarks.shapes import Corpus, Shape

RAW = "raw write + fsync"
# The default of 1 GiB holds a whole corpus, whose one shard would be hashed when everything is written. Real datasets
# have many shards.
SHARD_NBYTES = 64 << 20
_TOUCHED_NBYTES = 8 << 20


def touch_page_cache(path: Path, data: np.ndarray) -> None:
    """Write a file somewhat larger than these bytes and remove it: what is written next gets its memory.

    A virtual machine may have given free memory back to its host. Whoever needs it first fetches it again, at a tenth
    of the speed of writing, which says nothing about the writer. It takes some seconds until memory is given back.
    """
    with path.open("wb", buffering=0) as file:
        for view in (memoryview(data), memoryview(data[: data.nbytes // 4])):
            for start in range(0, len(view), _TOUCHED_NBYTES):
                file.write(view[start : start + _TOUCHED_NBYTES])
    path.unlink()


def contender_of(name: str, home: Path, corpus: Corpus, write: Callable[[Path], None], **words: Any) -> Contender:
    def before() -> None:
        # Removing the last result and settling the disk are not part of writing.
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        os.sync()
        touch_page_cache(home / "touched", corpus.blob)

    def run(_: Sequence[None]) -> int:
        write(home)
        return corpus.nbytes

    return Contender(name=name, run=run, before=before, cache="-", **words)


def measure(shape: Shape, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    corpus = Corpus(shape)
    destination = peers.Destination(corpus.max_nbytes)
    check = check_records(corpus, destination)
    whole = memoryview(corpus.blob)
    missing: list[tuple[str, str]] = []
    contenders = [
        contender_of(RAW, path / "raw", corpus, lambda home: write_synced(home / "flat.bin", whole), bare=True),
        contender_of(
            ours.NAME,
            path / "kvformat",
            corpus,
            lambda home: ours.write(home, corpus.records, shard_nbytes=SHARD_NBYTES),
            verify="SHA-256, XXH3, finite",
            note=f"shard_nbytes={SHARD_NBYTES >> 20} MiB, so that one is hashed and synced while the next is written",
        ),
    ]
    _prove(
        path / "kvformat",
        lambda home: ours.write(home, corpus.records, shard_nbytes=SHARD_NBYTES),
        corpus,
        check,
    )
    for name in names:
        home = path / name
        try:
            module = peers.load(name)
            _prove_peer(home, module, corpus, check)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises, it is said that and why it is missing
            missing.append((name, reason(error)))
            shutil.rmtree(home, ignore_errors=True)
            continue

        def write(home: Path, module: Any = module) -> None:
            module.write(home, corpus.records, "write")

        contenders.append(contender_of(module.NAME, home, corpus, write, verify="none", note=module.NOTE))
    found = alternate(contenders, rounds=rounds, work=lambda _: [None], warmup=0)
    for contender in contenders:
        if contender.before is not None:
            contender.before()
    best = best_peer(found)
    title = f"write until durable, {shape.name}: {len(corpus):,} records, {corpus.nbytes / 1e9:.2f} GB"
    against = [RAW, *([best.contender.name] if best else [])]
    print_table(title, found, against=against, unit="GB/s", note="x: times as fast; `verify`: what is computed")
    print_notes(contenders)
    print_missing(missing)
    return _bars(shape, {series.contender.name: series for series in found}, best, missing)


def _prove(home: Path, write: Callable[[Path], None], corpus: Corpus, check: Callable[[peers.Reader], None]) -> None:
    home.mkdir()
    write(home)
    reader = ours.open_reader(home, corpus, "first")
    try:
        check(reader)
    finally:
        reader.close()


def _prove_peer(home: Path, module: Any, corpus: Corpus, check: Callable[[peers.Reader], None]) -> None:
    home.mkdir()
    module.write(home, corpus.records, "write")
    reader = module.open_reader(home, corpus, "write")
    try:
        check(reader)
    finally:
        reader.close()


def _bars(
    shape: Shape, found: dict[str, Series], best: Series | None, missing: Sequence[tuple[str, str]]
) -> list[Bar]:
    bars = missing_bars(shape.name, missing)
    for other, target in [(found[RAW], 0.8), *([(best, 0.95)] if best else [])]:
        ratio = found[ours.NAME].speed_over(other)
        what = f"{shape.name}: write, digests and fsync included, against {other.contender.name}"
        bars.append(Bar(what=what, target=f">= {target:.2f}", found=f"{ratio:.2f}", met=ratio >= target))
    return bars


if __name__ == "__main__":
    run_command("Writing until durable.", measure, name="write", rounds=7)
