"""A record handle with its K and V, of an open dataset whose records were touched before.

The bare operation is two ``torch.as_strided`` calls with sizes, strides and offsets at hand. Libraries without tensors
of their own give numpy views of the bits; those that cannot give views give copies, and take the time of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.command import run_command
from benchmarks.contenders import MEMMOVE, MMAP, Open, opened
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

STRIDED = "two as_strided"
_OPERATIONS = 5_000
_SLOW_S = 0.25


def strided(corpus: Corpus) -> Contender:
    base = torch.from_numpy(corpus.blob).view(torch.bfloat16)
    arguments = []
    for record, offset in zip(corpus.records, corpus.offsets, strict=False):
        _, tokens, heads, width = record.dims
        strides = (tokens * heads * width, heads * width, width, 1)
        arguments.append((record.dims, strides, offset // 2, offset // 2 + record.component_nbytes // 2))
    as_strided = torch.as_strided

    def run(order: Sequence[int]) -> int:
        for index in order:
            size, strides, k, v = arguments[index]
            as_strided(base, size, strides, k)
            as_strided(base, size, strides, v)
        return 0

    return Contender(name=STRIDED, run=run, note="arguments prepared, memory is anonymous", bare=True)


def contender_of(entry: Open) -> Contender:
    views = entry.reader.views

    def run(order: Sequence[int]) -> int:
        for index in order:
            views(index)
        return 0

    return Contender(name=entry.name, run=run, verify=entry.verify, note=entry.note, bare=entry.bare)


def check_views(corpus: Corpus) -> Callable[[peers.Reader], None]:
    """A check that K and V of every record are what was written; the bare readers have no views."""

    def check(reader: peers.Reader) -> None:
        for index, record in enumerate(corpus):
            try:
                k, v = reader.views(index)
            except NotImplementedError:
                return
            half = record.component_nbytes
            for found, expected in ((k, record.payload[:half]), (v, record.payload[half:])):
                if not np.array_equal(_bits(found), expected.view(np.uint16)) or tuple(found.shape) != record.dims:
                    raise ValueError(f"record {index}: other values or another shape than were written")

    return check


def _bits(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return values.reshape(-1)


def measure(shape: Shape, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    corpus = Corpus(shape)

    def work(number: int) -> list[int]:
        return np.random.default_rng([3, number + 1]).integers(len(corpus), size=_OPERATIONS).tolist()

    with opened(corpus, path, "read", modes=("off", "first"), check=check_views(corpus), names=names) as field:
        entries = [entry for entry in field.readers if entry.name not in {MEMMOVE, MMAP}]
        contenders = [strided(corpus), *(contender_of(entry) for entry in entries)]
        trial = alternate([Contender(name=c.name, run=c.run, limit=8) for c in contenders], rounds=1, work=work)
        for contender, series in zip(contenders, trial, strict=True):
            contender.limit = max(8, int(_SLOW_S / series.micros[0] * 1e6))
        found = alternate(contenders, rounds=rounds, work=work)
    title = (
        f"record handle with K and V, {shape.name}: {len(corpus):,} records, "
        f"{min(corpus.nbytes_of) / 1e6:.2f} to {corpus.max_nbytes / 1e6:.2f} MB"
    )
    print_table(title, found, against=[STRIDED], unit="us", note="x: times as fast")
    print_notes(contenders)
    print_missing(field.missing)
    return _bars(shape, {series.contender.name: series for series in found})


def _bars(shape: Shape, found: dict[str, Series]) -> list[Bar]:
    bars = []
    for mode in ("off", "first"):
        ours = found[f"kvformat {mode}"]
        micros = statistics.median(ours.micros)
        times = 1 / ours.speed_over(found[STRIDED])
        what = f"{shape.name}: record handle with K and V, verify={mode}"
        bars.append(Bar(what=what, target="<= 8 us", found=f"{micros:.2f} us", met=micros <= 8))
        bars.append(Bar(what=f"{what}, against {STRIDED}", target="<= 3 x", found=f"{times:.2f} x", met=times <= 3))
    return bars


if __name__ == "__main__":
    run_command("A record handle with its K and V.", measure, name="handles", rounds=11)
