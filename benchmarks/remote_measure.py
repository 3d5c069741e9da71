"""What the remote tables add to the others: processor seconds of the client and of the server, beside the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
from rich.table import Table

from benchmarks.harness import Bar, Contender, Series, alternate, console, quartiles

__all__ = ["Metered", "best_of", "measure_all", "print_metered", "process_seconds", "ratio_bar", "tree_seconds"]


class Metered(Series):
    """A series with processor seconds, a value a round: of this process, and of the server."""

    def __init__(self, series: Series, own_s: Sequence[float], server_s: Sequence[float]) -> None:
        super().__init__(series.contender, series.seconds, series.nbytes, series.count)
        self.own_s = list(own_s)
        self.server_s = list(server_s)

    @property
    def own_per_gb(self) -> float:
        """Median of processor seconds a GB of this process."""
        return _per_gb(self.own_s, self.nbytes)

    @property
    def server_per_gb(self) -> float:
        """Median of processor seconds a GB of the server."""
        return _per_gb(self.server_s, self.nbytes)


def measure_all(
    contenders: Sequence[Contender],
    *,
    server_pid: int,
    rounds: int,
    work: Callable[[int], Sequence[Any]],
    warmup: int = 1,
) -> list[Metered]:
    """As :func:`benchmarks.harness.alternate`, with processor seconds of each round."""
    server = psutil.Process(server_pid)
    spent: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}

    def metered(contender: Contender) -> Contender:
        def run(task: Any) -> int:
            own, other = time.process_time(), process_seconds(server)
            nbytes = contender.run(task)
            spent[contender.name].append((time.process_time() - own, process_seconds(server) - other))
            return nbytes

        return replace(contender, run=run)

    found = alternate([metered(c) for c in contenders], rounds=rounds, work=work, warmup=warmup)
    return [
        Metered(series, *zip(*spent[series.contender.name][warmup:], strict=True))  # warm-up rounds come first
        for series in found
    ]


def best_of(found: Sequence[Metered]) -> Metered:
    """The quickest by median time."""
    return min(found, key=lambda series: statistics.median(series.micros))


def print_metered(title: str, found: Sequence[Metered], *, against: Sequence[str], note: str = "") -> None:
    """One line a contender, fastest first: GB/s, processor seconds a GB, and ratios; above 1 is faster."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for heading in ("contender", "verify", "cache"):
        table.add_column(heading)
    for heading in ("median GB/s", "p25 - p75", "CPU s/GB", "server's", *(f"x {name}" for name in against)):
        table.add_column(heading, justify="right")
    by_name = {series.contender.name: series for series in found}
    for series in sorted(found, key=lambda s: statistics.median(s.micros)):
        low, middle, high = quartiles(series.gbps)
        ratios = [f"{series.speed_over(by_name[name]):.2f}" if name in by_name else "-" for name in against]
        contender = series.contender
        style = "bold" if contender.name.startswith("kvformat") else ("dim" if contender.bare else "")
        table.add_row(
            contender.name,
            contender.verify,
            contender.cache,
            f"{middle:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{series.own_per_gb:.2f}",
            f"{series.server_per_gb:.2f}",
            *ratios,
            style=style,
        )
    out = console()
    out.print(table)
    out.print()


def ratio_bar(what: str, series: Series, other: Series, target: float) -> Bar:
    """A bar on how many times as fast one is as the other."""
    ratio = series.speed_over(other)
    return Bar(
        what=f"{what}: {series.contender.name}, against {other.contender.name}",
        target=f">= {target:.2f}",
        found=f"{ratio:.2f}",
        met=ratio >= target,
    )


def tree_seconds() -> float:
    """Processor seconds of this process and all it started, those that ended included."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def process_seconds(process: psutil.Process) -> float:
    """Processor seconds of one process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _per_gb(seconds: Sequence[float], nbytes: Sequence[int]) -> float:
    return statistics.median(spent / size * 1e9 for spent, size in zip(seconds, nbytes, strict=True))
