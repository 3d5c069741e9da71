"""Compare the library's order with the vectors; also run alone, under other releases of numpy: no torch, no pytest."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kvformat.loader.cursor import Cursor, Options
from kvformat.loader.permutation import permute
from kvformat.loader.sequence import Sequence

PATH = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "order" / "v1.json"


class MadeUp:
    """One dataset of the vectors, or all of a case: what a sequence asks of a collection."""

    def __init__(self, datasets: list[dict[str, Any]], *, identity: str, weights: list[int] | None = None) -> None:
        self.id = identity
        self.weights = weights
        self.datasets = [Sized(len(one["names"]), sum(one["names"])) for one in datasets]
        self.made = datasets
        names = [count for one in datasets for count in one["names"]]
        self.record_of = np.repeat(np.arange(len(names)), names)
        self.token_counts = np.array([count for one in datasets for count in one["tokens"]])

    def records_of(self, names: Any) -> Any:
        return self.record_of[names]

    def tokens(self, records: Any) -> Any:
        return self.token_counts[records]

    def shard_ends(self, number: int, *, names: bool) -> Any:
        one = self.made[number]
        ends = np.cumsum(one["shards"])
        return np.array([0, *accumulate(one["names"])])[ends] if names else ends


class Sized:
    """A dataset, as far as a sequence counts it."""

    def __init__(self, records: int, names: int) -> None:
        self.records, self.num_names = records, names

    def __len__(self) -> int:
        return self.records


def sequence(case: dict[str, Any], datasets: dict[str, Any]) -> Sequence:
    """The library's sequence of a case."""
    options = dict(case["options"])
    options.pop("last_step", None)
    own = options.pop("oversize", "error") == "own"
    seed, weights = options.pop("seed"), options.get("weights")
    if weights is not None:
        divisor = int(np.gcd.reduce(weights))
        weights = options["weights"] = tuple(weight // divisor for weight in weights)
    made = datasets[case["datasets"]]
    identity = case.get("collection", made[0]["id"])
    collection: Any = MadeUp(made, identity=identity, weights=weights)
    return Sequence(collection, seed=seed, options=Options(**options), own_batch=own)


def epoch_of(found: Sequence, epoch: int) -> list[list[Any]]:
    """All micro-batches of an epoch, in the form of the vectors."""
    drawn = []
    at: Cursor | None = Cursor.start_of(epoch)
    while at is not None:
        draw = found.draw(at, cursor=at, padding=False)
        drawn.append([at.block, at.batch, list(draw) if draw.slots is None else draw.slots, list(draw)])
        at = found.seek(at, 1)
    return drawn


def check_permutation(vector: dict[str, Any]) -> None:
    seed = np.array([int(vector["seed"], 16)], np.uint64)
    positions = np.array(vector["positions"], np.int64)
    images = permute(positions, vector["n"], seed).tolist()
    if images != vector["images"]:
        raise ValueError(f"{vector}: {images}")


def check_case(case: dict[str, Any], datasets: dict[str, Any]) -> None:
    found = sequence(case, datasets)
    for epoch, expected in case["epochs"].items():
        drawn: Any = epoch_of(found, int(epoch))
        if isinstance(expected, dict):
            data = json.dumps(drawn, separators=(",", ":")).encode("ascii")
            drawn = {"count": len(drawn), "sha256": hashlib.sha256(data).hexdigest()}
        if drawn != expected:
            raise ValueError(f"{case['datasets']}, {case['options']}, epoch {epoch}: {drawn}")


def main() -> int:
    warnings.simplefilter("error")
    vectors = json.loads(PATH.read_text(encoding="ascii"))
    for vector in vectors["permutations"]:
        check_permutation(vector)
    for case in vectors["cases"]:
        check_case(case, vectors["datasets"])
    if "torch" in sys.modules:
        raise ValueError("the order imports torch")
    sys.stdout.write(f"{np.__version__} {len(vectors['permutations'])} {len(vectors['cases'])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
