"""Packing: every layout of every kind of dataset, by every way to the bytes, against plain torch (fault 16)."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvformat
from kvformat.errors import KVFormatError, LookupFailedError
from kvformat.loader.collection import concat
from kvformat.loader.layouts import HF, Packed, Padded
from kvformat.loader.lookup import gather
from kvformat.loader.plan import Plan
from kvformat.read.stored import StoredRecord
from kvformat.spec.schema import Extra, Schema, Shared
from kvformat.testing.strategies import cases
from kvformat.testing.vectors import VALID, Case
from tests.loader.making import (
    assert_same,
    expected,
    expected_of_names,
    lacking,
    open_case,
    refusals,
    stored,
    tensors_of,
)
from tests.write.make import component, schema

LAYOUTS = {
    "packed": Packed,
    "right": Padded,
    "left": lambda **given: Padded(side="left", **given),
    "multiple": lambda **given: Padded(multiple_of=4, **given),
    "multiple-left": lambda **given: Padded(side="left", multiple_of=4, **given),
    "hf": HF,
    "hf-right": lambda **given: HF(side="right", multiple_of=8, **given),
}
WAYS = [
    *itertools.product(("mmap", "pread"), ("off", "first", "always"), (1, 1000)),
]
ROWS = {"positions-3-rows": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("pack")


def orders(count: int) -> list[list[int]]:
    """All records; backwards; one alone; some of them repeated."""
    return [list(range(count)), list(range(count))[::-1], [count - 1], [0, count - 1, 0]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(VALID))
def test_every_kind_of_dataset(name, layout, home):
    """By every way: mapped or read, verified or not, few files or many; first touch and second."""
    found = VALID[name].schema
    wanted = LAYOUTS[layout](position_rows=ROWS.get(name, 1))
    codes = refusals(found, wanted)
    for io, verify, files in WAYS[::4] if name == "nan-payloads" else WAYS:  # the large one
        dataset = open_case(VALID[name], home / name, io=io, verify=verify, max_open_files=files)
        if codes:
            with pytest.raises(KVFormatError) as caught:
                gather(dataset, records=[0], layout=wanted)
            assert caught.value.code in codes
            continue
        for order in orders(len(dataset)):
            for _ in range(2):
                assert_same(gather(dataset, records=order, layout=wanted), expected_of_names(name, order, wanted))


@pytest.mark.parametrize("layout", ["packed", "right", "left"])
def test_all_extras(layout, home):
    for name in ("dims-of-zero", "every-dtype", "masks", "positions-1-row"):
        chosen = [extra for extra in VALID[name].schema.extras if len(extra.axes) < 2 or extra.name == "grid"]
        chosen = [extra for extra in chosen if all(isinstance(axis.size, int) for axis in extra.axes[1:])]
        wanted = LAYOUTS[layout](extras=[extra.name for extra in chosen])
        for io in ("mmap", "pread"):
            dataset = open_case(VALID[name], home / name, io=io)
            order = list(range(len(dataset)))
            for _ in range(2):
                batch = gather(dataset, records=order, layout=wanted)
                assert set(batch.extras) >= {extra.name for extra in chosen}
                assert_same(batch, expected_of_names(name, order, wanted))


CHOICES = [
    ("uniform-bf16", {"layers": (1,)}),
    ("uniform-bf16", {"layers": (1, 0)}),
    ("uniform-bf16", {"components": ("v",)}),
    ("uniform-bf16", {"components": ("v", "k")}),
    ("uniform-bf16", {"components": ("v", "k"), "layers": (1, 0)}),
    ("uniform-bf16", {"dtype": "float32"}),
    ("uniform-bf16", {"dtype": torch.float16, "layers": (1, 0)}),
    ("wide-values", {"layers": (9, 3)}),
    ("wide-values", {"dtype": "BF16"}),
    ("sliding-window", {"layers": (2, 3, 0)}),
    ("sliding-window", {"layers": (3, 1), "dtype": "float32"}),
    ("sliding-window", {"components": ("v_global", "k_local")}),
    ("latent-attention", {"layers": (2, 0), "dtype": "F32"}),
    ("shared-layers", {"layers": (65_535, 1)}),
    ("shared-layers", {"layers": (1, 0, 2)}),
    ("hidden-and-state", {"components": ("s", "h", "gate", "route"), "layers": (7, 2)}),
    ("hidden-and-state", {"dtype": "bfloat16"}),
    ("int8-with-scales", {"layers": (1,)}),
    ("int8-with-scales", {"components": ("k_scale", "v_scale"), "dtype": "bfloat16"}),
    ("int8-with-scales", {"dtype": "float32"}),
    ("int8-with-scales", {"components": ("v", "v_scale", "k"), "dtype": "BF16", "layers": (1, 0)}),
    ("fp8-with-scales", {"dtype": "float16", "layers": (1,)}),
    ("fp8-with-scales", {"components": ("v", "v_scale")}),
    ("every-dtype", {"dtype": "float32"}),
    ("every-dtype", {"dtype": "float16"}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "options"), CHOICES)
def test_parts_in_any_order(name, options, layout, home):
    found = VALID[name].schema
    wanted = LAYOUTS[layout](**options)
    codes = refusals(found, wanted)
    for io, verify, _ in WAYS[::2]:
        dataset = open_case(VALID[name], home / name, io=io, verify=verify)
        if codes:
            with pytest.raises(KVFormatError) as caught:
                gather(dataset, records=[0], layout=wanted)
            assert caught.value.code in codes
            continue
        order = [*range(len(dataset)), 0]
        for _ in range(3):
            assert_same(gather(dataset, records=order, layout=wanted), expected_of_names(name, order, wanted))


@st.composite
def wishes(draw, of: Schema):
    """A layout, most often one that fits."""
    names = [c.name for c in of.components]
    layers = sorted({layer for c in of.components for layer in c.layers} | {shared.layer for shared in of.shared})
    positions = next((extra for extra in of.extras if extra.name == "position_ids"), None)
    rows = positions.axes[0].size if positions is not None else draw(st.sampled_from((1, 3)))
    options = {
        "components": draw(st.none() | st.permutations(names).map(lambda n: n[: 1 + len(n) // 2])),
        "layers": draw(st.none() | st.lists(st.sampled_from(layers), min_size=1, unique=True)),
        "dtype": draw(st.sampled_from((None, None, "F32", "BF16"))),
        "position_rows": draw(st.sampled_from((rows, rows, rows, 1))),
        "extras": draw(st.lists(st.sampled_from([e.name for e in of.extras]), unique=True)) if of.extras else (),
    }
    kind = draw(st.sampled_from((Packed, Packed, Padded, HF)))
    if kind is not Packed:
        options |= {"side": draw(st.sampled_from(("left", "right"))), "multiple_of": draw(st.integers(1, 5))}
    return kind(**options)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_schema_and_layout(data, tmp_path_factory):
    case = data.draw(cases())
    layout = data.draw(wishes(case.schema))
    codes = refusals(case.schema, layout)
    path = tmp_path_factory.mktemp("any") / "data"
    numbers = data.draw(st.lists(st.integers(0, len(case.entries) - 1), min_size=1, max_size=5))
    io, verify = data.draw(st.sampled_from(("mmap", "pread"))), data.draw(st.sampled_from(("first", "off", "always")))
    dataset = open_case(case, path, io=io, verify=verify, max_open_files=data.draw(st.sampled_from((1, 8))))
    for number in data.draw(st.lists(st.integers(0, len(case.entries) - 1), max_size=2)):  # some is verified before
        touched = data.draw(st.sampled_from(case.schema.components))
        dataset[number].component(touched.name)
        if touched.role != "other":
            dataset[number].slab(touched.role, layer=touched.layers[-1])
    if codes:
        with pytest.raises(KVFormatError) as caught:
            gather(dataset, records=numbers, layout=layout)
        assert caught.value.code in codes | {"E082"}
        return
    if lacking(case.schema, layout):
        with pytest.raises(LookupFailedError, match="no component wanted has layer"):
            gather(dataset, records=numbers, layout=layout)
        return
    batch = gather(dataset, records=numbers, layout=layout)
    wanted = expected(case.schema, [tensors_of(case, number) for number in numbers], layout)
    assert_same(batch, wanted)
    assert_same(gather(dataset, records=numbers, layout=layout), wanted)
    assert batch.num_tokens == [case.entries[number].document.num_tokens for number in numbers]


def test_a_hidden_state_is_not_shared(tmp_path):
    """A layer that has the K/V of another one has hidden states of its own."""
    kv = [component(n, "tokens", 1, 2, role=r, layers=(0,)) for n, r in (("k", "key"), ("v", "value"))]
    hidden = component("h", "tokens", 2, role="hidden", layers=(0, 1))
    case = Case(
        name="mine",
        schema=schema(*kv, hidden, shared=(Shared(layer=1, source=0),), token_ids=True),
        entries=VALID["uniform-bf16"].entries,
    )
    dataset = open_case(case, tmp_path / "data")
    layout = Packed(layers=(1,))
    batch = gather(dataset, records=[0, 1], layout=layout)
    assert_same(batch, expected(case.schema, [tensors_of(case, 0), tensors_of(case, 1)], layout))
    assert batch.rows_of(1) == {"k": 0, "v": 0, "h": 0}
    assert torch.equal(batch.slab("hidden", layer=1)[:3], dataset[0].slab("hidden", layer=1)[:3])
    with pytest.raises(KVFormatError, match="no role 'hidden'"):
        batch.slab("hidden", layer=0)


def test_scales_are_shared_with_what_they_scale():
    """Those of a latent have no role of their own."""
    latent = component("c", "tokens", 4, role="latent", layers=(0, 2), dtype="I8", scale="cs")
    scale = component("cs", "tokens", 1, layers=(0, 2))
    plan = Plan(schema(latent, scale, shared=(Shared(layer=1, source=0),)), Packed(layers=(1,)))
    assert [(part.name, part.layers) for part in plan.parts] == [("c", (0,)), ("cs", (0,))]
    assert plan.rows_of == {0: {"c": 0, "cs": 0}, 1: {"c": 0, "cs": 0}}


def test_what_is_dequantised_needs_its_scales_and_no_others():
    """They are read and verified, and are no part of the batch unless they are named."""
    of = VALID["int8-with-scales"].schema
    bits = {c.name: 1 << number for number, c in enumerate(of.components)}
    plan = Plan(of, Packed(components=("k",), layers=(1,), dtype="BF16"))
    assert [(part.name, part.dtype, part.scale) for part in plan.parts] == [("k", "BF16", "k_scale")]
    wanted = dict(plan.wanted)
    assert (wanted["k"], wanted["k_scale"]) == ([(1, 1)], [(1, 1)])
    assert "v_scale" not in wanted
    assert plan.bits & sum(bits.values()) == bits["k"] | bits["k_scale"]
    named = Plan(of, Packed(components=("k_scale", "k"), layers=(1,), dtype="BF16"))
    assert [(part.name, part.dtype) for part in named.parts] == [("k_scale", "F32"), ("k", "BF16")]
    assert sorted(dict(named.wanted)) == sorted(wanted)
    assert len(named.wanted) == len(wanted)
    assert named.bits == plan.bits


def test_several_components_of_one_scale(tmp_path):
    """Each takes the rows it has, also where a layer that shares another's has hidden states of its own."""
    of = schema(
        component("c", "tokens", 4, role="latent", dtype="I8", layers=(0, 2), scale="s"),
        component("h", "tokens", 4, role="hidden", dtype="F8_E5M2", layers=(0, 2), scale="s"),
        component("s", 1, 4, layers=(0, 2)),
        shared=(Shared(layer=1, source=0),),
        token_ids=True,
    )
    case = Case(name="mine", schema=of, entries=VALID["uniform-bf16"].entries)
    tensors = [tensors_of(case, 0), tensors_of(case, 1)]
    for io, verify, layers in itertools.product(("mmap", "pread"), ("first", "always"), (None, (1, 2), (2, 0))):
        dataset = open_case(case, tmp_path / "data", io=io, verify=verify)
        layout = Packed(layers=layers, dtype="F32")
        for _ in range(2):
            assert_same(gather(dataset, records=[0, 1], layout=layout), expected(case.schema, tensors, layout))


@pytest.mark.parametrize("layout", ["packed", "right"])
def test_several_datasets_in_one_batch(layout, home):
    names = ["two-shards", "several-shards", "uniform-bf16"]
    wanted = LAYOUTS[layout]()
    for io in ("mmap", "pread"):
        source = concat([open_case(VALID[name], home / name, io=io, max_open_files=1) for name in names])
        where = [(name, number) for name in names for number in range(len(VALID[name].entries))]
        for order in (range(10), (9, 3, 0, 8, 3)):
            for _ in range(2):
                batch = gather(source, records=list(order), layout=wanted)
                records = [stored(*where[number]) for number in order]
                assert_same(batch, expected(VALID[names[0]].schema, records, wanted))


@pytest.mark.parametrize("files", [1, 1000])
@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_many_threads(io, verify, files, home):
    """Files come and go, and records become verified, while others pack them."""
    name = "several-shards"
    dataset = open_case(VALID[name], home / name, io=io, verify=verify, max_open_files=files)
    layouts = [Packed(), Padded(), Padded(side="left", layers=(1,)), HF(), Packed(components=("v",), dtype="F32")]
    together = threading.Barrier(8)

    def pack(thread: int) -> int:
        together.wait(timeout=60)
        for turn in range(20):
            order = [(thread + turn * step) % 5 for step in range(1, 4)]
            layout = layouts[(thread + turn) % len(layouts)]
            assert_same(gather(dataset, records=order, layout=layout), expected_of_names(name, order, layout))
        return thread

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pack, range(8))) == list(range(8))


# ----------------------------------------------------------------------------------------------------- what is copied


@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_one_copy(verify, home):
    """As many bytes are copied as the batch has, mapped and packed; padding is not copied."""
    dataset = open_case(VALID["several-shards"], home / "several-shards", io="mmap", verify=verify)
    for _ in range(2):
        batch = gather(dataset, records=[0, 1, 2, 3, 4])
        assert (
            batch.nbytes_copied
            == batch.nbytes
            == sum(t.nbytes for t in (*batch.components.values(), batch["token_ids"]))
        )
        padded = gather(dataset, records=[0, 1, 2, 3, 4], layout="padded")
        assert padded.nbytes_copied == batch.nbytes < padded.nbytes


def test_an_estimate_is_what_a_batch_has(home):
    for name, layout in itertools.product(
        ("sliding-window", "wide-values", "int8-with-scales"), ("packed", "multiple")
    ):
        dataset = open_case(VALID[name], home / name)
        plan = Plan(dataset.schema, LAYOUTS[layout]())
        tokens = torch.tensor([record.num_tokens for record in dataset]).numpy()
        batch = gather(dataset, records=list(range(len(dataset))), layout=plan.layout)
        assert plan.estimate(tokens) == batch.nbytes


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_only_what_is_wanted_is_read_and_read_ahead(io, verify, tmp_path, monkeypatch):
    of = Schema.uniform(num_layers=4, num_kv_heads=1, head_dim=2048, dtype="F32")
    with kvformat.create(tmp_path / "data", schema=of, context=kvformat.Context.unknown()) as writer:
        for number in range(2):
            value = torch.arange(4 * 3 * 2048, dtype=torch.float32).reshape(4, 3, 1, 2048) + number
            writer.add(f"n{number}", {"k": value, "v": -value}, token_ids=[number, 1, 2])
    dataset = kvformat.open(tmp_path / "data", io=io, verify=verify)
    slab = 3 * 2048 * 4
    touched = []
    monkeypatch.setattr(
        StoredRecord, "_advise", lambda self, start, nbytes: touched.append((self.index, start, nbytes))
    )
    record = dataset[1]
    placed = record.placement.tensors
    places = [record.start + placed[name].offset + slab * row for name in ("k", "v") for row in (1, 2)]
    for _ in range(2):
        batch = gather(dataset, records=[1], layout=Packed(layers=(2, 1)))
        assert batch.nbytes_copied == 4 * slab + 12
    # K and V of layers 1 and 2, token ids; nothing else, and once.
    ids = record.start + placed["token_ids"].offset
    assert touched == [(1, places[0], 2 * slab), (1, places[2], 2 * slab), (1, ids, 12)]


# ------------------------------------------------------------------------------------------------ what cannot be held


@pytest.mark.parametrize(
    ("code", "of", "layout"),
    [
        ("E088", schema(component("x", 2, "tokens")), Packed()),
        ("E088", schema(component("x", "tokens", "tokens")), Padded()),
        ("E082", schema(component("x", "tokens")), Packed(components=("y",))),
        ("E082", schema(component("x", "tokens", layers=(1, 3))), Packed(layers=(1, 2))),
        ("E082", schema(component("x", "tokens")), Packed(extras=("y",))),
        ("E088", schema(component("x", "tokens", 2, 3)), HF()),
        ("E089", VALID["positions-3-rows"].schema, Packed()),
        ("E089", VALID["positions-1-row"].schema, Packed(position_rows=3)),
        ("E088", VALID["shared-layers"].schema, HF()),
        ("E088", VALID["sliding-window"].schema, HF()),
        ("E088", VALID["latent-attention"].schema, HF()),
        ("E088", VALID["int8-with-scales"].schema, HF(components=("k", "v"))),
        ("E088", Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=2, key_stage="raw"), HF()),
        ("E088", Schema.uniform(num_layers=3, num_kv_heads=1, head_dim=2), HF(layers=(1, 2))),
        ("E088", Schema.uniform(num_layers=3, num_kv_heads=1, head_dim=2), HF(layers=(1, 0))),
        ("E088", Schema.uniform(num_layers=3, num_kv_heads=1, head_dim=2), HF(components=("k",))),
    ],
)  # fmt: skip
def test_refused(code, of, layout):
    with pytest.raises(KVFormatError) as caught:
        Plan(of, layout)
    assert caught.value.code == code


def test_an_axis_that_comes_first_by_another_name_is_refused():
    """Fault 27: heads before tokens is no [tokens, heads], whatever their sizes."""
    swapped = schema(component("k", 2, "tokens", 4, role="key"), component("v", "tokens", 2, 4, role="value"))
    for layout in (Packed(), Padded(), HF()):
        with pytest.raises(KVFormatError, match="axis 'axis1' of 'k' varies, and is not the first one") as caught:
            Plan(swapped, layout)
        assert caught.value.code == "E088"
    assert [part.name for part in Plan(swapped, Packed(components=("v",))).parts] == ["v"]


def test_what_is_left_out_is_not_judged():
    """A component without a layer that is wanted, or an extra nobody asked for, may be of any shape."""
    odd = Extra(name="grid", axes=component("x", 2, "tokens").axes, dtype="I32")
    of = schema(
        component("k", "tokens", 4, role="key", layers=(0,)),
        component("swapped", 2, "tokens", layers=(1,)),
        component("q", "tokens", layers=(1,), dtype="I8", role="hidden", scale="qs"),
        component("qs", "tokens", layers=(1,)),
        extras=(odd,),
    )
    plan = Plan(of, Packed(layers=(0,), dtype="F16"))
    assert [(part.name, part.dtype) for part in plan.parts] == [("k", "F16")]
    with pytest.raises(KVFormatError, match="E088"):
        Plan(of, Packed(layers=(0,), extras=("grid",)))
