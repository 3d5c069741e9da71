"""Models that are not uniform: what they store, and what comes back by role and layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvformat
from kvformat import Axis, Component, Document, Extra, Last, Media, Schema, Shared
from kvformat.errors import KVFormatError
from tests.write.make import TOKENS, all_bytes, component, ids, read, schema, single, writer

IO = ["mmap", "pread"]


def values(of: Schema, num_tokens: int, seed: int = 0, **dims: int) -> dict[str, torch.Tensor]:
    """Random components of any schema."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"tokens": num_tokens, **dims}

    def size(axis):
        if isinstance(axis.size, Last):
            return min(num_tokens, axis.size.last)
        return sizes[axis.size] if isinstance(axis.size, str) else axis.size

    found = {}
    for one in of.components:
        tensor = torch.randn(len(one.layers), *(size(axis) for axis in one.axes), generator=generator)
        kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        found[one.name] = tensor.to(kinds[one.dtype])
    return found


def roundtrip(location, of, records, io="mmap", **options):
    """Write records (components and the rest of ``add``), verify, read back to the bit."""
    with writer(location, of=of, **options) as out:
        for number, (components, rest) in enumerate(records):
            out.add(f"{number}", components, **rest)
    read(location)
    dataset = kvformat.open(location, io=io)
    for number, (components, rest) in enumerate(records):
        record = dataset[f"{number}"]
        for name, value in components.items():
            assert record.component(name).shape == value.shape
            assert all_bytes(record.component(name)) == all_bytes(value)
        for name, value in (rest.get("extras") or {}).items():
            assert tuple(record.extra(name).shape) == tuple(value.shape)
            assert all_bytes(record.extra(name)) == all_bytes(value)
    return dataset


def sliding(window: int) -> Schema:
    """Layers 1 and 3 see all tokens, 0, 2 and 4 the last few."""
    full = {"axes": (TOKENS, Axis(name="heads", size=2), Axis(name="head_dim", size=4)), "layers": (1, 3)}
    rows = Axis(name="tokens", size=Last(last=window))
    last = {"axes": (rows, Axis(name="heads", size=1), Axis(name="head_dim", size=8)), "layers": (0, 2, 4)}
    rest = {"dtype": "BF16", "codec": "raw"}
    return schema(
        Component(name="k", role="key", stage="attention", **full, **rest),
        Component(name="v", role="value", **full, **rest),
        Component(name="k_window", role="key", stage="attention", **last, **rest),
        Component(name="v_window", role="value", **last, **rest),
        token_ids=True,
    )


@pytest.mark.parametrize("io", IO)
def test_sliding_windows(tmp_path, io):
    """Shorter documents than the window, as long ones, and longer ones."""
    of = sliding(5)
    records = [(values(of, n, seed=n), {"token_ids": ids(n)}) for n in (1, 4, 5, 6, 40)]
    dataset = roundtrip(tmp_path / "ds", of, records, io)
    for record, (components, _) in zip(dataset, records, strict=True):
        for row, layer in enumerate((0, 2, 4)):
            slab = record.slab("key", layer=layer)
            assert tuple(slab.shape) == (min(record.num_tokens, 5), 1, 8)
            assert torch.equal(slab, components["k_window"][row])
        for row, layer in enumerate((1, 3)):
            assert torch.equal(record.slab("value", layer=layer), components["v"][row])
            assert len(record.slab("value", layer=layer)) == record.num_tokens
        with pytest.raises(kvformat.LookupFailedError):
            record.slab("key", layer=5)


@pytest.mark.parametrize(("num_tokens", "rows"), [(3, 5), (8, 4), (8, 6), (8, 8)])
def test_a_window_has_exactly_its_rows(tmp_path, num_tokens, rows):
    """Neither one less, as some caches return, nor all."""
    of = sliding(5)
    wrong = values(of, num_tokens)
    wrong["k_window"] = torch.zeros(3, rows, 1, 8).bfloat16()
    with pytest.raises(kvformat.InputError) as caught, writer(tmp_path / "ds", of=of) as out:
        out.add("a", wrong, token_ids=ids(num_tokens))
    assert (caught.value.code, caught.value.record) == ("E101", "a")
    assert f"expected [3, {min(num_tokens, 5)}, 1, 8]" in caught.value.message


@pytest.mark.parametrize("io", IO)
def test_latent_attention(tmp_path, io):
    """One latent and one rotary key a token for all heads; beside them a layer with K and V of different widths."""
    of = schema(
        component("latent", "tokens", 16, role="latent", stage="normed", dtype="BF16", layers=(1, 2, 3)),
        component("rope", "tokens", 4, role="rope_key", dtype="BF16", layers=(1, 2, 3)),
        component("k", "tokens", 2, 6, role="key", dtype="F16", layers=(0,)),
        component("v", "tokens", 2, 4, role="value", dtype="F16", layers=(0,)),
    )
    records = [(values(of, n, seed=n), {"token_ids": ids(n)}) for n in (1, 7)]
    dataset = roundtrip(tmp_path / "ds", of, records, io)
    components = records[1][0]
    assert torch.equal(dataset[1].slab("latent", layer=2), components["latent"][1])
    assert torch.equal(dataset[1].slab("rope_key", layer=3), components["rope"][2])
    assert tuple(dataset[1].slab("key", layer=0).shape) == (7, 2, 6)
    assert tuple(dataset[1].slab("value", layer=0).shape) == (7, 2, 4)


@pytest.mark.parametrize("io", IO)
def test_values_of_another_width_than_keys(tmp_path, io):
    of = Schema.uniform(num_layers=2, num_kv_heads=3, head_dim=6, v_head_dim=4, dtype="F32")
    records = [(values(of, n, seed=n), {"token_ids": ids(n)}) for n in (1, 2, 9)]
    dataset = roundtrip(tmp_path / "ds", of, records, io)
    assert tuple(dataset[2].component("v").shape) == (2, 9, 3, 4)


@pytest.mark.parametrize("io", IO)
def test_layers_that_share(tmp_path, io):
    """Layers 2 and 5 attend over the K/V of 0 and 4: stored once, found under either."""
    of = schema(
        component("k", "tokens", 2, role="key", layers=(0, 1, 4)),
        component("v", "tokens", 2, role="value", layers=(0, 1, 4)),
        shared=[Shared(layer=2, source=0), Shared(layer=5, source=4)],
    )
    records = [(values(of, n, seed=n), {"token_ids": ids(n)}) for n in (1, 3)]
    record = roundtrip(tmp_path / "ds", of, records, io)[1]
    for layer, row in ((0, 0), (2, 0), (1, 1), (4, 2), (5, 2)):
        assert torch.equal(record.slab("key", layer=layer), records[1][0]["k"][row])
        assert torch.equal(record.slab("value", layer=layer), records[1][0]["v"][row])
    with pytest.raises(kvformat.LookupFailedError):
        record.slab("key", layer=3)


@pytest.mark.parametrize("io", IO)
def test_hidden_states_and_recurrent_state(tmp_path, io):
    """Tensors without tokens, one of many axes, and a component of no role."""
    of = schema(
        component("hidden", "tokens", 8, role="hidden", dtype="BF16", layers=(0, 7)),
        component("ssm", 2, 3, 4, role="state", layers=(1, 2)),
        component("deep", 1, 2, 1, 2, 1, 2, "tokens", dtype="F16", layers=(65_535,)),
        component("one", 1, role="state", dtype="F16", layers=(9,)),
    )
    records = [(values(of, n, seed=n), {"token_ids": ids(n)}) for n in (1, 5)]
    dataset = roundtrip(tmp_path / "ds", of, records, io)
    assert tuple(dataset[0].slab("state", layer=2).shape) == (2, 3, 4)
    assert tuple(dataset[1].component("deep").shape) == (1, 1, 2, 1, 2, 1, 2, 5)
    assert torch.equal(dataset[1].slab("hidden", layer=7), records[1][0]["hidden"][1])


@pytest.mark.parametrize("io", IO)
def test_sizes_of_zero(tmp_path, io):
    """Every dim but tokens may be zero in a record; a tensor without bytes is there all the same."""
    of = schema(
        component("x", "patches", 2, dtype="F16", layers=(0, 1, 2)),
        component("y", "tokens", "frames"),
        extras=[Extra(name="boxes", axes=(Axis(name="n", size="patches"), Axis(name="xy", size=2)), dtype="I32")],
        dims=("tokens", "patches", "frames"),
    )

    def record(num_tokens, patches, frames):
        components = values(of, num_tokens, seed=num_tokens, patches=patches, frames=frames)
        boxes = torch.zeros(patches, 2, dtype=torch.int32)
        return components, {"token_ids": ids(num_tokens), "extras": {"boxes": boxes}}

    records = [record(1, 0, 0), record(2, 3, 0), record(3, 0, 5), record(4, 1, 1), record(5, 0, 0)]
    dataset = roundtrip(tmp_path / "ds", of, records, io, shard_slots=2)
    assert [found.dims for found in dataset][:3] == [
        {"tokens": 1, "patches": 0, "frames": 0},
        {"tokens": 2, "patches": 3, "frames": 0},
        {"tokens": 3, "patches": 0, "frames": 5},
    ]
    assert tuple(dataset[0].component("x").shape) == (3, 0, 2)


def test_sizes_that_disagree(tmp_path):
    of = schema(component("x", "patches"), component("y", "patches", 2), dims=("tokens", "patches"))
    with pytest.raises(KVFormatError) as caught, writer(tmp_path / "ds", of=of) as out:
        out.add("a", {"x": torch.zeros(1, 3), "y": torch.zeros(1, 4, 2)}, token_ids=ids())
    assert caught.value.code == "E101"


def test_a_size_that_follows_from_nothing(tmp_path):
    of = schema(component("x", "tokens"), dims=("tokens", "frames"))
    with pytest.raises(KVFormatError) as caught, writer(tmp_path / "ds", of=of) as out:
        out.add("a", {"x": torch.zeros(1, 3)}, token_ids=ids())
    assert caught.value.code == "E101"


def test_many_components_and_layers(tmp_path):
    """More tensors than there are bits in a word, and more layers too."""
    of = schema(
        *(component(f"c{n}", "tokens", layers=range(n, n + 3)) for n in range(70)),
        component("long", "tokens", role="hidden", dtype="F16", layers=range(0, 400, 3)),
    )
    records = [(values(of, n, seed=n), {"token_ids": ids(n)}) for n in (1, 2)]
    dataset = roundtrip(tmp_path / "ds", of, records, shard_slots=4)
    assert torch.equal(dataset[1].slab("hidden", layer=399), records[1][0]["long"][133])


# ----------------------------------------------------------------------------------------------------------- documents


def inputs(rows: int = 3) -> Schema:
    """A schema that stores all a document is made of."""
    return schema(
        component("x", "tokens"),
        extras=[
            Extra(name="position_ids", axes=(Axis(name="rows", size=rows), TOKENS), dtype="I32"),
            Extra(name="mask", axes=(Axis(name="n", size=2),), dtype="U64"),
            Extra(name="media", axes=(Axis(name="media", size="media"), Axis(name="entry", size=49)), dtype="U8"),
        ],
        dims=("tokens", "media"),
        token_ids=True,
    )


MEDIA = (
    Media(scheme="source", first=0, count=0, digest=bytes(range(32))),
    Media(scheme="pixels", first=1, count=2, digest=b"\xff" * 32),
    Media(scheme="opaque", first=3, count=1, digest=bytes(32)),
)
DOCUMENTS = {
    "plain": {},
    "positions": {"position_ids": [5, 6, 7, 9]},
    "negative-positions": {"position_ids": [-1, -(2**31), 2**31 - 1, 0]},
    "three-rows": {"position_ids": [[0, 1, 2, 3], [0, 1, 1, 1], [3, 2, 1, 0]]},
    "three-equal-rows": {"position_ids": [[5, 6, 7, 9]] * 3},
    "natural-rows": {"position_ids": [[0, 1, 2, 3]] * 3},
    "prefix": {"mask": "prefix", "prefix_length": 3},
    "bidirectional": {"mask": "bidirectional"},
    "media": {"media": MEDIA},
    "everything": {"position_ids": [[9, 8, 7, 6]] * 3, "mask": "prefix", "prefix_length": 1, "media": MEDIA[1:]},
}


@pytest.mark.parametrize("io", IO)
def test_everything_a_document_is_made_of_is_stored(tmp_path, io):
    """Verification computes each document digest from what is stored."""
    with writer(tmp_path / "ds", of=inputs()) as out:
        numbers = {
            name: out.add(name, {"x": torch.ones(1, 4)}, token_ids=[4, 3, 2, 1], **options)
            for name, options in DOCUMENTS.items()
        }
    assert numbers["natural-rows"] == numbers["plain"]
    assert numbers["three-equal-rows"] == numbers["positions"]
    assert len(set(numbers.values())) == len(DOCUMENTS) - 2
    read(tmp_path / "ds")
    dataset = kvformat.open(tmp_path / "ds", io=io)
    for name, options in DOCUMENTS.items():
        document = Document.of([4, 3, 2, 1], **options)
        record = dataset.find(document=document.digest)
        assert record.index == numbers[name]
        assert record.extra("token_ids").tolist() == [4, 3, 2, 1]
        positions = np.broadcast_to(np.asarray(options.get("position_ids", [[0, 1, 2, 3]])), (3, 4))
        assert record.extra("position_ids").tolist() == positions.tolist()
        mask = {"prefix": 1, "bidirectional": 2}.get(options.get("mask"), 0)
        assert record.extra("mask").numpy().tolist() == [mask, options.get("prefix_length", 0)]
        media = options.get("media", ())
        assert record.dims == {"tokens": 4, "media": len(media)}
        assert all_bytes(record.extra("media")) == b"".join(entry.pack() for entry in media)


def test_one_row_of_positions(tmp_path):
    of = schema(
        component("x", "tokens"),
        extras=[Extra(name="position_ids", axes=(Axis(name="rows", size=1), TOKENS), dtype="I32")],
        token_ids=True,
    )
    with writer(tmp_path / "ds", of=of) as out:
        out.add("plain", {"x": torch.ones(1, 3)}, token_ids=ids())
        out.add("moved", {"x": torch.ones(1, 3)}, token_ids=ids(), position_ids=[7, 8, 9])
        out.add("equal", {"x": torch.ones(1, 3)}, token_ids=ids(), position_ids=[[1, 2, 2]] * 3)
    dataset = read(tmp_path / "ds")
    assert [record.extra("position_ids").tolist() for record in dataset] == [[[0, 1, 2]], [[7, 8, 9]], [[1, 2, 2]]]


def test_documents_without_stored_inputs(tmp_path):
    """Where token ids are not stored, the rest of a document need not be either."""
    with writer(tmp_path / "ds", of=single("F32")) as out:
        for name, options in DOCUMENTS.items():
            out.add(name, {"x": torch.ones(1, 4)}, token_ids=[4, 3, 2, 1], **options)
    dataset = read(tmp_path / "ds")
    assert dataset.schema.extras == ()
    for name, options in DOCUMENTS.items():
        assert dataset[name].document == Document.of([4, 3, 2, 1], **options).digest
