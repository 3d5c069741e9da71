"""A reference of the order of training, written from Annex C of SPEC.md alone: plain integers, simple, not fast.

Comments such as ``# C.3.4`` name the rule that a line follows. A dataset is here what the order depends on: its id,
how many names and how many tokens each record has, and how many records each shard.

    python reference_order.py CASE.json        prints the micro-batches of a case, as JSON
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, gcd
from pathlib import Path
from typing import Any

WORD = 2**64
STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dataset:
    """What the order depends on."""

    id: str
    names: list[int]
    tokens: list[int]
    shards: list[int]


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its block and number, its items, and the record of each item."""

    block: int
    number: int
    items: list[int]
    records: list[int]


class Refused(Exception):  # noqa: N818 - the word of the specification
    """Its argument is the code."""


# ------------------------------------------------------------------------------------------------ C.1, C.2


def collection_id(datasets: list[Dataset]) -> str:
    if len(datasets) == 1:  # C.1.1
        return datasets[0].id
    return sha256(b"kvf1/collection\0" + canonical([dataset.id for dataset in datasets])).hex()


def reduced(weights: list[int]) -> list[int]:
    found = [weight // gcd(*weights) for weight in weights]  # C.1.3
    if min(weights) < 1 or sum(found) > 65536:
        raise Refused("E081")
    return found


def mix(state: int) -> int:
    z = (state + STEP) % WORD  # C.1.6
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def seed_of(key: int, a: int, b: int) -> int:
    return mix(mix(key + a) + b)


def permuted(seed: int, size: int, x: int) -> int:
    bits = (size - 1).bit_length()
    low_bits = bits // 2
    high_bits = bits - low_bits
    while True:
        high, low = x >> low_bits, x % 2**low_bits  # C.2.1
        for i in range(16):  # C.2.2
            key = mix(seed + i * STEP)
            if i % 2 == 0:
                high ^= mix(low + key) % 2**high_bits
            else:
                low ^= mix(high + key) % 2**low_bits
        x = high * 2**low_bits + low  # C.2.3
        if x < size:
            return x


# ----------------------------------------------------------------------------------------------------- C.3


class Order:
    """Items of every epoch."""

    def __init__(self, datasets: list[Dataset], options: dict[str, Any]) -> None:
        self.options = options
        key = {name: options[name] for name in ("over", "seed", "shuffle")}
        key["dataset"] = collection_id(datasets)
        self.weights = None
        if options["shuffle"] == "window":
            key["window_shards"] = options["window_shards"]
        if "weights" in options:
            key["weights"] = self.weights = reduced(options["weights"])
        self.key = sha256(b"kvf1/order\0" + canonical(key))  # C.1.4
        self.shards = [items_of_shards(dataset, options["over"]) for dataset in datasets]
        self.lengths = [sum(shards) for shards in self.shards]
        self.length = options.get("num_samples", sum(self.lengths))

    def tag_key(self, tag: str) -> int:
        """K(tag)."""
        return int.from_bytes(sha256(self.key + tag.encode("ascii"))[:8], "little")  # C.1.5

    def items(self, epoch: int) -> list[int]:
        """Items of an epoch, by position."""
        if self.weights is None:  # C.3.1
            every = [shard for shards in self.shards for shard in shards]
            return self.one_pass(every, 0, epoch)
        return list(islice(self.draws(), epoch * self.length, (epoch + 1) * self.length))  # C.3.2

    def draws(self) -> Iterator[int]:
        """Items of all epochs of a mix."""
        weights, size = self.weights, sum(self.weights)
        drawn = [0] * len(weights)
        passes: dict[tuple[int, int], list[int]] = {}
        draw = 0
        while True:
            cycle, place = divmod(draw, size)  # C.3.3
            u = place
            if self.options["shuffle"] != "none":
                u = permuted(seed_of(self.tag_key("cycle"), cycle, 0), size, place)
            source = next(s for s in range(len(weights)) if u < sum(weights[: s + 1]))
            number, position = divmod(drawn[source], self.lengths[source])  # C.3.4
            if (source, number) not in passes:
                passes[source, number] = self.one_pass(self.shards[source], source + 1, number)
            yield sum(self.lengths[:source]) + passes[source, number][position]
            drawn[source] += 1
            draw += 1

    def one_pass(self, shards: list[int], source: int, number: int) -> list[int]:
        """Items of a pass over a source, by position."""
        n = sum(shards)
        if self.options["shuffle"] == "none":  # C.3.5
            return list(range(n))
        if self.options["shuffle"] == "global":
            seed = seed_of(self.tag_key("items"), number, source)
            return [permuted(seed, n, position) for position in range(n)]
        return self.windows(shards, source, number)

    def windows(self, shards: list[int], source: int, number: int) -> list[int]:
        """Items of a pass over a source, a window after the other."""
        found = []
        seed = seed_of(self.tag_key("shards"), number, source)
        ordered = [permuted(seed, len(shards), j) for j in range(len(shards))]  # C.3.6
        base = seed_of(self.tag_key("windows"), number, source)
        span = self.options["window_shards"]
        for w, first in enumerate(range(0, len(shards), span)):
            places = []  # C.3.7
            for shard in ordered[first : first + span]:
                start = sum(shards[:shard])
                places += range(start, start + shards[shard])
            seed = seed_of(base, w, 0)
            found += [places[permuted(seed, len(places), r)] for r in range(len(places))]  # C.3.8
        return found


def items_of_shards(dataset: Dataset, over: str) -> list[int]:
    if over == "records":
        return dataset.shards
    found, record = [], 0
    for count in dataset.shards:
        found.append(sum(dataset.names[record : record + count]))
        record += count
    return found


# ------------------------------------------------------------------------------------------------ C.4, C.5


def batches(datasets: list[Dataset], options: dict[str, Any], epoch: int) -> list[Batch]:
    """The micro-batches of an epoch."""
    order = Order(datasets, options)
    items = order.items(epoch)
    record_of = [r for r, count in enumerate(n for dataset in datasets for n in dataset.names) for _ in range(count)]
    if options["over"] == "records":
        record_of = list(range(len(record_of)))
    tokens = [count for dataset in datasets for count in dataset.tokens]
    span = 4096
    if "batch_size" in options:
        span = options["batch_size"] * ceil(4096 / options["batch_size"])  # C.4.2
    found = []
    for block, first in enumerate(range(0, len(items), span)):
        part = items[first : first + span]
        if "batch_size" in options:
            size = options["batch_size"]
            cut = [part[i : i + size] for i in range(0, len(part), size)]
            if options.get("drop_last"):
                cut = [batch for batch in cut if len(batch) == size]
        else:
            cut = packed(part, [tokens[record_of[item]] for item in part], options)
        found += [Batch(block, n, batch, [record_of[item] for item in batch]) for n, batch in enumerate(cut)]
    return found


def packed(items: list[int], tokens: list[int], options: dict[str, Any]) -> list[list[int]]:
    budget, most = options["max_tokens"], options.get("max_records", len(items))
    found: list[list[int]] = []
    held: list[int] = []
    for item, size in zip(items, tokens, strict=True):
        if size > budget and options.get("oversize") != "own":  # C.4.4
            raise Refused("E086")
        for number, batch in enumerate(found):  # C.4.3
            if held[number] + size <= budget and len(batch) < most:
                batch.append(item)
                held[number] += size
                break
        else:
            found.append([item])
            held.append(size)
    return found


def steps(datasets: list[Dataset], options: dict[str, Any], epoch: int, world: int) -> list[list[tuple[Batch, bool]]]:
    """The steps of an epoch: for each rank its micro-batch, and whether that is a copy."""
    found = []
    every = batches(datasets, options, epoch)
    for first in range(0, len(every), world):
        step = every[first : first + world]
        if len(step) < world and options.get("last_step") != "pad":  # C.5.3
            break
        found.append([(step[rank % len(step)], rank >= len(step)) for rank in range(world)])
    if not found:
        raise Refused("E081")  # C.5.5
    return found


def cursors(datasets: list[Dataset], options: dict[str, Any], epoch: int, world: int) -> list[tuple[int, int, int]]:
    """The cursor that every micro-batch of each step carries: epoch, block, number."""
    every = batches(datasets, options, epoch)
    count = len(steps(datasets, options, epoch, world))
    behind = [every[step * world] for step in range(1, count)]
    return [*((epoch, batch.block, batch.number) for batch in behind), (epoch + 1, 0, 0)]  # C.5.4


# ---------------------------------------------------------------------------------------------------- parts


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path, help='{"datasets": [...], "options": {...}, "epoch": 0}')
    case = json.loads(parser.parse_args(arguments).case.read_text(encoding="utf-8"))
    datasets = [Dataset(**dataset) for dataset in case["datasets"]]
    print(json.dumps([batch.items for batch in batches(datasets, case["options"], case["epoch"])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
