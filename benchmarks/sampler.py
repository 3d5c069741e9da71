"""The order of ten million records: the first batch of an epoch, and going on in the middle of it.

The index is synthetic, as in ``open_million``; there are no shards, which a sampler never touches. Each measurement is
a process of its own, in which everything was imported and the dataset opened before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import typer

from benchmarks.harness import Bar, console, print_bars, print_facts, process_table, quartiles, workspace
from benchmarks.open_million import anonymous_nbytes, build_kvformat

BATCH_SIZE = 64
MAX_TOKENS = 16_384
_BLOCK = 4096
_FURTHER = 500

Kind = Literal["first", "resume"]
KINDS: tuple[Kind, ...] = ("first", "resume")


class Started(NamedTuple):
    """The batches from the first one wanted on, and what holds them."""

    batches: Iterator[Any]
    first: Any


# ------------------------------------------------------------------------------------------------------- in a child


class Kvformat:
    """Our sampler.

    Parameters
    ----------
    verified
        Whether the parts of the index that hold lengths were proved before, as they are in training that goes on.
    options
        What makes up a batch.
    """

    def __init__(self, *, verified: bool = False, **options: int) -> None:
        self._verified = verified
        self._options = options

    def state(self, dataset: Any) -> dict[str, Any]:
        """A state in the middle of an epoch, as training would have saved it."""
        from kvformat.loader import BatchSampler, Cursor

        class Consumed(NamedTuple):
            cursor: Cursor

        middle = Consumed(Cursor(epoch=0, block=len(dataset) // _BLOCK // 2, batch=3))
        return BatchSampler(dataset, seed=7, **self._options).state_dict(after=middle)

    def prepare(self, path: Path, count: int, kind: Kind) -> Callable[[], Started]:
        """Open the dataset; what is returned is timed."""
        import kvformat
        from kvformat.loader import BatchSampler

        dataset = kvformat.open(path)
        if len(dataset) != count:
            raise ValueError(f"{len(dataset)} records, expected {count}")
        if self._verified:
            for part in range(len(dataset.index.rows.parts)):
                dataset.index.rows.part(part)
        state = self.state(dataset) if kind == "resume" else None

        def start() -> Started:
            sampler = BatchSampler(dataset, seed=7, **self._options)
            if state is not None:
                sampler.load_state_dict(state)
            batches = iter(sampler)
            return Started(batches, next(batches))

        return start


class Torch:
    """torch's samplers, whose state is a number of batches to skip."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def prepare(self, path: Path, count: int, kind: Kind) -> Callable[[], Started]:  # noqa: ARG002 - it needs no data
        """Import; what is returned is timed."""
        from torch.utils.data import BatchSampler

        skipped = count // BATCH_SIZE // 2 if kind == "resume" else 0
        make = self._make
        make(16)

        def start() -> Started:
            batches = iter(BatchSampler(make(count), BATCH_SIZE, drop_last=False))
            return Started(batches, next(islice(batches, skipped, None)))

        return start


def random_sampler(count: int) -> Any:
    from torch.utils.data import RandomSampler

    return RandomSampler(range(count))


def distributed_sampler(count: int) -> Any:
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(count), num_replicas=1, rank=0, seed=7)  # type: ignore[arg-type]


class Permutation:
    """numpy's permutation of all records, cut into batches: what any sampler that makes one starts with."""

    def prepare(self, path: Path, count: int, kind: Kind) -> Callable[[], Started]:  # noqa: ARG002 - it needs no data
        """Nothing to open; what is returned is timed."""
        begin = count // BATCH_SIZE // 2 * BATCH_SIZE if kind == "resume" else 0

        def start() -> Started:
            order = np.random.default_rng(7).permutation(count)
            batches = (order[at : at + BATCH_SIZE].tolist() for at in range(begin, count, BATCH_SIZE))
            return Started(batches, next(batches))

        return start


FIXED, BUDGET = f"kvformat, {BATCH_SIZE} records", f"kvformat, {MAX_TOKENS:,} tokens"
PROVED = f"{BUDGET}, rows proved"
VERIFY = {FIXED: "part touched", BUDGET: "part touched", PROVED: "before"}
CONTENDERS: dict[str, Any] = {
    FIXED: Kvformat(batch_size=BATCH_SIZE),
    BUDGET: Kvformat(max_tokens=MAX_TOKENS),
    PROVED: Kvformat(max_tokens=MAX_TOKENS, verified=True),
    "torch RandomSampler": Torch(random_sampler),
    "torch DistributedSampler": Torch(distributed_sampler),
    "numpy permutation": Permutation(),
}


def measure(name: str, kind: Kind, path: Path, count: int) -> dict[str, float]:
    """Time to the first batch wanted, a further batch, and anonymous memory gained: the most of what was seen."""
    before = anonymous_nbytes()
    start = CONTENDERS[name].prepare(path, count, kind)
    opened = anonymous_nbytes()
    begin = time.perf_counter()
    started = start()
    seconds = time.perf_counter() - begin
    held = [opened, anonymous_nbytes()]
    begin = time.perf_counter()
    further = list(islice(started.batches, min(_FURTHER, count // BATCH_SIZE // 4)))
    later = time.perf_counter() - begin
    held.append(anonymous_nbytes())
    if not started.first or not all(further):
        raise ValueError("an empty batch")
    return {
        f"{kind}_ms": seconds * 1e3,
        "further_us": later / len(further) * 1e6,
        "anonymous_mb": (max(held) - before) / 1e6,
    }


# ----------------------------------------------------------------------------------------------------------- script


def _in_child(name: str, kind: Kind, path: Path, count: int) -> dict[str, float]:
    options = ["--child", name, "--kind", kind, "--path", str(path), "--count", str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sampler", *options], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print(found: dict[str, dict[str, list[float]]], count: int) -> None:
    columns = {"first_ms": "first batch ms", "resume_ms": "resume ms", "further_us": "further batch us"}
    table = process_table(
        f"order of {count:,} records, shuffled, processes of their own, medians (p25 - p75)",
        [*columns.values(), "anonymous MB", "first, x", "resume, x"],
        caption=f"resume: in the middle of the epoch; x: times as long as {FIXED}; anonymous: the most seen",
    )
    for name, values in found.items():
        cells = []
        for column in columns:
            low, middle, high = quartiles(values[column])
            cells.append(f"{middle:,.1f}" if column == "further_us" else f"{middle:,.1f} ({low:,.1f} - {high:,.1f})")
        ratios = [
            statistics.median(a / b for a, b in zip(values[c], found[FIXED][c], strict=True))
            for c in ("first_ms", "resume_ms")
        ]
        ours = name.startswith("kvformat")
        table.add_row(
            name,
            VERIFY.get(name, "none"),
            "hot",
            *cells,
            f"{max(values['anonymous_mb']):,.1f}",
            *(f"{ratio:,.1f}" for ratio in ratios),
            style="bold" if ours else "",
        )
    out = console()
    out.print(table)
    out.print()


def _bars(found: dict[str, dict[str, list[float]]], count: int) -> list[Bar]:
    bars = []
    for name in (FIXED, BUDGET):
        values = found[name]
        for what, value, unit in (
            ("first batch", statistics.median(values["first_ms"]), "ms"),
            ("resume in the middle", statistics.median(values["resume_ms"]), "ms"),
            ("anonymous memory", max(values["anonymous_mb"]), "MB"),
        ):
            bars.append(
                Bar(
                    what=f"{count:,} records, {name}: {what}",
                    target=f"<= 100 {unit}",
                    found=f"{value:.1f} {unit}",
                    met=value <= 100,
                )
            )
    return bars


def main(
    rounds: Annotated[int, typer.Option(help="Processes a contender, for the first batch and for resuming each.")] = 5,
    fraction: Annotated[float, typer.Option(help="Part of the records, for a trial run.")] = 1.0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    kind: Annotated[str, typer.Option(hidden=True)] = "first",
    path: Annotated[Path | None, typer.Option(hidden=True)] = None,
    count: Annotated[int, typer.Option(hidden=True)] = 10_000_000,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Find the first batch, and one in the middle, of an epoch over ten million records."""
    if child is not None and path is not None:
        print(json.dumps(measure(child, "resume" if kind == "resume" else "first", path, count)))
        return
    count = max(50_000, int(count * fraction))
    found: dict[str, dict[str, list[float]]] = {}
    with workspace("sampler", keep=keep) as home:
        print_facts(home)
        build_kvformat(home / "ds", count)
        os.sync()
        names = list(CONTENDERS)
        for number in range(-1, rounds):
            for name in names[:: 1 if number % 2 else -1]:
                for wanted in KINDS:
                    values = _in_child(name, wanted, home / "ds", count)
                    if number < 0:
                        continue  # the first round brings the index into the page cache
                    for key, value in values.items():
                        found.setdefault(name, {}).setdefault(key, []).append(value)
    _print({name: found[name] for name in names}, count)
    print_bars(_bars(found, count))


if __name__ == "__main__":
    typer.run(main)
