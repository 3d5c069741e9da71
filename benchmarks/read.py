"""Random records copied into a reused buffer: kvformat in each verification mode, bare copies, and peers.

All mapped readers end in the same memory copy and tie where records are large; what differs for small records is the
way to the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import peers
from benchmarks.command import run_command
from benchmarks.contenders import MEMMOVE, MMAP, Open, check_records, opened
from benchmarks.harness import (
    Bar,
    Contender,
    Series,
    alternate,
    print_missing,
    print_notes,
    print_table,
)
from benchmarks.shapes import Corpus, Shape

LMDB = "LMDB"
SAFETENSORS = "safetensors, shard"


def contender_of(entry: Open, destination: peers.Destination) -> Contender:
    copy = entry.reader.copy_record

    def run(order: Sequence[int]) -> int:
        total = 0
        for index in order:
            total += copy(index, destination)
        return total

    return Contender(name=entry.name, run=run, verify=entry.verify, note=entry.note, bare=entry.bare)


def measure(shape: Shape, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    corpus = Corpus(shape)
    destination = peers.Destination(corpus.max_nbytes)
    check = check_records(corpus, destination)

    def work(number: int) -> list[int]:
        return np.random.default_rng([1, number + 1]).permutation(len(corpus)).tolist()

    with opened(corpus, path, "read", modes=("off", "first", "always"), check=check, names=names) as field:
        contenders = [contender_of(entry, destination) for entry in field.readers]
        found = alternate(contenders, rounds=rounds, work=work)
    title = (
        f"random record copied into a reused buffer, {shape.name}: {len(corpus):,} records, "
        f"{corpus.nbytes / 1e9:.2f} GB, mean {corpus.nbytes / len(corpus) / 1e6:.2f} MB, one thread"
    )
    against = [MEMMOVE, MMAP, LMDB, SAFETENSORS]
    print_table(title, found, against=against, unit="GB/s", note="x: times as fast; mapped readers share one copy")
    print_notes(contenders)
    print_missing(field.missing)
    return _bars(shape, {series.contender.name: series for series in found})


def _bars(shape: Shape, found: dict[str, Series]) -> list[Bar]:
    bars = []

    def bar(mode: str, other: str, target: float) -> None:
        what = f"{shape.name}: record copied, verify={mode}, against {other}"
        if other not in found:
            bars.append(Bar(what=what, target=f">= {target:.2f}", found=f"{other} is missing", met=False))
            return
        ratio = found[f"kvformat {mode}"].speed_over(found[other])
        bars.append(Bar(what=what, target=f">= {target:.2f}", found=f"{ratio:.2f}", met=ratio >= target))

    for mode in ("off", "first"):
        bar(mode, MMAP, 0.95)
        if shape.name == "small":
            bar(mode, LMDB, 0.95)
            bar(mode, SAFETENSORS, 1.4)
    bar("always", MEMMOVE, 0.40)
    return bars


if __name__ == "__main__":
    run_command("Random records copied into a reused buffer.", measure, name="read", rounds=11)
