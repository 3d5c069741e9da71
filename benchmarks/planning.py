"""Planning an extraction of a million documents that are tokenised already: time, and memory at its peak.

The documents are synthetic, of 100 to 300 tokens, in a documents file that the benchmark writes. Each measurement is a
process of its own, in which everything was imported before the clock starts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import Bar, console, print_bars, print_facts, process_table, quartiles, workspace

_SECONDS, _MEGABYTES = 20.0, 1000.0
PLANNING = "plan and save"


def build(path: Path, count: int) -> None:
    """A documents file of ``count`` different documents, 200 tokens on average."""
    from kvformat.extract.documents import DocumentsWriter
    from kvformat.spec.document import Document

    generator = np.random.default_rng(5)
    lengths = generator.integers(100, 301, count).tolist()
    with DocumentsWriter(path) as writer:
        for number, length in enumerate(lengths):
            ids = generator.integers(0, 150_000, length, dtype=np.int32)
            writer.add(f"clip-{number:09d}", Document.of(ids))
        writer.finish()


def plan(path: Path, out: Path) -> dict[str, float]:
    import kvformat
    from kvformat.extract.plan import make_plan

    schema = kvformat.Schema.uniform(num_layers=36, num_kv_heads=8, head_dim=128)
    begin = time.perf_counter()
    made = make_plan(path, schema=schema, order="length", batch_size=32, batch_tokens=8192)
    planned = time.perf_counter()
    made.save(out)
    saved = time.perf_counter()
    return {
        "seconds": saved - begin,
        "make_s": planned - begin,
        "save_s": saved - planned,
        "records": made.num_records,
        "shards": made.num_shards,
        "groups": made.num_groups,
    }


def reopen(out: Path) -> dict[str, float]:
    from kvformat.extract.plan import open_plan

    begin = time.perf_counter()
    found = open_plan(out)
    opened = time.perf_counter()
    names = sum(1 for _ in found.names())
    named = time.perf_counter()
    if names != found.num_names:
        raise ValueError(f"{names} names, expected {found.num_names}")
    return {"seconds": opened - begin, "names_s": named - opened}


def peak_nbytes() -> int:
    """Most resident memory this program had, mapped files included; ``ru_maxrss`` would count its parent's too."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


MEASURES: dict[str, Callable[[Path, Path], dict[str, float]]] = {
    PLANNING: plan,
    "open, as a worker does": lambda _, out: reopen(out),
}


def _in_child(name: str, path: Path, out: Path) -> dict[str, float]:
    options = ["--child", name, "--path", str(path), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.planning", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print(found: dict[str, dict[str, list[float]]], count: int) -> None:
    columns = {
        "seconds": "seconds",
        "make_s": "plan s",
        "save_s": "save s",
        "names_s": "all names s",
        "peak_mb": "peak RSS MB",
        "shards": "shards",
        "groups": "groups",
    }
    table = process_table(
        f"{count:,} documents of 100 to 300 tokens, processes of their own, medians (p25 - p75)",
        list(columns.values()),
        caption="plan: every document is read and proved; save: made durable; peak: of the whole process",
    )
    for name, values in found.items():
        cells = [f"{statistics.median(values[c]):,.2f}" if c in values else "-" for c in columns]
        low, _, high = quartiles(values["seconds"])
        cells[0] += f" ({low:,.2f} - {high:,.2f})"
        table.add_row(name, "SHA-256 of all" if name == PLANNING else "SHA-256 of columns", "hot", *cells)
    out = console()
    out.print(table)
    out.print()


def _bars(values: dict[str, list[float]], count: int) -> list[Bar]:
    seconds, peak = statistics.median(values["seconds"]), max(values["peak_mb"])
    return [
        Bar(
            what=f"plan {count:,} documents",
            target=f"<= {_SECONDS:.0f} s",
            found=f"{seconds:.1f} s",
            met=seconds <= _SECONDS,
        ),
        Bar(
            what=f"peak RSS, {count:,} documents",
            target=f"<= {_MEGABYTES:.0f} MB",
            found=f"{peak:.0f} MB",
            met=peak <= _MEGABYTES,
        ),
    ]


def main(
    rounds: Annotated[int, typer.Option(help="Processes of each kind.")] = 3,
    fraction: Annotated[float, typer.Option(help="Part of the documents, for a trial run.")] = 1.0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    path: Annotated[Path | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Plan a million documents."""
    if child is not None and path is not None and out is not None:
        result: dict[str, Any] = MEASURES[child](path, out)
        result["peak_mb"] = peak_nbytes() / 1e6
        print(json.dumps(result))
        return
    count = max(1000, int(1_000_000 * fraction))
    found: dict[str, dict[str, list[float]]] = {}
    with workspace("planning", keep=keep) as home:
        print_facts(home)
        documents = home / f"{count}.kvdocs"
        if not documents.exists():
            build(documents, count)
        os.sync()
        for number in range(rounds):
            for name in MEASURES:
                for key, value in _in_child(name, documents, home / f"plan-{os.getpid()}-{number}").items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    _print(found, count)
    print_bars(_bars(found[PLANNING], count))


if __name__ == "__main__":
    typer.run(main)
