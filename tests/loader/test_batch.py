"""A batch: what it says of its records, what it costs to send, what it trusts, and whom its memory belongs to."""

from __future__ import annotations

import gc
import hashlib
import pickle
import random
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import DamageError, KVFormatError, LookupFailedError
from kvformat.loader.batch import Batch
from kvformat.loader.collection import as_collection, concat, mix
from kvformat.loader.cursor import Cursor
from kvformat.loader.layouts import HF, Packed, Padded
from kvformat.loader.lookup import gather
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.source import _REOPENED_SOURCES, source_of
from kvformat.spec.document import Document
from kvformat.spec.schema import Schema
from kvformat.testing.vectors import VALID, Case, Entry
from tests.loader.made import make_dataset
from tests.loader.making import assert_same, expected_of_names, flip, open_case, stored

BASE = "several-shards"
TOKENS = [3, 5, 2, 6, 4]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def dataset(home):
    return open_case(VALID[BASE], home / BASE)


@pytest.fixture
def own(tmp_path):
    """Opens a dataset nobody else has; the same one each time."""
    return lambda **options: open_case(VALID[BASE], tmp_path / "own", **options)


# --------------------------------------------------------------------------------------------------- what it says


def test_lengths_and_positions(dataset):
    batch = gather(dataset, records=[1, 2, 0])
    assert (len(batch), batch.records, batch.num_tokens) == (3, [1, 2, 0], [5, 2, 3])
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 10]
    assert batch.cu_seqlens.dtype == batch.position_ids.dtype == batch.token_ids.dtype == torch.int32
    assert (batch.max_seqlen, batch.max_position) == (5, 4)
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2]
    assert batch.token_ids.tolist() == [n for r in (1, 2, 0) for n in stored(BASE, r)["token_ids"].tolist()]
    with pytest.raises(KVFormatError, match="use cu_seqlens") as caught:
        batch.mask  # noqa: B018 -- asked for what it raises
    assert caught.value.code == "E088"
    assert repr(batch) == "<kvformat.loader.Batch of 3 records, packed>"


@pytest.mark.parametrize("kind", [Padded, HF])
def test_padding_and_positions(dataset, kind):
    left = gather(dataset, records=[1, 2], layout=kind(side="left", multiple_of=3))
    assert left.mask.tolist() == [[False, True, True, True, True, True], [False] * 4 + [True, True]]
    assert left.position_ids.tolist() == [[0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 1]]
    right = gather(dataset, records=[1, 2], layout=kind(side="right"))
    assert right.mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert right.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    for batch in (left, right):
        assert batch.mask.dtype == torch.bool
        assert batch.token_ids.shape == batch.mask.shape
        assert batch.token_ids[batch.mask].tolist() == gather(dataset, records=[1, 2]).token_ids.tolist()
        assert not batch.token_ids[~batch.mask].any()
        assert batch.max_position == 4
        assert batch.cu_seqlens.tolist() == [0, 5, 7]


def test_three_rows_of_positions_where_none_are_stored(dataset):
    """Fault 33: the consumer gets the rows it declared."""
    packed = gather(dataset, records=[2, 0], layout=Packed(position_rows=3))
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2]] * 3
    padded = gather(dataset, records=[2, 0], layout=Padded(position_rows=3))
    assert padded.position_ids.tolist() == [[[0, 1, 0], [0, 1, 2]]] * 3


@pytest.mark.parametrize("rows", [1, 3])
def test_stored_positions(rows, home):
    name = "positions-1-row" if rows == 1 else "positions-3-rows"
    dataset = open_case(VALID[name], home / name)
    order = list(range(len(dataset)))
    values = [stored(name, number)["position_ids"] for number in order]
    for layout in (Packed(position_rows=rows), Padded(position_rows=rows), Padded(position_rows=rows, side="left")):
        batch = gather(dataset, records=order, layout=layout)
        positions = batch.position_ids if rows == 3 else batch.position_ids[None]
        if isinstance(layout, Padded):
            assert positions.shape == (rows, len(order), batch.max_seqlen)
            positions = positions[:, batch.mask]
        assert torch.equal(positions, torch.cat(values, 1))
        assert batch.max_position == max(int(value.max()) for value in values)


def test_the_greatest_position_is_not_that_of_the_padding(tmp_path):
    entries = (
        Entry(names=("a",), document=Document.of([1, 2], position_ids=np.array([[-9, -7]]))),
        Entry(names=("b",), document=Document.of([3, 4, 5], position_ids=np.array([[-6, -5, -8]]))),
    )
    case = Case(name="negative", schema=VALID["positions-1-row"].schema, entries=entries)
    dataset = open_case(case, tmp_path / "data")
    for layout in ("packed", "padded"):
        assert gather(dataset, records=[0, 1], layout=layout).max_position == -5


def test_names_and_documents(home):
    dataset = open_case(VALID["aliases-and-unicode-names"], home / "aliases-and-unicode-names")
    entries = VALID["aliases-and-unicode-names"].entries
    batch = gather(dataset, records=[2, 0, 2])
    assert batch.names == [entries[number].names[0] for number in (2, 0, 2)]
    assert batch.documents == [hashlib.sha256(entries[n].document.to_bytes()).digest() for n in (2, 0, 2)]
    slots = [number for number, (name, _) in enumerate(dataset.names()) if name in entries[0].names]
    drawn = Batch(source_of(dataset), [0] * len(slots), Packed(), slots=slots, cursor=Cursor.start_of(1), padding=True)
    assert len(slots) > 1
    assert sorted(drawn.names) == sorted(entries[0].names)
    assert (drawn.cursor, drawn.padding, batch.cursor, batch.padding) == (Cursor.start_of(1), True, None, False)


def test_what_is_asked_for_by_name_role_and_layer(home):
    shared = open_case(VALID["shared-layers"], home / "shared-layers")
    batch = gather(shared, records=[0, 1])
    assert batch.layers == (0, 1, 2, 3, 65_535)
    assert batch.rows_of(65_535) == batch.rows_of(3) == {"k": 1, "v": 1}
    assert (batch.role_of("k"), batch.role_of("v")) == ("key", "value")
    record = stored("shared-layers", 0)
    for layer, row in {0: 0, 1: 0, 2: 0, 3: 1, 65_535: 1}.items():
        assert torch.equal(batch.slab("value", layer=layer)[:3], record["v"][row])
        assert batch.slab("key", layer=layer).data_ptr() == batch["k"][row].data_ptr(), "a view"
    for wrong in (
        lambda: batch["token"],
        lambda: batch[0],
        lambda: batch.rows_of(4),
        lambda: batch.role_of("token_ids"),
        lambda: batch.slab("latent", layer=0),
        lambda: batch.slab("key", layer=4),
        lambda: batch.lengths_of("x"),
        lambda: batch.cu_seqlens_of("x"),
    ):
        with pytest.raises(LookupFailedError) as caught:
            wrong()
        assert caught.value.code == "E082"


def test_it_is_no_sequence(dataset):
    """Its errors are IndexErrors too, by which an old-style iteration would end after nothing."""
    batch = gather(dataset, records=[0, 1])
    with pytest.raises(TypeError):
        list(batch)
    with pytest.raises(TypeError):
        assert "k" in batch


def test_a_cache(dataset):
    from transformers import DynamicCache

    batch = gather(dataset, records=[1, 2], layout="hf")
    cache = batch.past_key_values()
    assert isinstance(cache, DynamicCache)
    assert (len(cache.layers), cache.get_seq_length()) == (2, 5)
    for row, layer in enumerate(cache.layers):
        assert layer.keys.data_ptr() == batch["k"][row].data_ptr(), "no copy"
        assert torch.equal(layer.values, batch["v"][row])
    before = batch["k"].clone()
    new = torch.ones(2, 2, 1, 4, dtype=torch.bfloat16)
    keys, values = cache.update(new, new, 0)
    assert keys.shape == values.shape == (2, 2, 6, 4)
    assert torch.equal(batch["k"], before), "what is appended goes elsewhere"
    assert batch.past_key_values().get_seq_length() == 5, "each is a fresh one"
    with pytest.raises(KVFormatError) as caught:
        gather(dataset, records=[0], layout="padded").past_key_values()
    assert caught.value.code == "E088"
    subset = gather(dataset, records=[1], layout=HF(layers=(0,))).past_key_values()
    assert len(subset.layers) == 1


def test_a_cache_without_transformers(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(KVFormatError, match="pip install") as caught:
        gather(dataset, records=[0], layout="hf").past_key_values()
    assert caught.value.code == "E205"


# ---------------------------------------------------------------------------------------------------- its memory


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["packed", "padded", "hf"])
def test_what_is_kept_is_never_overwritten(dataset, layout, seed):
    """Tensors, parts of them and arrays outlive their batch, and stay what they were."""
    choose = random.Random(seed)
    kept: list[tuple[object, np.ndarray]] = []
    for _ in range(150):
        batch = gather(dataset, records=choose.choices(range(5), k=choose.randint(1, 6)), layout=layout)
        ways = [
            lambda b: b["k"],
            lambda b: b["v"][1:],
            lambda b: b.slab("key", layer=0),
            lambda b: b.token_ids,
            lambda b: b["k"].view(torch.int16).numpy()[..., 1:],
            lambda b: b["v"].transpose(0, 1),
            lambda b: b.token_ids.numpy()[None],
        ]
        views = [way(batch) for way in choose.sample(ways, choose.randint(0, 3))]
        kept += [(view, bits(view)) for view in views]
        del batch, views
        kept = [entry for entry in kept if choose.random() > 0.15]
        assert all(np.array_equal(bits(view), was) for view, was in kept)
    pool = source_of(dataset).pool()
    kept.clear()
    pool.trim()
    assert pool.kept_nbytes < 8 << 20


def bits(view) -> np.ndarray:
    if isinstance(view, torch.Tensor):
        view = view.contiguous().view(torch.int32 if view.dtype == torch.int32 else torch.int16).numpy()
    return view.copy()


def test_memory_comes_back(dataset):
    pool = source_of(dataset).pool()
    gather(dataset, records=[0, 1, 2, 3, 4])
    before = pool.fresh_nbytes
    addresses = {gather(dataset, records=[4, n])["k"].data_ptr() for n in range(4) for _ in range(20)}
    assert pool.fresh_nbytes == before
    assert len(addresses) == 1
    held = gather(dataset, records=[0])["v"]
    assert gather(dataset, records=[0])["v"].data_ptr() != held.data_ptr()


def test_packed_once(dataset):
    batch = Batch(source_of(dataset), [0, 1], Packed())
    assert batch.num_tokens == [3, 5]
    assert batch.pack() is batch
    address = batch["k"].data_ptr()
    assert batch.pack()["k"].data_ptr() == batch.pin_memory()["k"].data_ptr() == address


# --------------------------------------------------------------------------------------------- between processes


def test_what_is_sent(dataset, home):
    """References, whether it was packed or not: a few hundred bytes a record (fault 35)."""
    records = make_dataset(home / "sent", 64, layers=40)
    for layout in (Packed(), Padded(layers=(1, 39)), HF()):
        for count, most in ((4, 4096), (64, 16_384)):
            batch = Batch(source_of(records), list(range(count)), layout, cursor=Cursor.start_of(0))
            assert len(pickle.dumps(batch.prove())) < most
            assert len(pickle.dumps(batch.pack())) < most


def test_what_arrives(dataset):
    source = source_of(dataset)
    for layout in (Packed(), Padded(side="left"), HF()):
        batch = Batch(source, [3, 1], layout, cursor=Cursor.start_of(2), slots=[3, 1], padding=True).prove()
        arrived = pickle.loads(pickle.dumps(batch))
        assert (arrived.records, arrived.layout, arrived.padding) == ([3, 1], layout, True)
        assert (arrived.cursor, arrived.names) == (batch.cursor, batch.names)
        assert arrived._source.collection.datasets == (dataset,), "the one that is open here"
        assert_same(arrived, expected_of_names(BASE, [3, 1], layout))
        again = pickle.loads(pickle.dumps(arrived))
        assert_same(again, expected_of_names(BASE, [3, 1], layout))


def test_a_process_that_never_opened_the_dataset(dataset, tmp_path, repository):
    batches = [Batch(source_of(dataset), [number], Packed()).prove() for number in range(3)]
    (tmp_path / "batches").write_bytes(pickle.dumps(batches))
    program = """
import pickle, sys
batches = pickle.load(open(sys.argv[1], "rb"))
assert "torch" not in sys.modules
print([batch["k"].sum().item() for batch in batches], len({batch._source.collection.datasets for batch in batches}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "batches"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    sums = [gather(dataset, records=[number])["k"].sum().item() for number in range(3)]
    assert done.stdout.strip() == f"{sums} 1"


def test_a_dataset_that_is_gone_is_said_when_it_is_needed(own, tmp_path):
    """Not while it is unpickled: a DataLoader could not tell which error that was."""
    dataset = own()
    sent = pickle.dumps([Batch(source_of(dataset), [0], Packed()), Batch(source_of(dataset), [1], Packed())])
    (tmp_path / "own").rename(tmp_path / "elsewhere")
    del dataset
    first, second = pickle.loads(sent)
    assert first.records == [0]
    with pytest.raises(KVFormatError) as caught:
        first["k"]
    assert caught.value.code == "E001"
    pinned = second.pin_memory()
    with pytest.raises(KVFormatError) as caught:
        pinned["k"]
    assert caught.value.code == "E001"


def test_two_handles_of_one_dataset(own):
    """A batch from elsewhere belongs to the handle it was made with; where that is gone, to the other one."""
    handles = [own(), own(), own()]
    sent = [pickle.dumps(Batch(source_of(handle), [0], Packed()).prove()) for handle in handles]
    for data, handle in zip(sent, handles, strict=True):
        assert pickle.loads(data)._source.collection.datasets == (handle,)
    del handles[0], handle
    assert pickle.loads(sent[0])._source.collection.datasets[0] in handles
    del handles[1]
    assert pickle.loads(sent[0])._source.collection.datasets == tuple(handles)
    assert not _REOPENED_SOURCES


def test_copies_of_a_handle_are_known_by_it(dataset):
    """As an unpickled dataset in a worker is."""
    source = source_of(dataset)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.collection.datasets[0] is not dataset
    assert copy.origin[:2] == source.origin[:2]
    arrived = pickle.loads(pickle.dumps(Batch(copy, [1], Packed()).prove()))
    assert_same(arrived, expected_of_names(BASE, [1], Packed()))


def test_what_is_kept_for_a_dataset_goes_with_it(own):
    """At once, without a garbage collection: buffers may be a gigabyte."""
    gc.disable()
    try:
        dataset = own()
        loader = KVLoader(dataset, [[0, 1], [2]], layout="padded")
        assert len(list(loader)) == 2
        batch = gather(dataset, records=[3])
        watched = [weakref.ref(thing) for thing in (dataset, source_of(dataset).pool(), dataset.index)]
        kept = batch["k"]
        del dataset, loader, batch
        assert [thing() for thing in watched] == [None] * 3
        assert torch.equal(kept, stored(BASE, 3)["k"])
    finally:
        gc.enable()


def test_plans_and_memory_are_those_of_the_handles(dataset, home):
    """Whatever order and weights they are drawn by."""
    other = open_case(VALID["two-shards"], home / "two-shards")
    assert source_of(dataset).pool() is source_of(as_collection(dataset)).pool() is source_of(mix({dataset: 1})).pool()
    assert source_of(dataset).plan(Packed()) is source_of(dataset).plan(Packed(layers=None))
    several = [concat([dataset, other]), mix({dataset: 1, other: 2}), mix({dataset: 3, other: 2})]
    sources = [source_of(collection) for collection in several]
    assert len({id(source.pool()) for source in sources}) == 1
    assert [source.collection.weights for source in sources] == [None, (1, 2), (3, 2)]
    assert source_of(concat([other, dataset])).pool() is not sources[0].pool()
    for source, weights in ((sources[1], (1, 2)), (sources[2], (3, 2))):
        assert pickle.loads(pickle.dumps(source)).collection.weights == weights


# -------------------------------------------------------------------------------------------------- what it trusts


def wanted_bytes(dataset, record: int, layout) -> list[tuple[str, int]]:
    """Each byte of the tensors a layout needs of a record, and of their sums."""
    placed = dataset[record].placement.tensors
    names = layout.components or ("k", "v")
    rows = [0, 1] if layout.layers is None else list(layout.layers)
    found = [("token_ids", at) for at in range(placed["token_ids"].nbytes)]
    found += [("sums", at) for at in range(placed["sums"].nbytes)]
    for name in names:
        slab = placed[name].slab_nbytes
        found += [(name, row * slab + at) for row in rows for at in range(slab)]
    return found


@pytest.mark.parametrize("layout", [Packed(), HF(), Padded(layers=(1,), components=("v",), dtype="F32")])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_any_damaged_byte(own, io, layout, fake_pinned):
    """In whichever batch, by whichever way: the record is named, and the others are sound."""
    dataset = own()
    places = wanted_bytes(dataset, 2, layout)
    assert len(places) > 60
    for number, (tensor, at) in enumerate(places):
        flip(dataset, 2, tensor, at=at)
        fresh = own(io=io, verify=("first", "always")[number % 2])
        if number % 3 == 0:
            with pytest.raises(DamageError) as caught:
                gather(fresh, records=[0, 2, 1], layout=layout)
        else:
            batch = Batch(source_of(fresh), [0, 2, 1], layout)
            sent = pickle.loads(pickle.dumps(batch.prove())) if number % 3 == 1 else batch.pin_memory()
            assert (len(sent), sent.records, sent.num_tokens) == (3, [0, 2, 1], [3, 2, 5])
            for _ in range(2):
                with pytest.raises(DamageError) as caught:
                    sent["v"]
        assert caught.value.record == 2
        assert caught.value.code in {"sums": {"E070"}, "token_ids": {"E073"}}.get(tensor, {"E072"})
        assert caught.value.path.endswith(".safetensors")
        flip(dataset, 2, tensor, at=at)
        if number % 40 == 0:
            assert_same(
                gather(own(io=io), records=[0, 2, 1], layout=layout), expected_of_names(BASE, [0, 2, 1], layout)
            )


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_damage_elsewhere_is_none_of_its_business(own, io):
    """Other layers, other components, other records."""
    dataset = own()
    slab = dataset[2].placement.tensors["v"].slab_nbytes
    for record, tensor, at in ((2, "k", 0), (2, "v", 0), (3, "v", slab)):
        flip(dataset, record, tensor, at=at)
    layout = Packed(layers=(1,), components=("v",))
    fresh = own(io=io)
    for _ in range(2):
        assert_same(gather(fresh, records=[2, 1], layout=layout), expected_of_names(BASE, [2, 1], layout))
    for records, options in (([2], {"layers": (0,)}), ([2], {"components": ("k",)}), ([1, 3], {})):
        with pytest.raises(DamageError) as caught:
            gather(fresh, records=records, layout=Packed(**options))
        assert caught.value.record == records[-1]


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_verified_once(own, io):
    """What was verified in a worker is not hashed again; ``always`` is; and what nobody verified is too."""
    for verify, hashed in (("first", False), ("always", True)):
        worker, consumer = own(io=io, verify=verify), own(io=io, verify=verify)
        batch = Batch(source_of(worker), [0, 1, 2], Padded(layers=(1,))).prove()
        assert worker.verify_s > 0
        arrived = pickle.loads(pickle.dumps(batch))
        arrived._origin = source_of(consumer)
        assert_same(arrived, expected_of_names(BASE, [0, 1, 2], Padded(layers=(1,))))
        assert (consumer.verify_s > 0) == hashed
        before = consumer.verify_s
        assert_same(gather(consumer, records=[1]), expected_of_names(BASE, [1], Packed()))
        assert consumer.verify_s > before, "layer 0 was not in the proof"


@pytest.mark.parametrize("layout", [Packed(), Padded(layers=(1,))])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_always_is_each_time(own, io, layout):
    """With ``first``, what was verified is trusted as long as the process has the file open."""
    always, first = own(io=io, verify="always"), own(io=io)
    for dataset in (always, first):
        assert_same(gather(dataset, records=[2], layout=layout), expected_of_names(BASE, [2], layout))
    slab = always[2].placement.tensors["v"].slab_nbytes
    flip(always, 2, "v", at=slab)
    with pytest.raises(DamageError) as caught:
        gather(always, records=[2], layout=layout)
    assert (caught.value.code, caught.value.record, caught.value.layer) == ("E072", 2, 1)
    before = first.verify_s
    gather(first, records=[2], layout=layout)
    assert first.verify_s == before


def proved_elsewhere(worker, consumer, record: int) -> Batch:
    """A batch that a worker proved, as the consumer receives it."""
    arrived = pickle.loads(pickle.dumps(Batch(source_of(worker), [record], Packed()).prove()))
    assert arrived._error is None
    arrived._origin = source_of(consumer)
    return arrived


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_a_proof_is_of_one_file(own, tmp_path, how, opened, io):
    """The file changes between worker and consumer, whether the consumer has it open or not (fault 7)."""
    worker, consumer = own(io=io), own(io=io)
    if opened == "before":
        consumer[2].component("k")
    arrived = proved_elsewhere(worker, consumer, 3)
    shard = tmp_path / "own" / worker.index.shard(worker.index.shard_of(3)).path
    if how == "replaced":
        shutil.copy(shard, tmp_path / "copy")
        shard.unlink()
        shutil.copy(tmp_path / "copy", shard)
    flip(worker, 3, "v")
    if how == "replaced" and opened == "before":
        # Its own handle is of the old file, which is sound: verified anew, and right.
        assert_same(arrived, expected_of_names(BASE, [3], Packed()))
        assert consumer.verify_s > 0
        return
    with pytest.raises(DamageError) as caught:
        arrived["k"]
    assert (caught.value.code, caught.value.record) == ("E072", 3)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_proof_of_what_is_still_there(own, tmp_path, io):
    worker, consumer = own(io=io), own(io=io)
    arrived = proved_elsewhere(worker, consumer, 3)
    assert_same(arrived, expected_of_names(BASE, [3], Packed()))
    assert consumer.verify_s == 0.0


def test_a_proof_that_lacks_the_rest_is_completed(tmp_path):
    """Slabs proved by two workers, each some of them, are a whole tensor; nothing else is."""
    of = Schema.uniform(num_layers=3, num_kv_heads=1, head_dim=2)
    with kvformat.create(tmp_path / "data", schema=of, context=kvformat.Context.unknown()) as writer:
        value = torch.randn(3, 4, 1, 2).bfloat16()
        writer.add("a", {"k": value, "v": value + 1}, token_ids=[1, 2, 3, 4])
    first, second, consumer = (kvformat.open(tmp_path / "data") for _ in range(3))
    proofs = [dataset[0].prove([("k", runs)]) for dataset, runs in ((first, [(0, 1), (2, 1)]), (second, [(1, 1)]))]
    assert [proof.slabs for proof in proofs] == [((0, 0b101),), ((0, 0b010),)]
    record = consumer[0]
    record.accept(proofs[0])
    checks = record._shard.checks
    assert (checks.flags[0], checks.slabs) == (0, {(0, 0): 0b101})
    record.accept(proofs[1])
    assert (checks.flags[0], checks.slabs) == (1, {})
    record.accept(proofs[0])
    assert (checks.flags[0], checks.slabs) == (1, {})
    other = proofs[0]._replace(identity=proofs[0].identity._replace(ctime_ns=1), flags=7)
    record.accept(other)
    assert checks.flags[0] == 1
