"""Beyond 2^31 elements, 2^32 and 2^33 bytes, on sparse files."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import kvformat
from kvformat.spec import limits
from kvformat.storage.local_write import LocalFiles
from tests.write.make import all_bytes, component, ids, kv, read, schema, writer

BLOCK = 1 << 20
LARGE = 2**21 + 1
"""Tokens whose two components have more than 2^31 bytes each."""
SMALL = 5
OF = schema(
    component("k", "tokens", 512, role="key", dtype="F16"),
    component("x", "tokens", 1024, dtype="I8"),
    token_ids=True,
)


class Sparse(LocalFiles):
    """Leaves holes where zeros would stand."""

    def write(self, fd, buffers, offset, path):
        start = offset
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                if block.any():
                    super().write(fd, [block.data], offset + at, path)
            offset += len(data)
        os.truncate(fd, max(os.fstat(fd).st_size, offset))
        return offset - start


class LostError(Exception):
    """Not one of ours."""


def test_sparse_files_are_what_plain_ones_are(tmp_path):
    found = []
    for name, files in (("plain", LocalFiles()), ("sparse", Sparse())):
        with writer(tmp_path / name, filesystem=files) as out:
            out.add("a", {key: np.zeros_like(value) for key, value in kv(300).items()}, token_ids=ids(300))
            out.add("b", kv(), token_ids=ids())
        found.append(read(tmp_path / name).id)
    assert found[0] == found[1]


def spots(num_tokens, seed):
    """Components of zeros but for a few places: first, last, and around each power of two."""
    components = {
        "k": np.zeros((1, num_tokens, 512), np.float16),
        "x": np.zeros((1, num_tokens, 1024), np.int8),
    }
    places = {}
    for name, value in components.items():
        flat = value.reshape(-1)
        wanted = {0, len(flat) - 1}
        for power in (2**30, 2**31):
            wanted |= {place for place in range(power - 2, power + 2) if place < len(flat)}
        places[name] = {place: (place + seed) % 100 + 1 for place in sorted(wanted)}
        for place, number in places[name].items():
            flat[place] = number
    return components, places


def check_spots(record, places):
    for name, expected in places.items():
        flat = record.component(name).reshape(-1)
        assert {place: int(flat[place]) for place in expected} == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_offsets_beyond_four_and_eight_gibibytes(tmp_path):
    files = Sparse()
    places, small = {}, {}
    with writer(tmp_path / "ds", of=OF, shard_nbytes=1 << 40, filesystem=files) as out:
        for name, num_tokens in (("large", LARGE), ("after-4", SMALL), ("larger", LARGE + 1), ("after-8", SMALL + 1)):
            components, places[name] = spots(num_tokens, len(name))
            out.add(name, components, token_ids=ids(num_tokens, len(name)))
            if num_tokens < LARGE:
                small[name] = components
            del components
    [shard] = (tmp_path / "ds" / "shards").rglob("*.safetensors")
    assert shard.stat().st_size > 2**33
    assert shard.stat().st_blocks * 512 < 2**28, "the test needs a file system with sparse files"
    report = kvformat.verify(tmp_path / "ds")
    assert (report.ok, report.id, report.records, report.nbytes) == (True, out.id, 4, shard.stat().st_size)

    for io in ("mmap", "pread"):
        dataset = kvformat.open(tmp_path / "ds", io=io)
        offsets = [dataset.index.shard(0).rows.flat["offset"][n] for n in range(4)]
        assert offsets == sorted(offsets)
        assert [offset.bit_length() for offset in offsets] == [0, 33, 33, 34]
        for name, components in small.items():
            for component_name, value in components.items():
                assert all_bytes(dataset[name].component(component_name)) == value.tobytes()
            assert dataset[name].extra("token_ids").tolist() == ids(len(value[0]), len(name)).tolist()
            assert torch.equal(dataset[name].slab("key", layer=0), torch.from_numpy(components["k"][0]))
    dataset = kvformat.open(tmp_path / "ds", io="mmap")
    for name in ("large", "larger"):
        assert dataset[name].component("x").numel() > 2**31
        check_spots(dataset[name], places[name])
        assert int(dataset[name].extra("token_ids")[-1]) == len(name) + dataset[name].num_tokens - 1
    # One large component as a tensor of its own, read in parts: no read may be longer than 2^31 bytes.
    copied = kvformat.open(tmp_path / "ds", io="pread")["larger"].component("x").reshape(-1)
    assert {place: int(copied[place]) for place in places["larger"]["x"]} == places["larger"]["x"]


def test_a_shard_beyond_the_limit(tmp_path):
    with pytest.raises(LostError), writer(tmp_path / "ds", shard_nbytes=limits.MAX_FILE_NBYTES) as out:
        out.add("a", kv(3), token_ids=ids(3))
        out._shards._shard.nbytes = limits.MAX_FILE_NBYTES // 4096 * 4096 - out._plan.header_size - 8192
        with pytest.raises(kvformat.InputError) as caught:
            out.add("b", kv(300), token_ids=ids(300))
        raise LostError
    assert caught.value.code == "E111"
