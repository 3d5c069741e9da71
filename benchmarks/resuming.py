"""Going on with an extraction of which 10,000 shards are finished: how long until the first new forward.

Without a model, so that neither loading nor hashing one is in it; shards are looked at again in the background. The
same for listing what is finished and for publishing all of them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import kvformat
from benchmarks.harness import Bar, console, print_bars, print_facts, process_table, workspace
from kvformat.extract import Plan, extract_plan, make_plan
from kvformat.extract.documents import DocumentsWriter
from kvformat.extract.progress import Silent
from kvformat.interfaces import Extracted
from kvformat.spec.document import Document

_SECONDS = 5.0
_LEFT = 10


class Zeros:
    """An extractor without a model, which remembers when it was asked first."""

    schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=64)
    context = kvformat.Context.unknown()
    text = kvformat.Text()
    provenance: dict[str, str] = {}  # noqa: RUF012 - read only
    files: dict[str, bytes] = {}  # noqa: RUF012 - read only
    max_tokens = None

    def __init__(self) -> None:
        self.first = 0.0

    def extract(self, documents: Sequence[Document]) -> list[Extracted]:
        """Zeros."""
        self.first = self.first or time.perf_counter()
        empty = [torch.zeros(1, document.num_tokens, 1, 64, dtype=torch.bfloat16) for document in documents]
        return [Extracted(components={"k": one, "v": one}, extras={}) for one in empty]


class Stopping(Silent):
    """Interrupts after some records."""

    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:  # noqa: ARG002 - the protocol's
        """One more."""
        self._left -= computed
        if not self._left:
            raise KeyboardInterrupt


def plan_of(path: Path, count: int) -> Plan:
    """A plan of so many shards of one record each."""
    with DocumentsWriter(path) as writer:
        for number in range(count):
            writer.add(f"r{number}", Document.of([number % 1000, number // 1000, 5]))
        writer.finish()
    return make_plan(path, schema=Zeros.schema, shard_slots=1)


def measure(plan: Plan, staged: Path, out: Path) -> dict[str, float]:
    """Go on with a copy of what is staged."""
    shutil.copytree(staged, out, copy_function=os.link)
    extractor = Zeros()
    begin = time.perf_counter()
    dataset = extract_plan(extractor, plan, out)
    end = time.perf_counter()
    if len(dataset) != plan.num_records:
        raise ValueError(f"{len(dataset)} of {plan.num_records} records were published")
    shutil.rmtree(out)
    return {"first_s": extractor.first - begin, "whole_s": end - begin}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds that are counted.")] = 3,
    fraction: Annotated[float, typer.Option(help="Part of the shards, for a trial run.")] = 1.0,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Resume an extraction of many shards."""
    count = max(20, int(10_000 * fraction))
    found: list[dict[str, Any]] = []
    with workspace("resuming", keep=keep) as home:
        print_facts(home)
        plan = plan_of(home / "documents.kvdocs", count + _LEFT)
        begin = time.perf_counter()
        try:
            extract_plan(Zeros(), plan, home / "staged", progress=Stopping(count))
        except KeyboardInterrupt:
            staged_s = time.perf_counter() - begin
        found += [measure(plan, home / "staged", home / f"out-{number}") for number in range(rounds)]
    first, whole = (statistics.median(one[name] for one in found) for name in ("first_s", "whole_s"))
    table = process_table(
        f"going on after {count:,} finished shards of 8 KiB, medians of {rounds}",
        ["first forward s", "all done s", "making them s"],
        caption="all done: every shard hashed again, ten more made, all of them published",
    )
    table.add_row("kvformat", "SHA-256 of all", "hot", f"{first:.2f}", f"{whole:.1f}", f"{staged_s:.1f}")
    console().print(table)
    what = f"{count:,} finished shards: time to the first new forward"
    print_bars([Bar(what=what, target=f"<= {_SECONDS:.0f} s", found=f"{first:.2f} s", met=first <= _SECONDS)])


if __name__ == "__main__":
    typer.run(main)
