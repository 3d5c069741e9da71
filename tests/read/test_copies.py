"""Copies of records and layers into buffers of one's own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import DamageError, LookupFailedError, UsageError
from kvformat.read import copyable, shards
from kvformat.read.recent import Recent
from kvformat.spec.schema import Axis, Component, Schema

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
        np.zeros(4096, dtype=object),  # bytes written there would be taken for pointers
        np.zeros(512, dtype=[("number", "<i8"), ("object", object)]),
        torch.zeros(4096, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(4096)),
        torch.zeros(64, 64).to_mkldnn(),
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
def test_a_released_view_is_refused(saved, io: str) -> None:
    dataset = kvformat.open(saved("one-record"), io=io)
    dataset.read_into(0, bytearray(4096))
    out = memoryview(bytearray(4096))
    out.release()
    with pytest.raises(UsageError, match="E081"):
        dataset.read_into(0, out)
    with pytest.raises(UsageError, match="E081"):
        dataset.read_slab_into(0, "key", 0, out)


@BOTH
def test_fields_may_have_any_name(saved, io: str) -> None:
    out = np.zeros(512, dtype=[("O", "<i4"), ("b", ">f8")])
    assert kvformat.open(saved("one-record"), io=io).read_into(0, out) == 320


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
    for key in (0.0, None, int, np.array([0, 0]), torch.tensor(0.5)):
        with pytest.raises(UsageError, match="E081"):
            dataset.read_into(key, out)
    for role, layer in (("key", 2), ("latent", 0)):
        with pytest.raises(LookupFailedError, match="E082"):
            dataset.read_slab_into(0, role, layer, out)


@BOTH
@pytest.mark.parametrize("group", [1, 1 << 18], ids=["slab by slab", "in one go"])
def test_a_damaged_body_is_refused_until_it_is_restored(saved, flip, monkeypatch, io: str, group: int) -> None:
    monkeypatch.setattr(copyable, "_GROUP_NBYTES", group)
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


def test_a_file_that_was_written_to_is_verified_again_whatever_its_time_says(saved, flip) -> None:
    path = saved("several-shards")
    dataset = kvformat.open(path, max_open_files=1)
    out = memoryview(bytearray(1 << 16))
    dataset.read_into(0, out)
    dataset.read_into(len(dataset) - 1, out)
    (shard,) = (path / "shards" / "00000").glob("00000000-*")
    before = shard.stat()
    flip(path, "several-shards")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DamageError, match="E072"):
        dataset.read_into(0, out)


@BOTH
@pytest.mark.parametrize("tensors", [60, 61, 62, 63, 64, 65, 66])
def test_no_tensor_is_taken_for_verified_because_of_others(tmp_path, io: str, tensors: int) -> None:
    axes = (Axis(name="tokens", size="tokens"),)
    schema = Schema(
        dims=("tokens",),
        components=tuple(
            Component(name=f"h{n}", role="hidden", layers=(n,), axes=axes, dtype="F32", codec="raw")
            for n in range(tensors)
        ),
        extras=(),
        shared=(),
    )
    path = tmp_path / "dataset"
    with kvformat.create(path, schema=schema, context=kvformat.Context.unknown()) as writer:
        values = {f"h{n}": np.full((1, 2), n, dtype="<f4") for n in range(tensors)}
        writer.add("clip", values, token_ids=[1, 2])
    placement = kvformat.open(path)[0]._placement
    (shard,) = path.rglob("00000000-*")
    data = bytearray(shard.read_bytes())
    start = len(data) - placement.nbytes
    for n in range(1, tensors):
        data[start + placement.tensors[f"h{n}"].offset] ^= 1
    shard.write_bytes(data)
    out = memoryview(bytearray(4096))
    for dataset in (kvformat.open(path, io=io), kvformat.open(path, io=io)):
        dataset[0].component("h0")
        dataset.read_slab_into(0, "hidden", 0, out)
        for n in range(1, tensors):
            with pytest.raises(DamageError, match="E072"):
                dataset.read_slab_into(0, "hidden", n, out)
            with pytest.raises(DamageError, match="E072"):
                dataset[0].component(f"h{n}")
        with pytest.raises(DamageError, match="E072"):
            dataset.read_into(0, out)


def test_sums_that_are_read_again_are_proved_again(saved, flip, base) -> None:
    """Where files are read, a slab's first touch does not trust sums that came with another read."""
    path = saved("one-record")
    dataset = kvformat.open(path, io="pread")
    out = memoryview(bytearray(4096))
    dataset.read_slab_into(0, "key", 0, out)
    files = base("one-record")
    files.tensor(0, "k")[-1] ^= 1
    files._seal_sums()  # the sums of what is there now, which the rows table does not know
    (shard,) = path.rglob("00000000-*")
    shard.write_bytes(files.shards[0])
    with pytest.raises(DamageError, match="E070"):
        dataset.read_slab_into(0, "key", 1, out)


def test_a_shard_dropped_while_it_is_added_is_not_listed(saved) -> None:
    """As another thread may do it, between any two steps."""
    dataset = kvformat.open(saved("several-shards"), max_open_files=1)
    dataset[4]
    pool = dataset.shards

    class Interrupted(Recent):  # type: ignore[type-arg]
        def put(self, key: int, value: object) -> None:
            super().put(key, value)
            if key == 0:
                pool.get(1)

    held, pool._open = pool.open_shards(), Interrupted()
    for shard in held:
        pool._open.put(shard.row.ordinal, shard)
    dataset[0]
    listed = [shard.row.ordinal for shard in pool.listed if shard is not None]
    assert listed == [shard.row.ordinal for shard in pool.open_shards()] == [1]
