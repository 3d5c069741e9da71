"""Later epochs from the cache, against the same loader over the local directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import kvformat
from benchmarks.harness import Bar, Contender
from benchmarks.loader import PLANS
from benchmarks.remote_measure import measure_all, print_metered, ratio_bar
from benchmarks.remote_reading import kvformat_cache
from benchmarks.remote_server import Origin
from benchmarks.shapes import Corpus
from kvformat.loader import BatchSampler, KVLoader

__all__ = ["measure_cache"]

LOCAL, CACHED = "kvformat KVLoader, local directory", "kvformat KVLoader, from the cache"
UNITS: dict[str, Literal["record", "auto"]] = {"large": "record", "small": "auto"}


def _epochs(loader: KVLoader, token_nbytes: int, epochs: range) -> int:
    tokens = 0
    for _ in epochs:
        for batch in loader:
            tokens += sum(batch.num_tokens)
            batch.components["k"][-1, -1].view(-1)[-1].item()
            del batch
    return tokens * token_nbytes


def measure_cache(origin: Origin, corpus: Corpus, local: Path, url: str, cache: Path, *, rounds: int) -> list[Bar]:
    """The table, and the bar. The round that is not counted fills the cache."""
    shape, plan = corpus.shape, PLANS[corpus.shape.name]
    unit = UNITS[shape.name]
    opened: dict[str, Any] = {
        LOCAL: kvformat.open(local, verify="first"),
        CACHED: kvformat.open(
            url, verify="first", cache=kvformat_cache(cache, unit=unit), storage_options=origin.options
        ),
    }
    contenders = []
    for name, dataset in opened.items():
        sampler = BatchSampler(
            dataset, batch_size=plan.batch_size, shuffle="window" if shape.name == "small" else "global", seed=5
        )
        loader = KVLoader(dataset, sampler, layout="packed")
        run = partial(_epochs, loader, shape.token_nbytes)
        contenders.append(Contender(name=name, run=run, verify="first"))
    found = measure_all(contenders, server_pid=origin.pid, rounds=rounds, work=lambda _: range(plan.epochs))
    by_name = {series.contender.name: series for series in found}
    title = (
        f"later epochs, {shape.name}: {plan.epochs} of {len(corpus):,} records a round, "
        f"{plan.epochs * corpus.nbytes / 1e9:.2f} GB, unit={unit}; {rounds} rounds"
    )
    note = "both on disk, page cache hot; what was verified in the first epoch is not verified again"
    print_metered(title, found, against=[LOCAL], note=note)
    return [ratio_bar(f"{shape.name}, later epochs", by_name[CACHED], by_name[LOCAL], 0.9)]
