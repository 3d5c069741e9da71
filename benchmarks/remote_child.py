"""Two epochs of one contender in a process of its own, its cache empty at first; what they took, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import loaders
from benchmarks.harness import single_threaded
from benchmarks.loaders import Delivered, Plan
from benchmarks.peers._remote import RemoteLoader, Source
from benchmarks.remote_measure import process_seconds, tree_seconds
from benchmarks.shapes import SHAPES, Corpus

EPOCHS = 2


def delivered(batches: Iterator[Any]) -> Iterator[Delivered]:
    """What a peer or kvformat gives, alike."""
    for batch in batches:
        if isinstance(batch, Delivered):
            yield batch
        else:
            k, v = batch.kv.unbind(0)
            yield Delivered(k, v, batch.lengths.tolist())
        del batch


def timed(loader: RemoteLoader, begin: float, token_nbytes: int, server: psutil.Process) -> dict[str, float]:
    own, other = tree_seconds(), process_seconds(server)
    first_s, samples, tokens = 0.0, 0, 0
    for batch in delivered(loader.epoch()):
        first_s = first_s or time.perf_counter() - begin
        samples += len(batch.lengths)
        tokens += sum(batch.lengths)
        batch.k[-1, -1].view(-1)[-1].item()
        batch.v[-1, -1].view(-1)[-1].item()
        del batch
    return {
        "seconds": time.perf_counter() - begin,
        "first_s": first_s,
        "samples": samples,
        "nbytes": tokens * token_nbytes,
        "own_s": tree_seconds() - own,
        "server_s": process_seconds(server) - other,
    }


def main() -> None:
    task = json.loads(sys.argv[1])
    single_threaded()
    shape = SHAPES[task["shape"]].scaled(task["fraction"])
    corpus = Corpus(shape) if task["check"] else None
    module = importlib.import_module(task["module"])
    server = psutil.Process(task["server_pid"])
    begin = time.perf_counter()
    loader = module.open_remote(
        Source(**task["source"]), shape, task["variant"], Path(task["cache"]), task["batch_size"]
    )
    if corpus is not None:

        def stream(_order: object) -> Iterator[Delivered]:
            for _ in range(EPOCHS):
                yield from delivered(loader.epoch())

        loaders.check(stream, corpus, Plan(batch_size=task["batch_size"], epochs=EPOCHS))
        found: list[dict[str, float]] = []
    else:
        found = []
        for _ in range(EPOCHS):
            found.append(timed(loader, begin, shape.token_nbytes, server))
            begin = time.perf_counter()
    loader.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
