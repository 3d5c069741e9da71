"""What each worker of an extraction says it did."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from kvformat.cli import own_share
from kvformat.cli.progress import Nothing
from kvformat.cli.watch import Watch
from kvformat.extract import PipelineTimes
from kvformat.extract.progress import Share
from kvformat.loader.world import World

WORLD = World(1, 3)
DATASET: Any = SimpleNamespace(location="/data/ds", id="1" * 64)


def worked(*, shards: int = 2) -> Watch:
    now = [0.0]
    watch = Watch(Nothing(), clock=lambda: now[0])
    watch.phase("extract", tokens=100, nbytes=10_000_000)
    for _ in range(7):  # of which two were of a shard that another worker finished first
        watch.advance(tokens=10, nbytes=1_000_000, computed=True)
    assert (watch.shards, watch.records, watch.tokens) == (None, None, 70)
    watch.times(PipelineTimes(elapsed_s=2.0, model_s=1.8, hash_s=0.1, records=7, tokens=70, nbytes=7_000_000))
    now[0] = 2.0
    watch.phase("wait")
    now[0] = 99.0
    records = 5 if shards else 0
    watch.share(
        Share(
            shards=shards,
            records=records,
            tokens=10 * records,
            nbytes=1_000_000 * records,
            kept_nbytes=3_000_000,
            elsewhere_nbytes=7_000_000 - 1_000_000 * records,
        )
    )
    return watch


def test_a_worker_says_in_one_line_what_it_did() -> None:
    watch = worked()
    assert watch.rates().startswith("25 tokens/s, ")
    assert own_share.line(watch, WORLD) == (
        f"worker 1 of 3: made 2 shards, 5 records, 5 MB in 2.0 s: {watch.rates()}, limited by model (90 % of the time)"
    )
    assert own_share.line(worked(shards=0), WORLD) == "worker 1 of 3: made nothing, nothing was left to make"
    assert own_share.line(Watch(Nothing()), WORLD) == "worker 1 of 3: made nothing, the dataset was finished"


def test_as_json_it_is_one_line_too(capsys) -> None:
    own_share.tell(worked(), WORLD, DATASET, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["times"].pop("model_s") == 1.8
    del found["times"]
    assert found == {
        "ok": True,
        "location": "/data/ds",
        "id": "1" * 64,
        "already_finished": False,
        "rank": 1,
        "world_size": 3,
        "computed_shards": 2,
        "computed_records": 5,
        "computed_tokens": 50,
        "computed_nbytes": 5_000_000,
        "resumed_nbytes": 3_000_000,
        "elsewhere_nbytes": 2_000_000,
        "limited_by": "model (90 % of the time)",
        "seconds": 2.0,
    }


def test_otherwise_the_line(capsys) -> None:
    watch = worked()
    own_share.tell(watch, WORLD, DATASET, as_json=False)
    assert capsys.readouterr().out == f"{own_share.line(watch, WORLD)}\n"
