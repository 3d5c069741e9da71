"""The dataset and its records as users see them."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import (
    DamageError,
    DatasetNotFoundError,
    FormatError,
    IdentityError,
    LookupFailedError,
    UnsupportedError,
    UsageError,
)
from kvformat.spec import canonical
from kvformat.testing.vectors import COLLIDING_NAMES, VALID
from tests.testing.touch import touch_all

BOTH = pytest.mark.parametrize("io", ["mmap", "pread"])


def stored(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------------------------------- what it is


def test_what_a_dataset_is(saved) -> None:
    case = VALID["model-context"]
    path = saved("model-context")
    dataset = kvformat.open(path)
    assert (len(dataset), dataset.num_names, dataset.num_tokens) == (2, 2, 10)
    assert dataset.schema == case.schema
    assert dataset.context == case.context
    assert dataset.text == case.options["text"]
    assert dataset.provenance == case.options["provenance"]
    assert dataset.nbytes == sum(file.stat().st_size for file in (path / "shards").rglob("*.safetensors"))
    assert dataset.location == str(path)
    assert dataset.id in kvformat.verify(path).id
    assert "2 records" in repr(dataset)
    assert repr(dataset[0]).startswith("<kvformat.Record 0 of ")
    assert "4 tokens" in repr(dataset[0])


def test_a_file_url_is_a_location(saved) -> None:
    path = saved("one-record")
    assert kvformat.open(path.as_uri()).id == kvformat.open(str(path)).id


def test_a_dataset_may_be_reached_through_a_link(saved, tmp_path: Path) -> None:
    path = saved("one-record")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert touch_all(kvformat.open(link)) == 0
    assert kvformat.verify(link).ok


def test_a_relative_location_survives_a_change_of_directory(saved, monkeypatch, tmp_path: Path) -> None:
    path = saved("one-record")
    monkeypatch.chdir(path.parent)
    dataset = kvformat.open(path.name)
    monkeypatch.chdir(tmp_path.parent)
    assert touch_all(dataset) == 0
    assert touch_all(pickle.loads(pickle.dumps(dataset))) == 0


# ---------------------------------------------------------------------------------------------- records


def test_records_by_number(saved) -> None:
    dataset = kvformat.open(saved("several-shards"))
    assert [record.index for record in dataset] == [0, 1, 2, 3, 4]
    assert [record.num_tokens for record in dataset] == [3, 5, 2, 6, 4]
    assert dataset[-1].index == 4
    assert dataset[-5].index == 0
    assert dataset[np.int64(2)].index == 2
    assert dataset[torch.tensor(3)].index == 3
    for number in (5, -6, 2**70):
        with pytest.raises(IndexError, match="E080"):
            dataset[number]


def test_records_by_name(saved) -> None:
    dataset = kvformat.open(saved("aliases-and-unicode-names"))
    for entry, record in zip(VALID["aliases-and-unicode-names"].entries, dataset, strict=True):
        assert record.names == list(entry.names)
        for name in entry.names:
            assert name in dataset
            assert dataset[name].index == record.index
    assert dataset["caf\u00e9"].index == dataset["cafe\u0301"].index == 0
    for name in ("caf", "", "x" * 511, "\ud800", "Zzz"):
        assert name not in dataset
        with pytest.raises(KeyError, match="E080"):
            dataset[name]
    assert 7 not in dataset
    assert sum(1 for _ in dataset.names()) == dataset.num_names


def test_names_with_equal_hashes_are_told_apart(saved) -> None:
    """In one part, across parts, and where only one of the two is there."""
    for base in ("tables-in-parts", "aliases-and-unicode-names"):
        dataset = kvformat.open(saved(base))
        given = {name: number for number, entry in enumerate(VALID[base].entries) for name in entry.names}
        for pair in COLLIDING_NAMES:
            for name in pair:
                assert (name in dataset) == (name in given)
                if name in given:
                    assert dataset[name].index == given[name]


@pytest.mark.parametrize("key", [None, 1.0, b"clip-0000", slice(0, 2), [0], (0,)])
def test_records_are_looked_up_by_number_or_name(saved, key) -> None:
    dataset = kvformat.open(saved("one-record"))
    with pytest.raises(UsageError, match="E081"):
        dataset[key]


def test_records_by_document(saved) -> None:
    dataset = kvformat.open(saved("tables-in-parts"))
    for number, entry in enumerate(VALID["tables-in-parts"].entries):
        found = dataset.find(document=entry.document.digest)
        assert found is not None
        assert found.index == number
        near = entry.document.digest[:8] + bytes(24)
        assert dataset.find(document=near) is None
    assert dataset.find(document=bytes(32)) is None
    assert dataset.find(document=b"\xff" * 32) is None
    for wrong in (b"", bytes(31), "0" * 64, bytearray(32)):
        with pytest.raises(UsageError, match="E081"):
            dataset.find(document=wrong)


def test_a_record_says_what_it_is(saved) -> None:
    case = VALID["dims-of-zero"]
    dataset = kvformat.open(saved("dims-of-zero"))
    for number, (record, entry) in enumerate(zip(dataset, case.entries, strict=True)):
        dims = {"tokens": 4, "media": len(entry.document.media), **entry.dims}
        assert record.dims == dims
        assert list(record.dims) == ["tokens", "media", "boxes"]
        assert record.document == entry.document.digest
        assert record.fingerprint is None
        assert record.nbytes % 4096 == 0
        assert tuple(record.extra("media").shape) == (dims["media"], 49)
        assert tuple(record.component("patches").shape) == (2, dims["boxes"], 3)
        assert tuple(record.slab("hidden", layer=4).shape) == (dims["boxes"], 3)
        assert stored(record.extra("pairs")) == case.tensors(number)["pairs"][2]


def test_a_fingerprint_identifies_values(saved) -> None:
    dataset = kvformat.open(saved("model-context"))
    found = {record.fingerprint for record in dataset}
    assert len(found) == 2
    assert all(isinstance(value, bytes) and len(value) == 32 for value in found)


# ---------------------------------------------------------------------------------------------- tensors


@BOTH
def test_a_slab_is_a_row_of_its_component(saved, io: str) -> None:
    dataset = kvformat.open(saved("sliding-window"), io=io)
    for record in dataset:
        for component in dataset.schema.components:
            whole = record.component(component.name)
            for row, layer in enumerate(component.layers):
                slab = record.slab(component.role, layer=layer)
                assert slab.shape == whole[row].shape
                assert torch.equal(slab, whole[row])
    assert tuple(dataset[0].slab("key", layer=0).shape) == (4, 2, 4)
    assert tuple(dataset[0].slab("key", layer=2).shape) == (9, 2, 4)
    assert tuple(dataset[3].slab("key", layer=0).shape) == (1, 2, 4)


@BOTH
def test_a_shared_layer_gives_the_slab_of_its_source(saved, io: str) -> None:
    record = kvformat.open(saved("shared-layers"), io=io)[0]
    for layer, source in ((1, 0), (2, 0), (65_535, 3)):
        for role in ("key", "value"):
            assert torch.equal(record.slab(role, layer=layer), record.slab(role, layer=source))
    assert record.slab("key", layer=1).data_ptr() == record.slab("key", layer=0).data_ptr() or io == "pread"


def test_latent_attention_has_no_keys(saved) -> None:
    record = kvformat.open(saved("latent-attention"))[0]
    assert tuple(record.slab("latent", layer=2).shape) == (5, 12)
    assert tuple(record.slab("rope_key", layer=2).shape) == (5, 4)
    with pytest.raises(LookupFailedError, match="E082"):
        record.slab("key", layer=0)


@pytest.mark.parametrize("touch", [
    lambda record: record.component("q"),
    lambda record: record.component("token_ids"),
    lambda record: record.component("sums"),
    lambda record: record.component("pad"),
    lambda record: record.extra("k"),
    lambda record: record.extra("sums"),
    lambda record: record.extra("position_ids"),
    lambda record: record.slab("key", layer=2),
    lambda record: record.slab("key", layer=-1),
    lambda record: record.slab("query", layer=0),
    lambda record: record.slab("other", layer=0),
])  # fmt: skip
def test_what_the_schema_has_not_is_not_found(saved, touch) -> None:
    record = kvformat.open(saved("one-record"))[0]
    with pytest.raises(KeyError, match="E082") as caught:
        touch(record)
    assert caught.value.code == "E082"


@BOTH
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_copies_are_independent_and_views_are_not(saved, io: str, verify: str) -> None:
    path = saved("one-record")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    record = kvformat.open(path, io=io, verify=verify)[0]
    wanted = stored(record.component("k"))
    for own in (
        record.component("k", copy=True),
        record.slab("key", layer=0, copy=True),
        record.extra("token_ids", copy=True),
    ):
        own.zero_()
    assert stored(record.component("k")) == wanted
    if io == "mmap":
        view = record.component("k")
        assert view.data_ptr() == record.component("k").data_ptr()
        assert record.slab("key", layer=1).data_ptr() == view[1].data_ptr()
        view.zero_()  # never do this: it is other views of this process that change, and the file that does not
        if verify == "always":
            with pytest.raises(DamageError, match="E072"):
                record.slab("key", layer=1)
        else:
            assert not record.slab("key", layer=1).any()
    assert {file: file.read_bytes() for file in before} == before
    assert kvformat.verify(path).ok


@BOTH
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_out_is_filled_and_returned(saved, io: str, verify: str) -> None:
    dataset = kvformat.open(saved("several-shards"), io=io, verify=verify)
    for _ in range(2):
        for record in dataset:
            whole = torch.empty(2, record.num_tokens, 2, 4, dtype=torch.bfloat16)
            assert record.component("k", out=whole) is whole
            assert stored(whole) == stored(record.component("k"))
            slab = torch.empty(record.num_tokens, 2, 4, dtype=torch.bfloat16)
            assert record.slab("value", layer=1, out=slab) is slab
            assert torch.equal(slab, record.component("v")[1])


def test_out_may_be_a_part_of_a_larger_buffer(saved) -> None:
    record = kvformat.open(saved("one-record"))[0]
    ring = torch.zeros(4, 5, 2, 4, dtype=torch.bfloat16)
    record.component("k", out=ring[1:3])
    assert stored(ring[1:3]) == stored(record.component("k"))
    assert not ring[0].any()
    assert not ring[3].any()


@BOTH
@pytest.mark.parametrize("out", [
    torch.empty(2, 5, 2, 5, dtype=torch.bfloat16),
    torch.empty(5, 2, 4, dtype=torch.bfloat16),
    torch.empty(2, 5, 2, 4, dtype=torch.float16),
    torch.empty(2, 5, 2, 8, dtype=torch.bfloat16)[..., ::2],
    torch.empty(2, 5, 2, 4, dtype=torch.bfloat16, device="meta"),
    torch._neg_view(torch.empty(2, 5, 2, 4, dtype=torch.bfloat16)),
    3,
], ids=["shape", "rank", "dtype", "strides", "device", "negated", "no tensor"])  # fmt: skip
def test_out_must_fit(saved, io: str, out: torch.Tensor) -> None:
    record = kvformat.open(saved("one-record"), io=io)[0]
    with pytest.raises(UsageError, match="E081"):
        record.component("k", out=out)


def test_damage_is_not_handed_out_in_out_unnoticed(saved, flip) -> None:
    path = saved("one-record")
    flip(path, "one-record")
    for io in ("mmap", "pread"):
        record = kvformat.open(path, io=io)[0]
        with pytest.raises(DamageError, match="E072"):
            record.component("k", out=torch.empty(2, 5, 2, 4, dtype=torch.bfloat16))
        with pytest.raises(DamageError, match="E072"):
            record.slab("key", layer=0, out=torch.empty(5, 2, 4, dtype=torch.bfloat16))


# ---------------------------------------------------------------------------------------------- options and refusals


def test_arguments_are_checked(saved) -> None:
    path = saved("one-record")
    for options in ({"verify": "maybe"}, {"io": "direct"}, {"max_open_files": 0}, {"verify": True}):
        with pytest.raises(UsageError, match="E081"):
            kvformat.open(path, **options)
    with pytest.raises(UsageError, match="E206"):
        kvformat.open("nosuch://bucket/dataset")
    for location in ("", "a\0b", b"bytes"):
        with pytest.raises(UsageError, match="E081"):
            kvformat.open(location)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="E001"):
        kvformat.open(tmp_path)
    with pytest.raises(DatasetNotFoundError, match="E001"):
        kvformat.open(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetNotFoundError, match="E001"):
        kvformat.open(tmp_path / "file")
    (tmp_path / ".staging").mkdir()
    with pytest.raises(DatasetNotFoundError, match=r"staged work"):
        kvformat.open(tmp_path)
    with pytest.raises(DatasetNotFoundError, match="E001"):
        kvformat.verify(tmp_path)


def test_a_pinned_id(saved) -> None:
    path = saved("one-record")
    identity = kvformat.open(path).id
    assert kvformat.open(path, expected_id=identity).id == identity
    assert kvformat.open(path, expected_id=identity.upper()).id == identity
    for other in ("", identity[:-1], "0" * 64):
        with pytest.raises(IdentityError, match="E007") as caught:
            kvformat.open(path, expected_id=other)
        assert identity in str(caught.value)


def test_a_newer_version_is_told_from_damage(base, tmp_path: Path) -> None:
    files = base("one-record")
    files.root = {"format": "kvformat", "version": "2.0", "requires": ["later"]}
    files.root_text = b'{"format":"kvformat","new":1.5,"version":"2.0"}'
    files.save(tmp_path / "dataset")
    with pytest.raises(UnsupportedError, match="E012"):
        kvformat.open(tmp_path / "dataset")


def test_contexts_are_compared_field_by_field(saved) -> None:
    dataset = kvformat.open(saved("model-context"))
    dataset.require(dataset.context)
    with pytest.raises(IdentityError, match="E083") as caught:
        dataset.require(VALID["rope-kinds"].context)
    for field in ("family: llama against gemma3_text", "weights.sha256", "rope[0].kind", "compute_dtype"):
        assert field in caught.value.message
    for ours in (dataset, kvformat.open(saved("one-record"))):
        with pytest.raises(IdentityError, match="E083"):
            ours.require(kvformat.Context.unknown())


def test_an_unknown_context_equals_nothing(saved) -> None:
    dataset = kvformat.open(saved("one-record"))
    with pytest.raises(IdentityError, match="equals nothing"):
        dataset.require(dataset.context)


# ---------------------------------------------------------------------------------------------- verification modes


@BOTH
def test_first_raises_at_touch_and_again(saved, flip, io: str) -> None:
    path = saved("two-shards")
    flip(path, "two-shards", record=1)
    dataset = kvformat.open(path, io=io)
    dataset[0].component("k")
    for _ in range(2):
        with pytest.raises(DamageError, match="E072") as caught:
            dataset[1].component("k")
        assert caught.value.record == 1
        assert caught.value.layer == 0
        assert str(path) in (caught.value.path or "")
    dataset[1].component("v")


@BOTH
def test_first_trusts_what_this_process_verified(saved, flip, io: str) -> None:
    path = saved("one-record")
    dataset = kvformat.open(path, io=io)
    watched = kvformat.open(path, io=io, verify="always")
    for handle in (dataset, watched):
        handle[0].component("k")
        handle[0].slab("key", layer=1)
    flip(path, "one-record")
    dataset[0].component("k")
    dataset[0].slab("key", layer=0)
    with pytest.raises(DamageError, match="E072"):
        watched[0].component("k")
    with pytest.raises(DamageError, match="E072"):
        watched[0].slab("key", layer=0)
    with pytest.raises(DamageError, match="E072"):
        kvformat.open(path, io=io)[0].component("k")


@BOTH
def test_off_reads_what_is_there(saved, flip, io: str) -> None:
    path = saved("one-record")
    sound = stored(kvformat.open(path, io=io)[0].component("k"))
    flip(path, "one-record")
    damaged = stored(kvformat.open(path, io=io, verify="off")[0].component("k"))
    assert damaged == bytes([sound[0] ^ 1]) + sound[1:]


@BOTH
def test_a_slab_that_was_verified_does_not_vouch_for_its_component(saved, flip, io: str) -> None:
    path = saved("one-record")
    flip(path, "one-record", at=5 * 2 * 4 * 2)  # the first byte of the second layer
    dataset = kvformat.open(path, io=io)
    dataset[0].slab("key", layer=0)
    with pytest.raises(DamageError, match="E072"):
        dataset[0].component("k")
    with pytest.raises(DamageError, match="E072"):
        dataset[0].slab("key", layer=1)


@BOTH
def test_a_file_that_was_replaced_is_verified_again(saved, flip, io: str) -> None:
    path = saved("two-shards")
    dataset = kvformat.open(path, io=io, max_open_files=1)
    dataset[0].component("k")
    shard = next((path / "shards").rglob("00000000-*"))
    data = bytearray(shard.read_bytes())
    shard.unlink()
    shard.write_bytes(data)
    flip(path, "two-shards")
    dataset[2].component("k")  # another shard: the first is dropped
    with pytest.raises(DamageError, match="E072"):
        dataset[0].component("k")


def test_verify_off_skips_the_index_too(base, tmp_path: Path) -> None:
    files = base("one-record")
    part = files.parts["names"][0]
    name = files.part_paths("names")[0]
    part.columns["input"][0] = 5
    files.save(tmp_path / "dataset")
    (tmp_path / "dataset" / files.part_paths("names")[0]).rename(tmp_path / "dataset" / name)
    with pytest.raises(DamageError, match="E006"):
        kvformat.open(tmp_path / "dataset")[0].names  # noqa: B018
    assert kvformat.open(tmp_path / "dataset", verify="off")[0].names == ["clip-0000"]


# ---------------------------------------------------------------------------------------------- open files


@BOTH
def test_open_files_are_bounded_and_views_outlive_them(saved, io: str) -> None:
    dataset = kvformat.open(saved("record-without-pad"), io=io, max_open_files=1)
    assert len({dataset.index.shard_of(number) for number in range(len(dataset))}) == 2
    views = [record.component("h") for record in dataset]
    wanted = [VALID["record-without-pad"].tensors(number)["h"][2] for number in range(len(dataset))]
    gc.collect()
    assert dataset.shards.num_open == 1
    assert [stored(view) for view in views] == wanted


def test_descriptors_are_bounded(saved) -> None:
    path = saved("several-shards")
    dataset = kvformat.open(path, io="pread", max_open_files=2)
    touch_all(dataset)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        for number in (0, 4, 2, 1, 3):
            dataset[number].component("k")
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    assert dataset.shards.num_open == 2


def test_mappings_go_with_the_last_view(saved) -> None:
    path = saved("record-without-pad")
    dataset = kvformat.open(path, io="mmap", max_open_files=1)
    view = dataset[0].component("h")
    name = next((path / "shards").rglob("00000000-*")).name

    def mapped() -> bool:
        return name in Path("/proc/self/maps").read_text(encoding="utf-8")

    assert mapped()
    dataset[1].component("h")
    gc.collect()
    assert mapped(), "the view holds it"
    assert view.any()
    del view
    gc.collect()
    assert not mapped()


# ---------------------------------------------------------------------------------------------- pickles and copies


def test_a_pickle_is_small_and_pins_the_dataset(saved, tmp_path: Path) -> None:
    path = saved("tables-in-parts")
    dataset = kvformat.open(path, verify="always", io="pread", max_open_files=3)
    touch_all(dataset)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(dataset, protocol)
        assert len(data) < 1024
        again = pickle.loads(data)
        assert (again.id, again.level, again._options) == (dataset.id, dataset.level, dataset._options)
        assert touch_all(again) == 0
    copied = copy.deepcopy(dataset)
    assert copied.id == dataset.id

    record = pickle.loads(pickle.dumps(dataset[3]))
    assert (record.index, record.names) == (3, dataset[3].names)
    assert len(pickle.dumps(dataset[3])) < 1024

    data = pickle.dumps(dataset)
    path.rename(tmp_path / "moved")
    saved("one-record").rename(path)
    with pytest.raises(IdentityError, match="E007"):
        pickle.loads(data)


def test_errors_of_the_reader_pickle(saved, flip) -> None:
    path = saved("one-record")
    flip(path, "one-record")
    with pytest.raises(FormatError) as caught:
        kvformat.open(path)[0].component("k")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.code, again.path, again.record, again.layer) == (
        DamageError, str(caught.value), "E072", caught.value.path, 0, 0,
    )  # fmt: skip


def test_the_manifest_a_reader_shows_is_the_one_that_is_stored(saved) -> None:
    path = saved("model-context")
    dataset = kvformat.open(path)
    stored_manifest = next((path / "manifest").iterdir()).read_bytes()
    assert canonical.encode(dataset.manifest) == stored_manifest


def test_slips_are_answered_with_what_there_is(saved) -> None:
    dataset = kvformat.open(saved("one-record"))
    with pytest.raises(LookupFailedError, match="no role 'k'; the schema has key, value"):
        dataset[0].slab("k", layer=0)
    with pytest.raises(LookupFailedError, match=r"role 'key' has no layer '1'; it covers \[0, 1\]"):
        dataset[0].slab("key", layer="1")
    with pytest.raises(UsageError, match="expected a Context, found Dataset"):
        dataset.require(dataset)
