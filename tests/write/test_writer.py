"""What the writer takes, what it refuses, and what it leaves."""

from __future__ import annotations

import gc
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import kvformat
from kvformat import Axis, Extra, Media, Schema, Text
from kvformat.codes import CODES
from kvformat.errors import KVFormatError
from kvformat.spec import limits
from kvformat.write import appender
from tests.write.make import UNIFORM, all_bytes, component, ids, kv, read, scaled, schema, single, tree, writer


class LostError(Exception):
    """Not one of ours."""


# ----------------------------------------------------------------------------------------------------- what it writes


def test_the_way_the_readme_shows(tmp_path):
    of = Schema.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype="BF16", key_stage="attention")
    k, v = torch.randn(3, 5, 2, 4).bfloat16(), torch.randn(3, 5, 2, 4).bfloat16()
    with kvformat.create(tmp_path / "out" / "ds", schema=of, context=kvformat.Context.unknown()) as out:
        assert out.add("clip-0001", {"k": k, "v": v}, token_ids=[1, 2, 3, 4, 5]) == 0
        assert out.alias("clip-0001b", "clip-0001") == 0
    dataset = read(tmp_path / "out" / "ds")
    assert (dataset.id, len(dataset), dataset.num_names, dataset.schema) == (out.id, 1, 2, of)
    record = dataset["clip-0001b"]
    assert (record.index, record.num_tokens, record.names) == (0, 5, ["clip-0001", "clip-0001b"])
    assert torch.equal(record.component("k"), k)
    assert torch.equal(record.slab("value", layer=2), v[2])
    assert record.extra("token_ids").tolist() == [1, 2, 3, 4, 5]
    assert dataset.find(document=kvformat.document_digest(token_ids=[1, 2, 3, 4, 5])).index == 0
    assert record.fingerprint is None


def test_everything_of_the_manifest_comes_back(tmp_path):
    text = Text(add_generation_prompt=True, tokenizer="ab" * 32, truncate=17)
    with writer(
        tmp_path / "ds",
        text=text,
        provenance={"torch": "2", "device": "cpu"},
        files={"notes": b"n" * 1000, "a.b-c_d": b""},
        extensions={"mine": {"deep": [1, True, "x"]}},
        shard_slots=7,
    ) as out:
        out.add("a", kv(), token_ids=ids())
        out.skip("b", "too long")
        out.skip("c", "empty")
    dataset = read(tmp_path / "ds")
    assert dataset.text == text
    assert dataset.provenance == {"torch": "2", "device": "cpu"}
    manifest = dataset.manifest
    assert manifest.shard_slots == 7
    assert manifest.extensions == {"mine": {"deep": [1, True, "x"]}}
    assert [(skipped.input, skipped.name, skipped.reason) for skipped in manifest.skipped] == [
        (1, "b", "too long"),
        (2, "c", "empty"),
    ]
    found = {file.name: (tmp_path / "ds" / "files" / file.sha256).read_bytes() for file in manifest.files}
    assert found == {"notes": b"n" * 1000, "a.b-c_d": b""}


def test_equal_adds_make_equal_datasets(tmp_path):
    """Where and when, and how shards finish, must not show."""
    found = []
    for location in ("one", "two/deeper"):
        with writer(tmp_path / location, shard_slots=2, tag=location) as out:
            for number in range(9):
                out.add(f"{number}", kv(3 + number), token_ids=ids(3 + number))
        found.append({path: (tmp_path / location / path).read_bytes() for path in files_of(tmp_path / location)})
    assert found[0] == found[1]


def files_of(location):
    return [path for path in tree(location) if (location / path).is_file()]


def test_names_stand_by_record_then_input(tmp_path):
    with writer(tmp_path / "ds") as out:
        out.add("b", kv(3), token_ids=ids(3))
        out.add("ä", kv(4), token_ids=ids(4))
        out.alias("a", "b")
        out.skip("gone", "because")
        out.add("日本語", kv(3), token_ids=ids(3))
        out.alias("z", "a")
        assert (out.num_records, out.num_names) == (2, 5)
    dataset = read(tmp_path / "ds")
    assert list(dataset.names()) == [("b", 0), ("a", 0), ("日本語", 0), ("z", 0), ("ä", 1)]
    assert [dataset[name].index for name in ("b", "a", "日本語", "z", "ä")] == [0, 0, 0, 0, 1]
    assert "gone" not in dataset


def test_a_shard_closes_by_size_and_by_slots(tmp_path):
    """Records of one page, in shards of up to two pages; a larger record is a shard of its own."""
    of = single("F32", "tokens")

    def add(out, number, num_tokens):
        out.add(f"{number}", {"x": np.ones((1, num_tokens), np.float32)}, token_ids=ids(num_tokens, number))

    def shards(dataset):
        rows = [dataset.index.shard(number) for number in range(dataset.manifest.totals.shards)]
        return [row.end - row.first for row in rows]

    page, large = 1000, 3000  # tokens: one page, and three
    with writer(tmp_path / "by-size", of=of, shard_nbytes=8192) as out:
        for number, num_tokens in enumerate([page, page, page, large, page, page, large, large]):
            add(out, number, num_tokens)
    dataset = read(tmp_path / "by-size")
    assert shards(dataset) == [2, 1, 1, 2, 1, 1]
    files = (tmp_path / "by-size" / "shards").rglob("*.safetensors")
    assert dataset.nbytes == sum(path.stat().st_size for path in files)
    with writer(tmp_path / "by-slots", of=of, shard_slots=3) as out:
        for number in range(7):
            add(out, number, page)
    assert shards(read(tmp_path / "by-slots")) == [3, 3, 1]
    with writer(tmp_path / "smallest", of=of, shard_nbytes=1, shard_slots=1) as out:
        add(out, 0, 1)
        add(out, 1, 1)
    assert shards(read(tmp_path / "smallest")) == [1, 1]


def test_a_file_url_and_a_path(tmp_path):
    with writer(f"file://{tmp_path}/a%20b") as out:
        out.add("a", kv(), token_ids=ids())
    read(tmp_path / "a b")


def test_data_are_copied_before_add_returns(tmp_path):
    values = kv()
    before = {name: value.copy() for name, value in values.items()}
    token_ids = ids()
    with writer(tmp_path / "ds") as out:
        out.add("a", values, token_ids=token_ids)
        for value in (*values.values(), token_ids):
            value[...] = 7
    record = read(tmp_path / "ds")[0]
    assert all(all_bytes(record.component(name)) == all_bytes(value) for name, value in before.items())
    assert record.extra("token_ids").tolist() == ids().tolist()


def test_a_document_in_place_of_its_parts(tmp_path):
    document = kvformat.Document.of([4, 5, 6])
    with writer(tmp_path / "ds") as out:
        out.add("a", kv(), document=document)
        assert out.nbytes > 0
    assert read(tmp_path / "ds")[0].document == document.digest


# --------------------------------------------------------------------------------------------------------- duplicates


def test_equal_bytes_add_a_name(tmp_path):
    with writer(tmp_path / "ds") as out:
        assert out.add("a", kv(), token_ids=ids()) == 0
        assert out.add("other", kv(4), token_ids=ids(4)) == 1
        assert out.add("b", {name: torch.from_numpy(value) for name, value in kv().items()}, token_ids=ids()) == 0
        assert (out.num_records, out.num_names) == (2, 3)
    assert read(tmp_path / "ds")[0].names == ["a", "b"]


def test_other_bytes_of_a_document_are_refused_or_dropped(tmp_path):
    with writer(tmp_path / "error") as out:
        out.add("a", kv(), token_ids=ids())
        with pytest.raises(kvformat.InputError, match="keep_first") as caught:
            out.add("b", kv(seed=1), token_ids=ids())
        assert (caught.value.code, caught.value.record) == ("E108", "b")
        out.add("b", kv(), token_ids=ids())
    assert read(tmp_path / "error")[0].names == ["a", "b"]
    with writer(tmp_path / "keep", on_duplicate="keep_first") as out:
        out.add("a", kv(), token_ids=ids())
        assert out.add("b", kv(seed=1), token_ids=ids()) == 0
    record = read(tmp_path / "keep")[0]
    assert record.names == ["a", "b"]
    assert all_bytes(record.component("k")) == all_bytes(kv()["k"])


def test_a_duplicate_is_checked_like_any_record(tmp_path):
    with writer(tmp_path / "ds", on_duplicate="keep_first") as out:
        out.add("a", kv(), token_ids=ids())
        with pytest.raises(kvformat.InputError) as caught:
            out.add("b", kv(4), token_ids=ids())
        assert caught.value.code == "E101"


def test_other_extras_of_a_document_are_other_bytes(tmp_path):
    of = schema(component("x", "tokens"), extras=[Extra(name="label", axes=(Axis(name="n", size=1),), dtype="U8")])
    with writer(tmp_path / "ds", of=of) as out:
        x = {"x": np.ones((1, 3), np.float32)}
        out.add("a", x, token_ids=ids(), extras={"label": np.array([1], np.uint8)})
        with pytest.raises(kvformat.InputError) as caught:
            out.add("b", x, token_ids=ids(), extras={"label": np.array([2], np.uint8)})
        assert caught.value.code == "E108"


# ------------------------------------------------------------------------------------------------------------ refusals

EXTRAS = schema(
    component("x", "tokens"),
    extras=[
        Extra(name="label", axes=(Axis(name="n", size=2),), dtype="F32"),
        Extra(name="position_ids", axes=(Axis(name="rows", size=1), Axis(name="tokens", size="tokens")), dtype="I32"),
    ],
    token_ids=True,
)
X = {"x": np.ones((1, 3), np.float32)}
LABEL = {"label": np.zeros(2, np.float32)}
MEDIA = [Media(scheme="source", first=0, count=1, digest=bytes(32))]
NAN = np.float16("nan")


def with_value(value):
    values = kv()
    values["v"][1, 2, 1, 3] = value
    return values


REFUSALS = {
    "shape": ("E101", lambda w: w.add("x", {**kv(), "v": kv(4)["v"]}, token_ids=ids())),
    "masked": ("E081", lambda w: w.add("x", {**kv(), "k": np.ma.masked_array(kv()["k"])}, token_ids=ids())),
    "no-mapping": ("E081", lambda w: w.add("x", tuple(kv().values()), token_ids=ids())),
    "no-components": ("E081", lambda w: w.add("x", None, token_ids=ids())),
    "no-mapping-of-extras": ("E081", lambda w: w.add("x", kv(), token_ids=ids(), extras=[1])),
    "shape-of-all": ("E101", lambda w: w.add("x", kv(4), token_ids=ids(3))),
    "shape-fewer-axes": ("E101", lambda w: w.add("x", {**kv(), "k": kv()["k"][0]}, token_ids=ids())),
    "shape-torch": ("E101", lambda w: w.add("x", {**kv(), "k": torch.zeros(2, 3, 4, 2).half()}, token_ids=ids())),
    "dtype-numpy": ("E102", lambda w: w.add("x", {**kv(), "k": kv()["k"].astype(np.float32)}, token_ids=ids())),
    "dtype-torch": ("E102", lambda w: w.add("x", {**kv(), "k": torch.zeros(2, 3, 2, 4).bfloat16()}, token_ids=ids())),
    "missing": ("E103", lambda w: w.add("x", {"k": kv()["k"]}, token_ids=ids())),
    "unexpected": ("E103", lambda w: w.add("x", {**kv(), "q": kv()["k"]}, token_ids=ids())),
    "extra-as-component": ("E103", lambda w: w.add("x", {**kv(), "token_ids": ids()}, token_ids=ids())),
    "owned-extra": ("E103", lambda w: w.add("x", kv(), token_ids=ids(), extras={"token_ids": ids()})),
    "component-as-extra": ("E103", lambda w: w.add("x", {"k": kv()["k"]}, token_ids=ids(), extras={"v": kv()["v"]})),
    "nan": ("E104", lambda w: w.add("x", with_value(np.nan), token_ids=ids())),
    "infinity": ("E104", lambda w: w.add("x", with_value(-np.inf), token_ids=ids())),
    "empty-name": ("E106", lambda w: w.add("", kv(), token_ids=ids())),
    "long-name": ("E106", lambda w: w.add("ä" * 257, kv(), token_ids=ids())),
    "surrogate": ("E106", lambda w: w.add("\ud800", kv(), token_ids=ids())),
    "no-string": ("E106", lambda w: w.add(7, kv(), token_ids=ids())),
    "bytes-name": ("E106", lambda w: w.add(b"a", kv(), token_ids=ids())),
    "empty-alias": ("E106", lambda w: w.alias("", "first")),
    "empty-skip": ("E106", lambda w: w.skip("", "reason")),
    "taken": ("E107", lambda w: w.add("first", kv(7), token_ids=ids(7))),
    "taken-alias": ("E107", lambda w: w.alias("first", "first")),
    "taken-skip": ("E107", lambda w: w.skip("first", "reason")),
    "taken-by-skip": ("E107", lambda w: w.add("skipped", kv(7), token_ids=ids(7))),
    "taken-replay": ("E107", lambda w: w.replay("first", kvformat.Document.of(ids(7)))),
    "conflict": ("E108", lambda w: w.add("x", kv(seed=9), token_ids=ids())),
    "alias-of-nothing": ("E109", lambda w: w.alias("x", "nothing")),
    "alias-of-itself": ("E109", lambda w: w.alias("x", "x")),
    "alias-of-skipped": ("E109", lambda w: w.alias("x", "skipped")),
    "no-tokens": ("E110", lambda w: w.add("x", kv(), token_ids=[])),
    "negative-id": ("E110", lambda w: w.add("x", kv(), token_ids=[0, 1, -1])),
    "large-id": ("E110", lambda w: w.add("x", kv(), token_ids=[0, 1, 2**31])),
    "real-ids": ("E110", lambda w: w.add("x", kv(), token_ids=[0.0, 1.0, 2.0])),
    "ids-of-two-axes": ("E110", lambda w: w.add("x", kv(), token_ids=[[0, 1, 2]])),
    "too-many-ids": ("E110", lambda w: w.add("x", kv(), token_ids=np.zeros(2**24 + 1, np.uint8))),
    "prefix-of-all": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), mask="prefix", prefix_length=3)),
    "prefix-of-causal": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), prefix_length=1)),
    "unknown-mask": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), mask="none")),
    "lost-positions": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), position_ids=[1, 2, 3])),
    "lost-mask": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), mask="bidirectional")),
    "lost-media": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), media=MEDIA)),
    "two-position-rows": ("E110", lambda w: w.add("x", kv(), token_ids=ids(), position_ids=[[1, 2, 3]] * 2)),
    "media-outside": (
        "E110",
        lambda w: w.add(
            "x", kv(), token_ids=ids(), media=[Media(scheme="source", first=2, count=2, digest=bytes(32))]
        ),
    ),
    "no-document": ("E081", lambda w: w.add("x", kv())),
    "no-tensor": ("E081", lambda w: w.add("x", {**kv(), "k": kv()["k"].tolist()}, token_ids=ids())),
    "no-reason": ("E081", lambda w: w.skip("x", "")),
    "reason-surrogate": ("E081", lambda w: w.skip("x", "\ud800")),
    "reason-no-string": ("E081", lambda w: w.skip("x", 3)),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Id of the dataset that ``disturbed`` makes where nothing is refused."""
    return disturbed(tmp_path_factory.mktemp("undisturbed") / "ds", lambda w: None)


def disturbed(location, call):
    with writer(location, shard_slots=2) as out:
        out.add("first", kv(), token_ids=ids())
        out.skip("skipped", "for a test")
        call(out)
        for number in range(4, 7):
            out.add(f"{number}", kv(number), token_ids=ids(number))
    return out.id


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_leaves_the_writer_as_it_was(tmp_path, undisturbed, case):
    code, call = REFUSALS[case]

    def refused(out):
        with pytest.raises(KVFormatError) as caught:
            call(out)
        error = caught.value
        assert error.code == code
        assert type(error).__name__ == CODES[code].error
        assert isinstance(error, ValueError)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)

    assert disturbed(tmp_path / "ds", refused) == undisturbed
    read(tmp_path / "ds")


def refusal(tmp_path, call, **options):
    """The error that ``call`` raises with a new writer."""
    with pytest.raises(LostError), writer(tmp_path / "ds", **options) as out:
        with pytest.raises(KVFormatError) as caught:
            call(out)
        raise LostError
    return caught.value


def test_a_shape_error_says_what_and_where(tmp_path):
    error = refusal(tmp_path, lambda w: w.add("clip", {**kv(), "v": kv(4)["v"]}, token_ids=ids()))
    assert error.record == "clip"
    assert error.message == (
        "'v': shape [2, 4, 2, 4], expected [2, 3, 2, 4]: its axes are [layers, tokens, heads, head_dim], "
        "and the document has 3 tokens"
    )


def test_a_dtype_error_says_what_and_where(tmp_path):
    error = refusal(
        tmp_path, lambda w: w.add("clip", {**kv(), "k": torch.zeros(2, 3, 2, 4).bfloat16()}, token_ids=ids())
    )
    assert error.record == "clip"
    assert error.message == "'k': dtype bfloat16, expected float16 (F16); cast it yourself"


def test_a_missing_component_is_named(tmp_path):
    error = refusal(tmp_path, lambda w: w.add("clip", {"k": kv()["k"], "q": 0}, token_ids=ids()))
    assert (error.record, error.message) == ("clip", "missing v; not expected q")


def test_a_value_error_names_the_layer(tmp_path):
    of = Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F16", layers=[3, 11])
    error = refusal(tmp_path, lambda w: w.add("clip", with_value(np.inf), token_ids=ids()), of=of)
    assert (error.code, error.record, error.layer) == ("E104", "clip", 11)
    assert "allow_non_finite=['v']" in error.message


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("scale", ["ks", "vs"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_scale_is_positive_and_finite(tmp_path, value, scale, allowed):
    def call(out):
        out.add("clip", quantised(**{scale: value}), token_ids=ids())

    error = refusal(tmp_path, call, of=scaled(), allow_non_finite=[scale] if allowed else [])
    assert (error.code, error.record, error.layer) == ("E105", "clip", 1)


def quantised(**bad):
    values = {
        "k": np.arange(48, dtype=np.int8).reshape(2, 3, 2, 4),
        "v": torch.randn(2, 3, 2, 4).to(torch.float8_e4m3fn),
        "ks": np.full((2, 3, 2, 1), 0.5, np.float32),
        "vs": np.full((2, 1, 2, 1), 2.0**-149, np.float32),
    }
    for name, value in bad.items():
        values[name][1].flat[-1] = value
    return values


def test_extras_are_checked_too(tmp_path):
    nan = {"label": np.array([0, np.nan], np.float32)}
    cases = {
        "E103": lambda w: w.add("x", X, token_ids=ids()),
        "E101": lambda w: w.add("x", X, token_ids=ids(), extras={"label": np.zeros(3, np.float32)}),
        "E102": lambda w: w.add("x", X, token_ids=ids(), extras={"label": np.zeros(2)}),
        "E104": lambda w: w.add("x", X, token_ids=ids(), extras=nan),
        "E110": lambda w: w.add("x", X, token_ids=ids(), extras=LABEL, position_ids=[[1, 2, 3], [0] * 3, [0] * 3]),
    }
    with writer(tmp_path / "ds", of=EXTRAS) as out:
        for code, call in cases.items():
            with pytest.raises(KVFormatError) as caught:
                call(out)
            assert (caught.value.code, caught.value.layer) == (code, None)
        out.add("x", X, token_ids=ids(), extras=LABEL)
    assert read(tmp_path / "ds")[0].extra("label").tolist() == [0, 0]
    with writer(tmp_path / "allowed", of=EXTRAS, allow_non_finite=["label"]) as out:
        out.add("x", X, token_ids=ids(), extras=nan)
    assert np.isnan(read(tmp_path / "allowed")[0].extra("label").tolist()).tolist() == [False, True]


def test_the_longest_name(tmp_path):
    name = "ä" * 256
    assert len(name.encode()) == limits.MAX_NAME_NBYTES
    with writer(tmp_path / "ds") as out:
        out.add(name, kv(), token_ids=ids())
    assert read(tmp_path / "ds")[name].index == 0


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        (("tokens",), (3, 2**47), "bytes"),
        (("tokens", "m"), (3, 2**32), "2^32"),
    ],
)
def test_records_beyond_the_limits(tmp_path, dims, shape, expected):
    """The sizes of what is given decide, before a byte of it is looked at."""
    size = "m" if len(dims) > 1 else shape[1]
    of = schema(component("x", "tokens", size, dtype="F32" if len(dims) > 1 else "I8"), dims=dims)
    tensor = torch.zeros(1, dtype=torch.float32 if len(dims) > 1 else torch.int8).expand(1, *shape)
    error = refusal(tmp_path, lambda w: w.add("x", {"x": tensor}, token_ids=ids()), of=of)
    assert error.code == "E111"
    assert expected in error.message


def test_headers_beyond_the_limits(tmp_path):
    of = schema(*(component(f"component_{n}", "tokens") for n in range(100)))
    with pytest.raises(kvformat.InputError, match="lower shard_slots") as caught:
        writer(tmp_path / "ds", of=of, shard_slots=10_000)
    assert caught.value.code == "E111"
    writer(tmp_path / "ds", of=of, shard_slots=1_000)
    assert tree(tmp_path) == []


def test_a_manifest_beyond_the_limits(tmp_path, monkeypatch):
    assert limits.MAX_MANIFEST_NBYTES == 64 << 20
    monkeypatch.setattr(limits, "MAX_MANIFEST_NBYTES", 1 << 20)  # the same, in a fraction of the time
    large = "x" * limits.MAX_MANIFEST_NBYTES
    with pytest.raises(kvformat.InputError) as caught:
        writer(tmp_path / "ds", extensions={"large": large})
    assert caught.value.code == "E111"
    assert tree(tmp_path) == []
    # Below it a writer begins; what is added to the manifest later may still be too much.
    out = writer(tmp_path / "ds", extensions={"large": large[: -(1 << 16)]})
    with pytest.raises(kvformat.InputError) as caught, out:
        out.add("a", kv(), token_ids=ids())
        out.skip("b", "y" * (1 << 16))
    assert caught.value.code == "E111"
    assert tree(tmp_path) == []


MANIFEST_FAULTS = {
    "label": ("E018", {"files": {"Not a label": b""}}),
    "weights-without-a-model": (None, {"files": {"weights": b"{}"}}),
    "provenance": ("E018", {"provenance": {"version": 2}}),
    "provenance-surrogate": ("E015", {"provenance": {"version": "\ud800"}}),
    "real-extension": ("E015", {"extensions": {"learning_rate": 0.1}}),
    "null-extension": ("E015", {"extensions": {"nothing": None}}),
    "negative-extension": ("E015", {"extensions": {"below": -1}}),
    "tokenizer": ("E018", {"text": Text(tokenizer="not a digest")}),
    "truncate": ("E018", {"text": Text(truncate=0)}),
}


@pytest.mark.parametrize("case", MANIFEST_FAULTS)
def test_what_the_manifest_cannot_hold_is_refused_at_once(tmp_path, case):
    """Not after hours of work, whose result would be thrown away."""
    code, options = MANIFEST_FAULTS[case]
    if code is None:
        writer(tmp_path / "ds", **options)
        return
    with pytest.raises(KVFormatError) as caught:
        writer(tmp_path / "ds", **options)
    assert caught.value.code == code
    assert tree(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "options",
    [
        {"shard_nbytes": 0},
        {"shard_nbytes": 2**48},
        {"shard_nbytes": 1e9},
        {"shard_slots": 2.0},
        {"shard_slots": 0},
        {"shard_slots": 10_001},
        {"on_duplicate": "replace"},
        {"allow_non_finite": ["q"]},
        {"allow_non_finite": "kv"},
        {"allow_non_finite": 5},
        {"allow_non_finite": [5]},
        {"provenance": 5},
        {"extensions": [1]},
        {"files": 5},
        {"files": {1: b"x"}},
        {"files": {"a": "text"}},
        {"files": {"a": bytearray(b"may change before it is published")}},
        {"files": {"a": memoryview(ids(4))}},
    ],
)
def test_bad_arguments(tmp_path, options):
    with pytest.raises(kvformat.UsageError) as caught:
        writer(tmp_path / "ds", **options)
    assert caught.value.code == "E081"
    assert tree(tmp_path) == []


@pytest.mark.parametrize(("location", "code"), [("", "E081"), ("file://host/ds", "E206")])
def test_bad_locations(location, code):
    with pytest.raises(kvformat.UsageError) as caught:
        writer(location)
    assert caught.value.code == code


def test_a_schema_that_breaks_a_rule_is_refused_at_once(tmp_path):
    with pytest.raises(kvformat.FormatError) as caught:
        writer(tmp_path / "ds", of=single("U8"))
    assert caught.value.code == "E031"
    assert tree(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------- life cycle


def publish(location, **options):
    with writer(location, **options) as out:
        out.add("a", kv(), token_ids=ids())
    return out


@pytest.mark.parametrize("resume", [False, True])
def test_an_existing_dataset_is_never_replaced(tmp_path, resume):
    out = publish(tmp_path / "ds")
    before = {path: (tmp_path / path).stat().st_mtime_ns for path in tree(tmp_path)}
    late = writer(tmp_path / "ds", resume=resume)
    with pytest.raises(kvformat.DatasetExistsError) as caught:
        late.__enter__()
    assert (caught.value.code, caught.value.path) == ("E100", str(tmp_path / "ds"))
    assert isinstance(caught.value, FileExistsError)
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in tree(tmp_path)} == before
    assert read(tmp_path / "ds").id == out.id


def test_a_published_empty_root_file_is_no_reason_to_write(tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "kvformat.json").touch()
    with pytest.raises(kvformat.DatasetExistsError):
        publish(tmp_path / "ds")


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "ds").write_text("mine", encoding="utf-8")
    for location in (tmp_path / "ds", tmp_path / "ds" / "below"):
        with pytest.raises(kvformat.KVFormatError) as caught:
            publish(location)
        assert caught.value.code == "E207"
    assert (tmp_path / "ds").read_text(encoding="utf-8") == "mine"


def test_a_file_in_the_place_of_staging(tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / ".staging").write_text("mine", encoding="utf-8")
    with pytest.raises(kvformat.StorageError) as caught:
        publish(tmp_path / "ds")
    assert caught.value.code == "E207"
    assert tree(tmp_path) == ["ds", "ds/.staging"]


def test_a_dataset_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "ds").symlink_to("real")
    publish(tmp_path / "ds")
    read(tmp_path / "real")


def test_a_dangling_link_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "ds").symlink_to("nowhere")
    with pytest.raises(kvformat.StorageError) as caught:
        publish(tmp_path / "ds")
    assert caught.value.code == "E207"
    assert tree(tmp_path) == ["ds"]


def test_a_foreign_file_with_a_final_name(tmp_path):
    """Found by its content: it is not taken for ours, and not touched."""
    publish(tmp_path / "first")
    [shard] = (tmp_path / "first" / "shards").rglob("*.safetensors")
    name = shard.relative_to(tmp_path / "first")
    foreign = tmp_path / "ds" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"foreign")
    with pytest.raises(kvformat.ConflictError) as caught:
        publish(tmp_path / "ds")
    assert (caught.value.code, caught.value.path) == ("E113", str(foreign))
    assert tree(tmp_path / "ds") == ["shards", "shards/00000", name.as_posix()]
    assert foreign.read_bytes() == b"foreign"


def test_an_equal_file_with_a_final_name_is_used(tmp_path):
    first = publish(tmp_path / "first")
    [shard] = (tmp_path / "first" / "shards").rglob("*.safetensors")
    copy = tmp_path / "ds" / shard.relative_to(tmp_path / "first")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(shard.read_bytes())
    inode = copy.stat().st_ino
    assert publish(tmp_path / "ds").id == first.id
    assert copy.stat().st_ino == inode
    read(tmp_path / "ds")


def test_nothing_added(tmp_path):
    with pytest.raises(kvformat.InputError) as caught, writer(tmp_path / "sets" / "ds"):
        pass
    assert caught.value.code == "E114"
    assert tree(tmp_path) == []


def test_only_skipped(tmp_path):
    with pytest.raises(kvformat.InputError) as caught, writer(tmp_path / "ds") as out:
        out.skip("a", "reason")
    assert caught.value.code == "E114"
    assert tree(tmp_path) == []


def test_a_writer_is_used_inside_its_block(tmp_path):
    def calls(out):
        return [
            lambda: out.add("x", kv(), token_ids=ids()),
            lambda: out.alias("y", "a"),
            lambda: out.skip("z", "reason"),
            lambda: out.replay("z", kvformat.Document.of(ids())),
        ]

    def refused(call):
        with pytest.raises(kvformat.UsageError) as caught:
            call()
        assert caught.value.code == "E115"

    out = writer(tmp_path / "ds")
    for call in calls(out):
        refused(call)
    refused(lambda: out.id)
    assert tree(tmp_path) == []
    with out:
        refused(out.__enter__)
        refused(lambda: out.id)
        out.add("a", kv(), token_ids=ids())
    for call in calls(out):
        refused(call)
    refused(out.__enter__)
    assert out.id == read(tmp_path / "ds").id


@pytest.mark.parametrize("error", [LostError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("records", [0, 1, 20])
def test_an_exception_removes_what_was_made(tmp_path, error, records):
    with pytest.raises(error), writer(tmp_path / "sets" / "ds", shard_slots=2) as out:
        for number in range(records):
            out.add(f"{number}", kv(number + 1), token_ids=ids(number + 1))
        raise error
    assert tree(tmp_path) == []


def test_an_exception_leaves_what_was_there(tmp_path):
    (tmp_path / "ds" / ".staging" / "0123456789abcdef-01234567").mkdir(parents=True)
    (tmp_path / "ds" / "shards").mkdir()
    (tmp_path / "ds" / "notes.txt").touch()
    before = tree(tmp_path)
    with pytest.raises(LostError), writer(tmp_path / "ds") as out:
        out.add("a", kv(), token_ids=ids())
        raise LostError
    assert tree(tmp_path) == before


def test_a_failed_writer_publishes_nothing(tmp_path, monkeypatch):
    """Also where the caller swallows the error."""
    monkeypatch.setattr(appender, "_PIECE_NBYTES", 4096)

    class Full(kvformat.storage.local_write.LocalFiles):
        def write(self, fd, buffers, offset, path):
            raise kvformat.errors.make_error("E200", "full", path=path)

    class Files(Full):
        def __init__(self):
            self.writes = 0

        def write(self, fd, buffers, offset, path):
            self.writes += 1
            write = Full.write if self.writes == 3 else Full.__base__.write
            return write(self, fd, buffers, offset, path)

    with pytest.raises(kvformat.UsageError) as caught, writer(tmp_path / "ds", filesystem=Files()) as out:
        out.add("a", kv(3), token_ids=ids(3))
        with pytest.raises(kvformat.StorageError):
            out.add("b", kv(4), token_ids=ids(4))
        with pytest.raises(kvformat.UsageError) as later:
            out.add("c", kv(5), token_ids=ids(5))
        assert later.value.code == "E115"
    assert caught.value.code == "E115"
    assert tree(tmp_path) == []


@pytest.mark.parametrize("name", ["schema", "context", "text"])
def test_other_things_are_no_schema_context_or_text(tmp_path, name):
    given = {"schema": UNIFORM, "context": kvformat.Context.unknown(), name: "unknown"}
    with pytest.raises(kvformat.UsageError, match=f"{name} must be a .* found 'unknown'"):
        kvformat.create(tmp_path / "ds", **given)


def test_an_interrupt_in_the_middle_of_an_add_is_final(tmp_path, monkeypatch):
    """A record may be half in the tables then: what comes later must not be published with it."""
    with pytest.raises(kvformat.UsageError), writer(tmp_path / "ds") as out:
        out.add("a", kv(3), token_ids=ids(3))
        add_name = out._tables.add_name

        def interrupted(**options):
            add_name(**options)
            raise KeyboardInterrupt

        monkeypatch.setattr(out._tables, "add_name", interrupted)
        with pytest.raises(KeyboardInterrupt):
            out.add("b", kv(4), token_ids=ids(4))
        monkeypatch.undo()
        out.add("c", kv(5), token_ids=ids(5))
    assert tree(tmp_path) == []


def test_an_interrupt_in_the_middle_of_a_skip_is_final(tmp_path, monkeypatch):
    """The list may have the name twice then."""
    with pytest.raises(kvformat.UsageError), writer(tmp_path / "ds") as out:
        out.add("a", kv(3), token_ids=ids(3))
        skip = out._names.skip

        def interrupted(*arguments):
            skip(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(out._names, "skip", interrupted)
        with pytest.raises(KeyboardInterrupt):
            out.skip("b", "empty")
        monkeypatch.undo()
        out.skip("c", "empty")
    assert tree(tmp_path) == []


def test_names_and_reasons_of_numpy_are_strings(tmp_path):
    with writer(tmp_path / "ds") as out:
        out.add(np.str_("a"), kv(3), token_ids=ids(3))
        out.alias(np.str_("b"), np.str_("a"))
        out.skip(np.str_("c"), np.str_("empty"))
    assert kvformat.verify(tmp_path / "ds").ok
    assert [(entry.name, entry.reason) for entry in read(tmp_path / "ds").manifest.skipped] == [("c", "empty")]


def test_no_shard_can_be_created(tmp_path):
    """The file of a shard is refused once: nothing later may take its number."""

    class Files(kvformat.storage.local_write.LocalFiles):
        refused = False

        def create(self, path):
            if path.name == "00000001.shard" and not self.refused:
                self.refused = True
                raise kvformat.errors.make_error("E204", "too many open files", path=path)
            return super().create(path)

    with pytest.raises(kvformat.UsageError), writer(tmp_path / "ds", filesystem=Files(), shard_slots=1) as out:
        out.add("a", kv(3), token_ids=ids(3))
        with pytest.raises(kvformat.StorageError):
            out.add("b", kv(4), token_ids=ids(4))
        with pytest.raises(kvformat.UsageError):
            out.add("c", kv(5), token_ids=ids(5))
    assert tree(tmp_path) == []


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("resume", [False, True])
def test_no_descriptor_stays_open(tmp_path, resume):
    before, threads = descriptors(), threading.active_count()
    publish(tmp_path / "ds", resume=resume)
    assert descriptors() == before
    for attempt in range(5):
        with pytest.raises(LostError), writer(tmp_path / "lost", shard_slots=1, resume=resume) as out:
            for number in range(attempt, 12):
                out.add(f"{number}", kv(100), token_ids=ids(100, number))
            raise LostError
        del out
        assert (descriptors(), threading.active_count()) == (before, threads)
        if resume:
            for path in (tmp_path / "lost" / ".staging").iterdir():
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()


def test_two_writers_of_equal_datasets(tmp_path):
    one, two = writer(tmp_path / "ds"), writer(tmp_path / "ds")
    with one:
        with two:
            for out in (one, two):
                out.add("a", kv(), token_ids=ids())
        first = two.id
    assert one.id == first == read(tmp_path / "ds").id
    assert not (tmp_path / "ds" / ".staging").exists()


def test_two_writers_of_other_datasets(tmp_path):
    one, two = writer(tmp_path / "ds"), writer(tmp_path / "ds")
    with pytest.raises(kvformat.ConflictError) as caught, one, two:
        one.add("a", kv(seed=1), token_ids=ids())
        two.add("a", kv(seed=2), token_ids=ids())
    assert (caught.value.code, caught.value.path) == ("E113", str(tmp_path / "ds" / "kvformat.json"))
    dataset = read(tmp_path / "ds")
    assert dataset.id == two.id
    assert all_bytes(dataset[0].component("k")) == all_bytes(kv(seed=2)["k"])


def test_a_failing_writer_does_not_harm_another(tmp_path):
    """The one that made the directory gives up while the other is at work."""
    one, two = writer(tmp_path / "ds"), writer(tmp_path / "ds")
    one.__enter__()
    with two:
        two.add("a", kv(), token_ids=ids())
        with pytest.raises(kvformat.InputError) as caught:
            one.__exit__(None, None, None)
        assert caught.value.code == "E114"
        assert len(list((tmp_path / "ds" / ".staging").iterdir())) == 1
    read(tmp_path / "ds")


def test_a_writer_waits_for_a_directory_that_vanishes(tmp_path):
    """Another writer removes what it made between our look at it and our use of it."""
    location = tmp_path / "sets" / "ds"

    class Files(kvformat.storage.local_write.LocalFiles):
        lost = 0

        def make_dir(self, path):
            if path.parent.name == ".staging" and self.lost < 3:
                self.lost += 1
                for folder in (location / ".staging", location, location.parent)[: self.lost]:
                    folder.rmdir()
            return super().make_dir(path)

    files = Files()
    publish(location, filesystem=files)
    assert files.lost == 3
    read(location)


def test_a_directory_that_always_vanishes_is_given_up(tmp_path):
    class Files(kvformat.storage.local_write.LocalFiles):
        def make_dir(self, path):
            if path.parent.name == ".staging":
                path.parent.rmdir()
            return super().make_dir(path)

    with pytest.raises(KVFormatError) as caught:
        publish(tmp_path / "ds", filesystem=Files())
    assert caught.value.code == "E002"
    assert tree(tmp_path) == []


def test_a_relative_location_is_where_it_was(tmp_path, monkeypatch):
    """The caller may change the directory while it writes."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with writer("ds") as out:
        monkeypatch.chdir(tmp_path)
        out.add("a", kv(), token_ids=ids())
    read(tmp_path / "a" / "ds")


def test_every_writer_code_is_tested_somewhere(repository):
    """Each code of the writer is asserted in a test of the writer, or of extraction where that raises it."""
    folders = [repository / "tests" / name for name in ("write", "extract")]
    tests = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("test_*.py"))
    codes = [f"E{number}" for number in range(100, 119)]
    assert {CODES[code].kind for code in codes} == {"writer"}
    assert [code for code in codes if f'"{code}"' not in tests] == []
