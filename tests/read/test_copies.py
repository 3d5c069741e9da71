"""Copies of records and layers into buffers of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import DamageError, LookupFailedError, UsageError
from kvformat.read import shards, stored

BOTH = pytest.mark.parametrize("io", ["mmap", "pread"])
MODES = pytest.mark.parametrize("verify", ["first", "always", "off"])


def body(record: kvformat.Record) -> bytes:
    return b"".join(record.component(name).contiguous().view(torch.uint8).numpy().tobytes() for name in ("k", "v"))


@BOTH
@MODES
def test_a_body_is_k_and_then_v(saved, io: str, verify: str) -> None:
    path = saved("several-shards")
    plain = kvformat.open(path)
    dataset = kvformat.open(path, io=io, verify=verify)
    for number in [*range(len(dataset)), *reversed(range(len(dataset)))]:
        out = bytearray(plain[number].nbytes)
        nbytes = dataset.read_into(number, out)
        assert out[:nbytes] == body(plain[number])
        assert not any(out[nbytes:])


@BOTH
def test_any_buffer_will_do(saved, io: str) -> None:
    dataset = kvformat.open(saved("one-record"), io=io)
    wanted = body(dataset[0])
    for _ in range(2):
        tensor = torch.zeros(2, 2, 5, 2, 4, dtype=torch.bfloat16)
        assert dataset.read_into(0, tensor) == len(wanted)
        assert torch.equal(tensor[0], dataset[0].component("k"))
        assert torch.equal(tensor[1], dataset[0].component("v"))
        array = np.zeros((3, len(wanted) // 2), dtype=np.uint16)
        dataset.read_into("clip-0000", array)
        assert array.tobytes()[: len(wanted)] == wanted
        shorts = memoryview(bytearray(len(wanted))).cast("h")
        dataset.read_into(-1, shorts)
        assert bytes(shorts) == wanted
        exact = bytearray(len(wanted))
        dataset.read_into(np.int64(0), exact)
        assert exact == wanted


@BOTH
def test_the_tensors_of_a_body_are_views_of_the_buffer(saved, io: str) -> None:
    dataset = kvformat.open(saved("one-record"), io=io)
    buffer = torch.zeros(dataset[0].nbytes, dtype=torch.uint8)
    dataset.read_into(0, buffer)
    found = dataset.tensors_in(buffer, 0)
    assert torch.equal(found["v"], dataset[0].component("v"))
    assert found["k"].data_ptr() == buffer.data_ptr()
    with pytest.raises(UsageError, match="E081"):
        dataset.tensors_in(bytearray(8), 0)


@BOTH
@MODES
@pytest.mark.parametrize(
    "out",
    [
        bytearray(3),
        memoryview(bytearray(3)),
        bytes(4096),
        memoryview(bytes(4096)),
        memoryview(bytearray(8192))[::2],
        torch.empty(64, 64)[:, ::2],
        torch.empty(4096, dtype=torch.uint8, device="meta"),
        np.zeros((64, 64))[:, 1:],
        "a string",
        None,
    ],
)
def test_what_cannot_be_copied_into_is_refused(saved, io: str, verify: str, out) -> None:
    dataset = kvformat.open(saved("one-record"), io=io, verify=verify)
    for _ in range(2):
        with pytest.raises(UsageError, match="E081"):
            dataset.read_into(0, out)
        with pytest.raises(UsageError, match="E081"):
            dataset.read_slab_into(0, "key", 1, out)
        dataset.read_into(0, bytearray(4096))  # from now on there is nothing left to verify


@BOTH
def test_lookups_fail_as_elsewhere(saved, io: str) -> None:
    dataset = kvformat.open(saved("one-record"), io=io)
    out = memoryview(bytearray(4096))
    dataset.read_into(0, out)
    for key in (1, -2, "nobody"):
        with pytest.raises(LookupFailedError, match="E080"):
            dataset.read_into(key, out)
        with pytest.raises(LookupFailedError, match="E080"):
            dataset.read_slab_into(key, "key", 0, out)
    for key in (0.0, None):
        with pytest.raises(UsageError, match="E081"):
            dataset.read_into(key, out)
    for role, layer in (("key", 2), ("latent", 0)):
        with pytest.raises(LookupFailedError, match="E082"):
            dataset.read_slab_into(0, role, layer, out)


@BOTH
@pytest.mark.parametrize("group", [1, 1 << 18], ids=["slab by slab", "in one go"])
def test_a_damaged_body_is_refused_until_it_is_restored(saved, flip, monkeypatch, io: str, group: int) -> None:
    monkeypatch.setattr(stored, "_GROUP_NBYTES", group)
    path = saved("one-record")
    flip(path, "one-record", tensor="v", at=70)
    out = memoryview(bytearray(4096))
    dataset = kvformat.open(path, io=io)
    for _ in range(2):
        with pytest.raises(DamageError, match="E072"):
            dataset.read_into(0, out)
        with pytest.raises(DamageError, match="E072"):
            dataset.read_slab_into(0, "value", 0, out)
        dataset.read_slab_into(0, "value", 1, out)
        dataset.read_slab_into(0, "key", 0, out)
    flip(path, "one-record", tensor="v", at=70)
    dataset.read_into(0, out)
    assert out[: len(body(dataset[0]))] == body(dataset[0])


@BOTH
def test_always_looks_at_every_copy(saved, flip, io: str) -> None:
    path = saved("one-record")
    out = memoryview(bytearray(4096))
    always = kvformat.open(path, io=io, verify="always")
    first = kvformat.open(path, io=io)
    for dataset in (always, first):
        dataset.read_into(0, out)
        dataset.read_slab_into(0, "key", 0, out)
    flip(path, "one-record")
    with pytest.raises(DamageError, match="E072"):
        always.read_into(0, out)
    with pytest.raises(DamageError, match="E072"):
        always.read_slab_into(0, "key", 0, out)
    first.read_into(0, out)


@BOTH
def test_layers_verified_one_by_one_make_a_verified_body(saved, flip, io: str) -> None:
    path = saved("one-record")
    dataset = kvformat.open(path, io=io)
    out = memoryview(bytearray(4096))
    for role in ("key", "value"):
        for layer in (0, 1):
            dataset.read_slab_into(0, role, layer, out)
    flip(path, "one-record")
    dataset.read_into(0, out)  # in this mode, a second touch is not verified
    with pytest.raises(DamageError, match="E072"):
        kvformat.open(path, io=io).read_into(0, out)


@pytest.mark.parametrize("listed", [0, 2, 1 << 14])
def test_dropped_shards_are_opened_again(saved, monkeypatch, listed: int) -> None:
    monkeypatch.setattr(shards, "_LISTED", listed)
    path = saved("several-shards")
    plain = kvformat.open(path)
    dataset = kvformat.open(path, max_open_files=1)
    out = memoryview(bytearray(1 << 16))
    for number in [0, 4, 0, 2, 2, 1, 3, 4, 0] * 2:
        nbytes = dataset.read_into(number, out)
        assert out[:nbytes] == body(plain[number])
        assert dataset.shards.num_open == 1


def test_another_file_in_a_shards_place_is_verified_again(saved, flip) -> None:
    path = saved("several-shards")
    dataset = kvformat.open(path, max_open_files=1)
    out = memoryview(bytearray(1 << 16))
    dataset.read_into(0, out)
    dataset.read_into(len(dataset) - 1, out)
    (shard,) = (path / "shards" / "00000").glob("00000000-*")
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data)
    flip(path, "several-shards")
    with pytest.raises(DamageError, match="E072"):
        dataset.read_into(0, out)
