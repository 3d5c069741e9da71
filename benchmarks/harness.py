"""How the benchmarks measure: contenders alternate round by round; medians are reported, ratios taken per round."""

from __future__ import annotations

import gc
import os
import platform
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers import Destination, memmove

__all__ = [
    "DATA",
    "Bar",
    "Contender",
    "Series",
    "alternate",
    "best_peer",
    "console",
    "missing_bars",
    "print_bars",
    "print_facts",
    "print_missing",
    "print_notes",
    "print_table",
    "process_table",
    "quartiles",
    "single_threaded",
    "workspace",
    "write_synced",
]

DATA = Path(".bench")
_PACKAGES = (
    "torch",
    "numpy",
    "xxhash",
    "safetensors",
    "lmdb",
    "litdata",
    "mosaicml-streaming",
    "datasets",
    "pylance",
    "pyarrow",
)
_FACTS_NBYTES = 256 << 20
_WRITE_CHUNK_NBYTES = 8 << 20


def console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    return Console() if Console().is_terminal else Console(width=150)


@dataclass(kw_only=True)
class Contender:
    """One line of a table.

    Parameters
    ----------
    run
        Does the work of one round, given what the round is about, and returns the bytes it moved.
    verify
        What it verifies while doing so.
    cache
        ``hot`` where what it reads lies in the page cache.
    before
        Untimed preparation of a round.
    limit
        At most so many operations a round, for contenders that would take all the time; None for no limit.
    bare
        A bare memory or disk operation the others are held against, not a library.
    """

    name: str
    run: Callable[[Any], int]
    verify: str = "-"
    cache: str = "hot"
    note: str = ""
    before: Callable[[], object] | None = None
    limit: int | None = None
    bare: bool = False


@dataclass
class Series:
    """What was measured of one contender, a value a round."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    @property
    def gbps(self) -> list[float]:
        """GB/s of each round."""
        return [nbytes / seconds / 1e9 for nbytes, seconds in zip(self.nbytes, self.seconds, strict=True)]

    @property
    def micros(self) -> list[float]:
        """Microseconds an operation, of each round."""
        return [seconds / count * 1e6 for count, seconds in zip(self.count, self.seconds, strict=True)]

    def speed_over(self, other: Series) -> float:
        """How many times as fast as ``other``: median over rounds, of rounds that ran next to each other."""
        return statistics.median(b / a for a, b in zip(self.micros, other.micros, strict=True))


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A target and what was found."""

    what: str
    target: str
    found: str
    met: bool


def best_peer(found: Sequence[Series]) -> Series | None:
    """The quickest of those that are neither bare operations nor kvformat."""
    peers_alone = [s for s in found if not s.contender.bare and not s.contender.name.startswith("kvformat")]
    return min(peers_alone, key=lambda s: statistics.median(s.micros), default=None)


def missing_bars(shape: str, missing: Sequence[tuple[str, str]]) -> list[Bar]:
    """A bar against the best peer counts where every peer took part: one that is missed for each that did not."""
    return [
        Bar(what=f"{shape}: the best peer", target="all took part", found=f"{name} is missing", met=False)
        for name, _ in missing
    ]


def single_threaded() -> None:
    """One thread for every copy, so that all contenders have as many as the bare ones."""
    torch.set_num_threads(1)


@contextmanager
def workspace(name: str, *, keep: bool) -> Iterator[Path]:
    """A new directory for a benchmark's data, removed at the end unless it is to be kept."""
    path = DATA / f"{name}-{os.getpid()}"
    path.mkdir(parents=True)
    try:
        yield path.resolve()
    finally:
        if keep:
            print(f"data kept in {path}")
        else:
            shutil.rmtree(path, ignore_errors=True)
            if DATA.is_dir() and not any(DATA.iterdir()):
                DATA.rmdir()


def alternate(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    work: Callable[[int], Sequence[Any]],
    warmup: int = 1,
    seed: int = 11,
) -> list[Series]:
    """Run every contender once a round, in an order drawn anew for each.

    Parameters
    ----------
    work
        What round ``number`` is about, equal for all contenders; its length is the number of operations.
    warmup
        Rounds that are not counted: they touch pages, fill tables, and verify what is verified once.
    """
    found = [Series(contender) for contender in contenders]
    shuffled = list(found)
    rng = random.Random(seed)
    for number in range(-warmup, rounds):
        whole = work(number)
        rng.shuffle(shuffled)
        for series in shuffled:
            contender = series.contender
            task = whole[: contender.limit]
            if contender.before is not None:
                contender.before()
            gc.collect()
            gc.disable()
            try:
                begin = time.perf_counter()
                nbytes = contender.run(task)
                seconds = time.perf_counter() - begin
            finally:
                gc.enable()
            if number >= 0:
                series.seconds.append(seconds)
                series.nbytes.append(nbytes)
                series.count.append(len(task))
    return found


def print_table(title: str, found: Sequence[Series], *, against: Sequence[str], unit: str, note: str = "") -> None:
    """Print one line a contender, fastest first, with ratios against the named ones.

    Parameters
    ----------
    against
        Contenders that get a column of ratios; above 1 is faster than they are.
    unit
        ``us`` an operation, or ``GB/s``.
    """
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    table.add_column("contender")
    table.add_column("verify")
    table.add_column("cache")
    table.add_column(f"median {unit}", justify="right")
    table.add_column("p25 - p75", justify="right")
    for name in against:
        table.add_column(f"x {name}", justify="right")
    by_name = {series.contender.name: series for series in found}
    for series in sorted(found, key=lambda s: statistics.median(s.micros)):
        values = series.gbps if unit == "GB/s" else series.micros
        low, middle, high = quartiles(values)
        ratios = [f"{series.speed_over(by_name[name]):.2f}" if name in by_name else "-" for name in against]
        contender = series.contender
        style = "bold" if contender.name.startswith("kvformat") else ("dim" if contender.bare else "")
        table.add_row(
            contender.name,
            contender.verify,
            contender.cache,
            _number(middle),
            f"{_number(low)} - {_number(high)}",
            *ratios,
            style=style,
        )
    out = console()
    out.print(table)
    out.print()


def process_table(title: str, headings: Sequence[str], *, caption: str) -> Table:
    """An empty table of contenders measured in processes of their own: what each verifies, and columns of numbers."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in ("contender", "verify", "cache"):
        table.add_column(heading)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def print_notes(contenders: Sequence[Contender]) -> None:
    """Print how each contender is used."""
    out = console()
    for contender in contenders:
        if contender.note:
            out.print(f"[dim]{contender.name}: {contender.note}[/dim]", highlight=False)
    out.print()


def print_missing(missing: Sequence[tuple[str, str]]) -> None:
    """Say which peers did not take part, and why."""
    for name, reason in missing:
        console().print(f"[bold]not measured[/bold]: {name}: {reason}", highlight=False)


def print_bars(bars: Sequence[Bar]) -> None:
    """Print targets beside what was found."""
    table = Table(title="bars", title_justify="left")
    for heading in ("bar", "target", "found", ""):
        table.add_column(heading, overflow="fold")
    for bar in bars:
        table.add_row(bar.what, bar.target, bar.found, "met" if bar.met else "[bold]missed[/bold]")
    out = console()
    out.print(table)
    out.print()


def print_facts(path: Path) -> None:
    """Print what the numbers depend on: processor, memory copy rate, disk write rate, versions.

    Parameters
    ----------
    path
        Existing directory on the disk to measure.
    """
    table = Table(title="machine", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("processor", f"{os.cpu_count()} cores, {_processor()}")
    system = f"Linux {platform.release()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    table.add_row("system", system)
    table.add_row("memcpy", f"{_memcpy_gbps():.1f} GB/s, one thread, {_FACTS_NBYTES >> 20} MiB")
    table.add_row("disk write + fsync", f"{_disk_gbps(path):.2f} GB/s, {_FACTS_NBYTES >> 20} MiB")
    table.add_row("versions", ", ".join(_versions()))
    out = console()
    out.print(table)
    out.print()


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memcpy_gbps() -> float:
    source, target = np.full(_FACTS_NBYTES, 1, dtype=np.uint8), Destination(_FACTS_NBYTES)
    address = int(source.ctypes.data)
    seconds = [_timed(lambda: memmove(target.address, address, _FACTS_NBYTES)) for _ in range(7)]
    return _FACTS_NBYTES / statistics.median(seconds) / 1e9


def _disk_gbps(path: Path) -> float:
    data = memoryview(np.full(_FACTS_NBYTES, 1, dtype=np.uint8))
    file = path / "probe.bin"
    seconds = []
    for _ in range(5):
        seconds.append(_timed(lambda: write_synced(file, data)))
        file.unlink()
    return _FACTS_NBYTES / statistics.median(seconds) / 1e9


def write_synced(path: Path, data: memoryview) -> None:
    """Write a file in large pieces and fsync it and its directory: the bare operation writers are held against."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for start in range(0, len(data), _WRITE_CHUNK_NBYTES):
            piece = data[start : start + _WRITE_CHUNK_NBYTES]
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
