"""Random edits, sealed again: package and reference reader agree on what is a dataset, and nothing ever crashes."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import kvformat
from kvformat.codes import CODES
from kvformat.errors import KVFormatError
from kvformat.testing.dataset_files import DatasetFiles, Level
from kvformat.testing.vectors import VALID
from tests.spec.reference import refusal
from tests.testing.touch import touch_all

BASES = sorted(set(VALID) - {"nan-payloads"})
LEVELS: tuple[Level, ...] = ("sums", "record_sums", "shards", "parts")
ODD: tuple[Any, ...] = (
    0, 1, 2, 3, -1, 5, 7, 64, 4096, 65_535, 65_536, 2**24, 2**24 + 1, 2**31, 2**32 - 1, 2**48, 2**53 - 1, 2**53, 2**63,
    2**64 - 1, True, False, None, 1.5, "", "a", "0" * 64, "0" * 16, "tokens", "BF16", "I8", "raw", "key", "value",
    "other", "latent", "k", "v", "sums", [], {}, [0], [1], ["tokens"], [0, 1], [1, 0], {"last": 3}, "7ff0000000000000",
    "8000000000000000",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def edit_json(files: DatasetFiles, choose: random.Random) -> str:
    which = choose.choice(("manifest", "manifest", "manifest", "root"))
    decoded = getattr(files, which)
    *parents, last = choose.choice(places(decoded)[1:])
    parent = decoded
    for step in parents:
        parent = parent[step]
    how = choose.choice(("set", "set", "set", "drop", "add"))
    if how == "set":
        parent[last] = choose.choice(ODD)
    elif how == "drop":
        del parent[last]
    elif isinstance(parent, list):
        parent.insert(choose.randrange(len(parent) + 1), parent[last])
    else:
        name = choose.choice(("x", "name", "size", "quant", "stage", "requires", "extensions", "model", "factor"))
        parent[name] = choose.choice(ODD)
    if which == "root":
        files.reseal("root")
    else:
        adopted = (*parents, last)[0] == "schema" and choose.random() < 0.8 and files.adopt_schema()
        files.reseal("shards" if adopted else "manifest")
    return f"{how} {which} {[*parents, last]}"


def edit_cell(files: DatasetFiles, choose: random.Random) -> str:
    table = choose.choice(sorted(files.parts))
    part = choose.choice(files.parts[table])
    name = choose.choice(sorted(part.columns))
    column = part.columns[name].reshape(-1)
    at, top = choose.randrange(len(column)), int(np.iinfo(column.dtype).max)
    old = int(column[at])
    values = (old + 1, old - 1, 0, 1, top, old ^ 1, old + 4096, old * 2, choose.randrange(top + 1), top // 2 + 1)
    column[at] = choose.choice(values) % (top + 1)
    if name == "key" and at == 0 and choose.random() < 0.5:
        part.entry["first_key"] = f"{int(column[at]):016x}"
    files.reseal("parts")
    return f"{table}.{name}[{at}] = {column[at]} instead of {old}"


def edit_rows(files: DatasetFiles, choose: random.Random) -> str:
    """Exchange two rows of a part, or most columns of them."""
    table = choose.choice(sorted(files.parts))
    part = choose.choice(files.parts[table])
    count = part.entry["count"]
    one, two = choose.randrange(count), choose.randrange(count)
    for column in part.columns.values():
        if len(column) == count and choose.random() < 0.9:
            column[[one, two]] = column[[two, one]]
    files.reseal("parts")
    return f"{table}: rows {one} and {two}"


def edit_tensor(files: DatasetFiles, choose: random.Random) -> str:
    record = choose.randrange(len(files.column("rows", "offset")))
    name = choose.choice([*files.placement(record).tensors, "pad"])
    data = files.tensor(record, name)
    for _ in range(choose.randrange(1, 9) if len(data) else 0):
        data[choose.randrange(len(data))] = choose.randrange(256)
    level = choose.choice(LEVELS)
    files.reseal(level)
    return f"{name} of record {record}, sealed from {level}"


def edit_header(files: DatasetFiles, choose: random.Random) -> str:
    shard = choose.randrange(len(files.shards))
    data = files.shards[shard]
    at = choose.randrange(files.header_size if choose.random() < 0.3 else 700)
    data[at] = choose.choice((32, 48, 49, 0, 34, 123, data[at] ^ 1, data[at] ^ 128))
    files.reseal("shards")
    return f"byte {at} of shard {shard} = {data[at]}"


def edit_part(files: DatasetFiles, choose: random.Random) -> str:
    table = choose.choice(sorted(files.parts))
    part = choose.choice(files.parts[table])
    at = choose.randrange(len(part.data))
    part.data[at] ^= 1 << choose.randrange(8)
    files.reseal("parts")
    return f"byte {at} of a part of {table}"


EDITS = (edit_json, edit_json, edit_json, edit_cell, edit_cell, edit_rows, edit_tensor, edit_header, edit_part)


@pytest.mark.parametrize("seed", range(10))
def test_random_edits_are_judged_alike(seed: int, base, tmp_path: Path) -> None:
    choose = random.Random(seed)
    accepted = 0
    for number in range(60):
        name = choose.choice(BASES)
        files = base(name)
        what = f"{name}: {choose.choice(EDITS)(files, choose)}"
        path = tmp_path / str(number) / "dataset"
        files.save(path)
        codes = {finding.code for finding in kvformat.verify(path).findings}
        code = refusal(path)
        assert (code is None) == (not codes), f"{what}: {code} against {codes}"
        assert code is None or code in codes, f"{what}: {code} against {codes}"
        assert all(CODES[found].kind == "reader" for found in codes), what
        accepted += code is None
        wrong, raised = touched(path)
        # What a reader stumbles over, verification finds; a name it cannot find is a damaged look-up table.
        assert raised is None or raised in codes, f"{what}: {raised} against {codes}"
        assert not wrong or codes, what
        if code is None:
            check_stock(path)
    assert 0 < accepted < 30


def check_stock(path: Path) -> None:
    """What is accepted, stock safetensors opens with the same tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\[W003\]")
        dataset = kvformat.open(path)
    tensors = [*dataset.schema.components, *dataset.schema.extras]
    for ordinal in range(dataset.manifest.totals.shards):
        shard = dataset.index.shard(ordinal)
        stock = dict(safetensors.deserialize((path / shard.path).read_bytes()))
        for number in range(shard.first, shard.end):
            for tensor in tensors:
                found = stock[f"{number - shard.first:04d}/{tensor.name}"]
                placed = dataset.layout.place(tuple(dataset[number].dims.values())).tensors[tensor.name]
                assert (found["dtype"], tuple(found["shape"])) == (tensor.dtype, placed.shape)
                assert bytes(found["data"]) == bytes(dataset[number].stored(tensor.name))


def touched(path: Path) -> tuple[int, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\[W003\]")
            return touch_all(kvformat.open(path)), None
    except KVFormatError as error:
        return 0, error.code
