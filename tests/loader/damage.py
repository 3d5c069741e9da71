"""A damaged copy of a dataset, and a loader that meets the damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import kvformat
from tests.write.make import all_bytes


def damaged_copy(source: Path, target: Path, *, record: int) -> Path:
    """A copy in which one bit of a record's keys is flipped."""
    shutil.copytree(source, target)
    values = all_bytes(kvformat.open(source)[record].component("k"))
    for shard in target.glob("shards/*/*.safetensors"):
        data = bytearray(shard.read_bytes())
        at = data.find(values)
        if at >= 0:
            data[at + len(values) // 2] ^= 4
            shard.chmod(0o644)
            shard.write_bytes(data)
            return target
    raise AssertionError(f"no shard of {source} holds record {record}")


def records_in_order(dataset: kvformat.Dataset) -> Iterator[int]:
    """Numbers of the records, each read and verified."""
    for record in dataset:
        for component in dataset.schema.components:
            record.component(component.name, copy=True)
        yield record.index
