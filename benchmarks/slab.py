"""One layer of a random record copied into a reused buffer.

A format whose unit is the record reads all of it to hand out one layer, unless its data are laid out for this: the
notes say what each peer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import peers
from benchmarks.command import run_command
from benchmarks.contenders import MEMMOVE, MMAP, Open, check_layers, opened
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
)
from benchmarks.shapes import Corpus, Shape

_OPERATIONS = 4_000
_SLOW_S = 0.25


def contender_of(entry: Open, destination: peers.Destination) -> Contender:
    copy = entry.reader.copy_layer

    def run(pairs: Sequence[tuple[int, int]]) -> int:
        total = 0
        for index, layer in pairs:
            total += copy(index, layer, destination)
        return total

    return Contender(name=entry.name, run=run, verify=entry.verify, note=entry.note, bare=entry.bare)


def measure(shape: Shape, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    corpus = Corpus(shape)
    destination = peers.Destination(corpus.max_nbytes)
    check = check_layers(corpus, destination)

    def work(number: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng([2, number + 1])
        records = rng.integers(len(corpus), size=_OPERATIONS).tolist()
        return list(zip(records, rng.integers(shape.num_layers, size=_OPERATIONS).tolist(), strict=True))

    with opened(corpus, path, "slab", modes=("off", "first", "always"), check=check, names=names) as field:
        for entry in field.readers:
            if entry.verify == "first":
                # Verified at the first touch, which the rounds must not meet.
                for index in range(len(corpus)):
                    entry.reader.views(index)
        contenders = [contender_of(entry, destination) for entry in field.readers]
        trial = alternate([_limited(c, 16) for c in contenders], rounds=1, work=work)
        for contender, series in zip(contenders, trial, strict=True):
            contender.limit = max(16, int(_SLOW_S / series.micros[0] * 1e6))
        found = alternate(contenders, rounds=rounds, work=work)
    best = best_peer(found)
    title = (
        f"one layer of K of a random record copied, {shape.name}: {len(corpus):,} records x {shape.num_layers}, "
        f"mean {corpus.nbytes / len(corpus) / 2 / shape.num_layers / 1e3:.1f} kB, one thread"
    )
    against = [MEMMOVE, MMAP, *([best.contender.name] if best else [])]
    print_table(title, found, against=against, unit="us", note="x: times as fast")
    print_notes(contenders)
    print_missing(field.missing)
    return _bars(shape, {series.contender.name: series for series in found}, best, field.missing)


def _limited(contender: Contender, limit: int) -> Contender:
    return Contender(name=contender.name, run=contender.run, limit=limit)


def _bars(
    shape: Shape, found: dict[str, Series], best: Series | None, missing: Sequence[tuple[str, str]]
) -> list[Bar]:
    bars = missing_bars(shape.name, missing)
    for mode in ("off", "first"):
        ours = found[f"kvformat {mode}"]
        rivals = [(found[MEMMOVE], 0.85)] + ([(best, 0.95)] if best else [])
        for other, target in rivals:
            ratio = ours.speed_over(other)
            what = f"{shape.name}: one layer copied, verify={mode}, against {other.contender.name}"
            bars.append(Bar(what=what, target=f">= {target:.2f}", found=f"{ratio:.2f}", met=ratio >= target))
    return bars


if __name__ == "__main__":
    run_command("One layer of a random record copied into a reused buffer.", measure, name="slab", rounds=11)
