"""First and second epoch of small records, shuffled: kvformat and other libraries on the same server.

Every contender runs in a process of its own (:mod:`benchmarks.remote_child`), its cache empty at first: some clients
do not survive the fork of a process that another one has used.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks import peers, remote_ours
from benchmarks.contenders import reason
from benchmarks.harness import Bar, Contender, Series, best_peer, console, missing_bars, print_missing, print_notes
from benchmarks.loader import PLANS
from benchmarks.peers._remote import Source, Variant
from benchmarks.remote_measure import Metered
from benchmarks.remote_server import Origin
from benchmarks.shapes import SHAPES, Corpus

__all__ = ["measure_epochs"]

_EPOCHS = ("first", "second")
_OURS = "benchmarks.remote_ours"
_TIMEOUT_S = 300


class _Entry(NamedTuple):
    module: str
    variant: Variant
    source: Source


class _Taken:
    """What one contender's processes said, a value a round, of one epoch."""

    def __init__(self, entry: _Entry) -> None:
        variant = entry.variant
        self.contender = Contender(
            name=variant.name, run=lambda _: 0, verify=variant.verify, cache=variant.cache, note=variant.note
        )
        self.values: list[dict[str, float]] = []

    def series(self) -> Metered:
        """As a series of samples."""
        found = Series(
            self.contender,
            [value["seconds"] for value in self.values],
            [int(value["nbytes"]) for value in self.values],
            [int(value["samples"]) for value in self.values],
        )
        return Metered(found, [v["own_s"] for v in self.values], [v["server_s"] for v in self.values])

    @property
    def first_s(self) -> float:
        """Median of the seconds to the first batch."""
        return statistics.median(value["first_s"] for value in self.values)


def measure_epochs(
    origin: Origin, corpus: Corpus, url: str, home: Path, *, rounds: int, names: Sequence[str]
) -> list[Bar]:
    """The tables of both epochs, and the bars against the best peer."""
    bucket = url.removeprefix("s3://").partition("/")[0]
    entries = [_Entry(_OURS, variant, _source(origin, url, [])) for variant in remote_ours.REMOTE]
    missing: list[tuple[str, str]] = []
    for name in names:
        folder = home / f"peer-{name}"
        folder.mkdir()
        try:
            module = peers.load(name)
            module.write_remote(folder, corpus.records)
            where = origin.upload(bucket, name, folder)
            signed = [
                origin.url_of(bucket, f"{name}/{path.relative_to(folder).as_posix()}")
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            ]
            entries += [_Entry(module.__name__, v, _source(origin, where, signed)) for v in module.REMOTE]
        except Exception as error:  # noqa: BLE001 - whatever a peer raises, it is said that and why it is missing
            missing.append((name, reason(error)))
        shutil.rmtree(folder)
    sound = []
    for entry in entries:
        try:
            _run(origin, entry, corpus, home, check=True)
            sound.append(entry)
        except ValueError as error:
            if entry.module == _OURS:
                raise
            missing.append((entry.variant.name, str(error)))
    found = [[_Taken(entry) for entry in sound] for _ in _EPOCHS]
    shuffled, rng = list(range(len(sound))), random.Random(11)
    for _ in range(rounds):
        rng.shuffle(shuffled)
        for number in list(shuffled):
            try:
                values = _run(origin, sound[number], corpus, home, check=False)
            except ValueError as error:
                if sound[number].module == _OURS:
                    raise
                missing.append((sound[number].variant.name, str(error)))
                shuffled.remove(number)
                continue
            for taken, value in zip(found, values, strict=True):
                taken[number].values.append(value)
    found = [[taken[number] for number in sorted(shuffled)] for taken in found]
    bars = []
    for epoch, taken in zip(_EPOCHS, found, strict=True):
        bars += _report(epoch, taken, corpus, rounds)
    print_notes([taken.contender for taken in found[0]])
    print_missing(missing)
    return bars + missing_bars("small, remote", missing)


def _source(origin: Origin, url: str, signed: list[str]) -> Source:
    s3 = origin.s3
    return Source(url, signed, s3.endpoint, s3.options["key"], s3.options["secret"], s3.region)


def _run(origin: Origin, entry: _Entry, corpus: Corpus, home: Path, *, check: bool) -> list[dict[str, float]]:
    cache = home / "fresh"
    cache.mkdir()
    task: dict[str, Any] = {
        "module": entry.module,
        "variant": entry.variant.key,
        "shape": corpus.shape.name,
        "fraction": len(corpus) / SHAPES[corpus.shape.name].num_records,
        "source": entry.source._asdict(),
        "cache": str(cache),
        "batch_size": PLANS[corpus.shape.name].batch_size,
        "server_pid": origin.pid,
        "check": check,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.remote_child", json.dumps(task)],
            env={**os.environ, **entry.source.environment},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{entry.variant.name}: did not end within {_TIMEOUT_S} s") from error
    finally:
        shutil.rmtree(cache)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(f"{entry.variant.name}: exit status {done.returncode}: {said}")
    found: list[dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    if not check and any(value["samples"] != len(corpus) for value in found):
        raise ValueError(f"{entry.variant.name}: {found}: not all samples came")
    return found


def _report(epoch: str, taken: Sequence[_Taken], corpus: Corpus, rounds: int) -> list[Bar]:
    series = {entry.contender.name: entry.series() for entry in taken}
    firsts = {entry.contender.name: entry.first_s for entry in taken}
    ours = series[remote_ours.REMOTE[0].name]
    best = best_peer(list(series.values()))
    title = (
        f"{epoch} epoch, small: {len(corpus):,} records, {corpus.nbytes / 1e9:.2f} GB, batches of "
        f"{PLANS[corpus.shape.name].batch_size}, shuffled; {rounds} rounds, a process each"
    )
    began = "opening and the start of workers included" if epoch == "first" else "the same loader goes on"
    table = Table(title=title, title_justify="left", caption=began, caption_justify="left")
    for heading in ("contender", "verify", "kept here"):
        table.add_column(heading)
    headings = ["samples/s", "MB/s", "first batch s", "CPU s/GB", "server's"]
    for heading in [*headings, *([f"x {best.contender.name}"] if best else [])]:
        table.add_column(heading, justify="right")
    for found in sorted(series.values(), key=lambda s: statistics.median(s.micros)):
        contender = found.contender
        table.add_row(
            contender.name,
            contender.verify,
            contender.cache,
            f"{1e6 / statistics.median(found.micros):,.0f}",
            f"{statistics.median(found.gbps) * 1e3:,.0f}",
            f"{firsts[contender.name]:.2f}",
            f"{found.own_per_gb:.2f}",
            f"{found.server_per_gb:.2f}",
            *([f"{found.speed_over(best):.2f}"] if best else []),
            style="bold" if found is ours else "",
        )
    out = console()
    out.print(table)
    out.print()
    if best is None:
        return []
    ratio = ours.speed_over(best)
    what = f"small, {epoch} epoch: {ours.contender.name}, against {best.contender.name}"
    return [Bar(what=what, target="> 1.00", found=f"{ratio:.2f}", met=ratio > 1)]
