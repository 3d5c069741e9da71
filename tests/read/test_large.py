"""Offsets past 2^32 and 2^33, in files that are mostly holes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kvformat
from kvformat.codec.shard import encode_header, sum_record
from kvformat.spec import canonical, digests
from kvformat.spec.layout import Layout
from kvformat.testing.dataset_files import DatasetFiles, dump
from kvformat.testing.vectors import VALID
from kvformat.testing.vectors.values import fill

HUGE = 2**21 + 1  # tokens of 4096 bytes
SMALL = 3


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A shard of two records: 8 GiB of zeros but for its last key and value, then a small one that is whole."""
    schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=8, head_dim=128, token_ids=False)
    layout = Layout(schema)
    huge, small = layout.place((HUGE,)), layout.place((SMALL,))
    assert huge.nbytes > 2**33
    assert huge.tensors["v"].offset > 2**32
    files: DatasetFiles = VALID["no-token-ids"].build()
    files.manifest["schema"] = json.loads(dump(canonical.plain(schema)))
    size = files.manifest["header_size"] = layout.header_size(files.version, 4)

    values = {name: fill("BF16", small.tensors[name].shape, seed) for seed, name in enumerate("kv")}
    sums = [digests.slab_sum(values[name]) for name in "kv"]
    stored, total = sum_record((SMALL,), sums)
    documents = [digests.schema_digest(schema), digests.context_digest(kvformat.Context.unknown())]  # any two
    header = encode_header(layout, version=files.version, ordinal=0, placements=[huge, small], header_size=size)
    length = size + huge.nbytes + small.nbytes

    def column(*numbers: int) -> np.ndarray:
        return np.array(numbers, dtype="<u8")

    files.set_table("shards", {
        "sha256": np.frombuffer(bytes(range(32)), dtype=np.uint8).reshape(1, 32),  # what verification would compare
        "size": column(length),
        "first_record": column(0),
    })  # fmt: skip
    files.set_table("rows", {
        "offset": column(0, huge.nbytes),
        "dims": np.array([[HUGE], [SMALL]], dtype="<u4"),
        "document": np.frombuffer(b"".join(documents), dtype=np.uint8).reshape(2, 32),
        "record_sum": np.frombuffer(bytes(16) + total, dtype=np.uint8).reshape(2, 16),
    })  # fmt: skip
    files.set_names([(0, 0, b"huge"), (1, 1, b"small")])
    files.set_document_keys()
    files.manifest["totals"] = {"names": 2, "nbytes": length, "records": 2, "shards": 1, "tokens": HUGE + SMALL}
    files.shards = [bytearray()]
    files.reseal("parts")
    path = tmp_path_factory.mktemp("large") / "dataset"
    files.save(path)

    with (path / files.shard_paths()[0]).open("r+b") as shard:
        shard.truncate(length)
        shard.write(header)
        for name, byte in (("k", b"\x01"), ("v", b"\x02")):
            placed = huge.tensors[name]
            shard.seek(size + placed.offset + placed.nbytes - 1)
            shard.write(byte)
        for name, data in (*values.items(), ("sums", stored)):
            shard.seek(size + huge.nbytes + small.tensors[name].offset)
            shard.write(data)
    assert (path / files.shard_paths()[0]).stat().st_blocks * 512 < 1 << 20, "this file system keeps no holes"
    return path


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_a_record_that_begins_past_2_to_33(large: Path, io: str, verify: str) -> None:
    dataset = kvformat.open(large, io=io, verify=verify)
    record = dataset["small"]
    assert record.index == 1
    for seed, name in enumerate("kv"):
        wanted = fill("BF16", (1, SMALL, 8, 128), seed)
        assert record.component(name).view(-1).view(dtype=torch.uint8).numpy().tobytes() == wanted
        out = torch.empty(1, SMALL, 8, 128, dtype=torch.bfloat16)
        assert record.component(name, out=out).view(-1).view(dtype=torch.uint8).numpy().tobytes() == wanted
    assert torch.equal(record.slab("value", layer=0), record.component("v")[0])


def test_tensors_of_a_record_that_lie_past_2_to_32(large: Path) -> None:
    """Views over the file, whose items are numbered past 2^31 and whose elements are more than 2^30."""
    dataset = kvformat.open(large, io="mmap", verify="off")
    shard = dataset.shards.get(0)
    placement = dataset.layout.place((HUGE,))
    for name, bits in (("k", 0x0100), ("v", 0x0200)):
        placed = placement.tensors[name]
        first = (dataset.manifest.header_size + placed.offset) // placed.item
        view = shard.view("BF16").as_strided(placed.shape, placed.strides, first)
        assert view.numel() == HUGE * 1024 > 2**30
        last = view[0, -1].view(dtype=torch.int16).reshape(-1)
        assert last[-1].item() == bits
        assert not last[:-1].any()
        assert not view[0, 0].any()


def test_ranges_past_2_to_33_by_pread(large: Path) -> None:
    dataset = kvformat.open(large, io="pread", verify="off")
    file = dataset[0]._shard.file
    placed = dataset.layout.place((HUGE,)).tensors["v"]
    end = dataset.manifest.header_size + placed.offset + placed.nbytes
    assert end > 2**33
    assert bytes(file.read(end - 4, 4)) == b"\0\0\0\x02"
    assert dataset[0].num_tokens == HUGE
    assert dataset[0].nbytes > 2**33


def test_levels_1_and_2_accept_it(large: Path) -> None:
    """Sizes, rows and headers; the levels above would read the holes."""
    for level in (1, 2):
        report = kvformat.verify(large, level=level)
        assert report.findings == ()
        assert report.nbytes > 2**33
