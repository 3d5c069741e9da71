"""Build the vectors of the order of training: ``python spec/make_order_vectors.py spec/vectors/order/v1.json``.

They come from the reference of Annex C, never from the library that is compared with them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import reference_order  # beside this script

EPOCHS = (0, 1, 5)
# Long epochs are compared by the digest of their micro-batches.
LISTED = 100


def dataset(label: str, records: int, *, slots: int, aliased: int) -> dict[str, Any]:
    """Numbers of a made-up dataset: lengths follow from a formula, every ``aliased``-th record has three names."""
    return {
        "id": hashlib.sha256(label.encode("ascii")).hexdigest(),
        "names": [3 if aliased and r % aliased == 0 else 1 for r in range(records)],
        "tokens": [1 + r * r * 7 % 61 for r in range(records)],
        "shards": [slots] * (records // slots) + [records % slots] * (records % slots > 0),
    }


DATASETS = {
    "one": [dataset("one", 1, slots=1, aliased=0)],
    "small": [dataset("small", 23, slots=4, aliased=5)],
    "several": [dataset("first", 17, slots=5, aliased=3), dataset("second", 6, slots=2, aliased=0)],
    "large": [dataset("large", 9_001, slots=64, aliased=7)],
}
ORDERS: dict[str, dict[str, Any]] = {
    "none": {"shuffle": "none"},
    "global": {"shuffle": "global"},
    "window": {"shuffle": "window", "window_shards": 3},
}
CUTS: dict[str, dict[str, Any]] = {
    "four": {"batch_size": 4},
    "whole-fours": {"batch_size": 4, "drop_last": True},
    "budget": {"max_tokens": 64},
    "budget-of-five": {"max_tokens": 100, "max_records": 5},
    "own": {"max_tokens": 30, "oversize": "own"},
}


def cases() -> list[dict[str, Any]]:
    found = []
    for name, order, over in product(DATASETS, ORDERS.values(), ("names", "records")):
        for cut, options in CUTS.items():
            if name == "large" and (cut not in {"four", "budget"} or over == "records"):
                continue
            if name == "one" and cut == "whole-fours":
                continue  # refused: no micro-batch at all
            found.append(case(name, {**order, **options, "over": over, "seed": 20}))
    for weights, order in product(([2, 1], [6, 9], [1, 40]), ORDERS.values()):
        options = {**order, "batch_size": 4, "over": "names", "seed": 2**53 - 1, "weights": weights}
        found += [case("several", options), case("several", {**options, "num_samples": 50})]
    found.append(
        case("several", {**ORDERS["global"], **CUTS["budget"], "over": "records", "seed": 1, "weights": [1, 3]})
    )
    return found


def case(name: str, options: dict[str, Any]) -> dict[str, Any]:
    datasets = [reference_order.Dataset(**one) for one in DATASETS[name]]
    found: dict[str, Any] = {
        "datasets": name,
        "options": options,
        "collection": reference_order.collection_id(datasets),
    }
    epochs = {}
    for epoch in EPOCHS if name != "large" else EPOCHS[:2]:
        drawn = [
            [batch.block, batch.number, batch.items, batch.records]
            for batch in reference_order.batches(datasets, options, epoch)
        ]
        epochs[str(epoch)] = drawn if len(drawn) <= LISTED else digest(drawn)
    return {**found, "epochs": epochs}


def steps() -> list[dict[str, Any]]:
    """Who gets what in a step, as block, number and whether it is a copy; and the cursor that all carry."""
    datasets = [reference_order.Dataset(**one) for one in DATASETS["small"]]
    found = []
    for cut, world, last_step in product(("four", "budget"), (1, 2, 3, 5), ("drop", "pad")):
        options = {**ORDERS["global"], **CUTS[cut], "over": "names", "seed": 20, "last_step": last_step}
        ranks = [
            [[batch.block, batch.number, copy] for batch, copy in step]
            for step in reference_order.steps(datasets, options, 2, world)
        ]
        carried = reference_order.cursors(datasets, options, 2, world)
        found.append(
            {"datasets": "small", "options": options, "epoch": 2, "world": world, "ranks": ranks, "cursors": carried}
        )
    return found


def digest(drawn: list[list[Any]]) -> dict[str, Any]:
    """Number and SHA-256 of micro-batches, as JSON without white space."""
    data = json.dumps(drawn, separators=(",", ":")).encode("ascii")
    return {"count": len(drawn), "sha256": hashlib.sha256(data).hexdigest()}


def permutations() -> list[dict[str, Any]]:
    found = []
    for seed, n in product((0, 2**64 - 1, 0x0123456789ABCDEF), (1, 2, 3, 7, 16, 100, 10**7, 2**40, 2**52)):
        positions = sorted({*range(min(n, 16)), n // 3, n // 2, n - 1})
        images = [reference_order.permuted(seed, n, x) for x in positions]
        found.append({"seed": f"{seed:016x}", "n": n, "positions": positions, "images": images})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    vectors = {"datasets": DATASETS, "permutations": permutations(), "cases": cases(), "steps": steps()}
    out.write_text(rows(vectors), encoding="ascii")
    return 0


def rows(vectors: dict[str, Any]) -> str:
    """JSON with a line a permutation and a case."""
    lines = [f'"datasets":{json.dumps(vectors["datasets"], separators=(",", ":"))}']
    for name in ("permutations", "cases", "steps"):
        entries = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in vectors[name])
        lines.append(f'"{name}":[\n{entries}\n]')
    return "{" + ",\n".join(lines) + "}\n"


if __name__ == "__main__":
    sys.exit(main())
