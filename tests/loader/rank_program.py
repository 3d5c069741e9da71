"""One rank of a training job on the CPU: loads, and sums over the ranks in every step. Prints what became of it.

Arguments: ``lockstep`` or ``alone``; what loads; rank; number of ranks; a file to meet at; location of the dataset.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import kvformat
from kvformat.loader import BatchSampler, Collate, KVDataset, KVLoader, lockstep
from tests.loader.damage import records_in_order


def all_gather_object(obj: object) -> list[object]:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, obj)
    return found


def loading(kind: str, dataset: kvformat.Dataset, rank: int, world_size: int) -> Iterable[object]:
    """What the job iterates over."""
    if kind == "records":
        return records_in_order(dataset)
    sampler = BatchSampler(dataset, batch_size=1, shuffle="none", rank=rank, world_size=world_size)
    if kind == "DataLoader":
        return DataLoader(KVDataset(dataset), batch_sampler=sampler, collate_fn=Collate(), num_workers=2)
    return KVLoader(dataset, sampler, prefetch_nbytes=0)


def report(**what: object) -> None:
    print(json.dumps({"at": time.time(), **what}), flush=True)  # noqa: T201 -- the test reads it


def main(mode: str, kind: str, rank: str, world_size: str, store: str, location: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=120),  # longer than the test waits: nothing may end by it
    )
    loader = loading(kind, kvformat.open(location), int(rank), int(world_size))
    steps = 0
    report(state="started")
    try:
        for _ in lockstep(loader, all_gather_object) if mode == "lockstep" else loader:
            total = torch.ones(())
            dist.all_reduce(total)
            assert total.item() == int(world_size)
            steps += 1
    except Exception as error:
        report(
            state="failed",
            steps=steps,
            error=type(error).__name__,
            text=str(error),
            code=getattr(error, "code", None),
            record=getattr(error, "record", None),
        )
        raise
    finally:
        dist.destroy_process_group()
    report(state="finished", steps=steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
