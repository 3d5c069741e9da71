from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat.errors import (
    DamageError,
    FormatError,
    InputError,
    KVFormatError,
    LookupFailedError,
    StorageError,
    UsageError,
)
from kvformat.extract import Tokeniser
from kvformat.extract.columns import HEADER_NBYTES, write_columns
from kvformat.extract.documents import Documents, DocumentsWriter, open_documents
from kvformat.extract.plan import Plan, make_plan, open_plan
from kvformat.extract.plan_file import _COLUMNS, HEAD, RECORDS, PlanHead
from kvformat.spec import canonical, limits
from kvformat.spec.context import Text
from kvformat.spec.document import Document, Media
from kvformat.spec.layout import Layout
from kvformat.spec.schema import Axis, Extra, Schema
from kvformat.storage.local_write import LocalFiles
from kvformat.write.planned import Planned
from tests.models import tiny_tokenizer, write_documents

SCHEMA = Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=256, dtype="F32")  # 4,096 bytes a token
MEDIA = Extra(name="media", axes=(Axis(name="media", size="media"), Axis(name="entry", size=49)), dtype="U8")
POSITIONS = Extra(
    name="position_ids", axes=(Axis(name="rows", size=3), Axis(name="tokens", size="tokens")), dtype="I32"
)
MASK = Extra(name="mask", axes=(Axis(name="mask", size=2),), dtype="U64")
IMAGE = Media(scheme="source", first=0, count=1, digest=bytes(32))


def with_extras(*extras: Extra, dims: tuple[str, ...] = ("tokens",)) -> Schema:
    return msgspec.structs.replace(SCHEMA, dims=dims, extras=(*SCHEMA.extras, *extras))


def documents_of(given: list[tuple[str, Document]], path: Path | None = None, text: Text | None = None) -> Documents:
    with DocumentsWriter(path) as writer:
        for name, document in given:
            writer.add(name, document)
        return writer.finish(text)


def plan_of(*lengths: int, **options: Any) -> Plan:
    """Documents of these lengths, no two of which are equal, under the names 0, 1, and so on."""
    given = [(f"{n}", Document.of([n] * length)) for n, length in enumerate(lengths)]
    return make_plan(documents_of(given), **{"schema": SCHEMA, **options})


def members(plan: Plan) -> list[list[int]]:
    return [list(plan.shard(ordinal)) for ordinal in range(plan.num_shards)]


def groups(plan: Plan) -> list[list[int]]:
    return [list(group) for ordinal in range(plan.num_shards) for group in plan.groups(ordinal)]


def test_a_plan_says_what_is_where() -> None:
    given = [("a", Document.of([1, 2])), ("b", Document.of([3])), ("a again", Document.of([1, 2]))]
    plan = make_plan(documents_of(given, text=Text(truncate=5)), schema=SCHEMA, shard_nbytes=30_000)
    assert (plan.num_inputs, plan.num_names, plan.num_records, plan.num_tokens, plan.longest) == (3, 3, 2, 3, 2)
    assert (plan.num_shards, plan.num_groups, plan.nbytes) == (1, 2, 12_288 + 8_192)
    planned = plan.document(0)
    assert (planned.record, planned.name, planned.digest) == (0, "a", given[0][1].digest)
    assert planned.document.token_ids.tolist() == [1, 2]
    assert plan.shard_documents(0) == [given[0][1].digest, given[1][1].digest]
    assert list(plan.names()) == [(0, 0, b"a"), (0, 2, b"a again"), (1, 1, b"b")]
    assert (plan.schema, plan.text, plan.order) == (SCHEMA, Text(truncate=5), "given")
    assert (plan.batch_size, plan.batch_tokens, plan.shard_nbytes, plan.shard_slots) == (1, None, 30_000, 1024)
    assert plan.header_size == Layout(SCHEMA).header_size(limits.VERSION, 1024)
    assert len(plan.digest) == 64
    planned_: Planned = plan  # what writing needs of it
    assert planned_.skipped == ()


@pytest.mark.parametrize("ordinal", [-1, 2, 2**70])
def test_a_shard_that_is_not_there(ordinal: int) -> None:
    plan = plan_of(1, 1, shard_slots=1)
    for look in (plan.shard, plan.shard_documents, lambda n: list(plan.groups(n))):
        with pytest.raises(LookupFailedError) as refused:
            look(ordinal)
        assert refused.value.code == "E080"


# ---------------------------------------------------------------------------------------------------------- invariants


def shards_as_the_writer_fills_them(plan: Plan, sizes: list[int]) -> list[int]:
    """Number of records of each shard, one record after the other."""
    found: list[int] = []
    filled = 0
    for size in sizes:
        if not found or found[-1] >= plan.shard_slots or filled + size > plan.shard_nbytes:
            found.append(0)
            filled = 0
        found[-1] += 1
        filled += size
    return found


PLANS = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 6), min_size=1, max_size=40),
        "repeats": st.lists(st.integers(0, 39), max_size=10),
        "shard_nbytes": st.integers(1, 120_000),
        "shard_slots": st.integers(1, 9),
        "order": st.sampled_from(["given", "length"]),
        "batch_size": st.integers(1, 5),
        "batch_tokens": st.none() | st.integers(1, 20),
    }
)


@given(options=PLANS)
@settings(max_examples=150)
def test_what_holds_of_every_plan(options: dict[str, Any]) -> None:
    lengths, repeats = options.pop("lengths"), options.pop("repeats")
    given = [(f"{n}", Document.of([n] * length)) for n, length in enumerate(lengths)]
    for number, repeated in enumerate(repeats):
        given.insert(number * 3, (f"again {number}", given[repeated % len(given)][1]))
    plan = make_plan(documents_of(given), schema=SCHEMA, **options)
    first_seen = list(dict.fromkeys(document.digest for _, document in given))
    planned = [plan.document(record) for record in range(plan.num_records)]
    layout = Layout(SCHEMA)
    tokens = {document.digest: document.num_tokens for _, document in given}

    # Records tile the shards, which are filled as the writer fills them.
    assert [record for shard in members(plan) for record in shard] == list(range(plan.num_records))
    sizes = [layout.place((tokens[digest],)).nbytes for digest in first_seen]
    assert [len(shard) for shard in members(plan)] == shards_as_the_writer_fills_them(plan, sizes)
    assert plan.nbytes == sum(sizes)

    # Every document is one record; within a shard they come as given, or by length.
    ordered = []
    for shard in members(plan):
        digests = first_seen[shard[0] : shard[-1] + 1]
        ordered += sorted(digests, key=tokens.__getitem__) if plan.order == "length" else digests
    assert [one.digest for one in planned] == ordered
    assert [digest for ordinal in range(plan.num_shards) for digest in plan.shard_documents(ordinal)] == ordered
    assert [plan.num_tokens_of(record) for record in range(plan.num_records)] == [tokens[digest] for digest in ordered]

    # Groups tile the shards, are of one length, within the limits, and as large as those let them be.
    assert [record for group in groups(plan) for record in group] == list(range(plan.num_records))
    assert len(groups(plan)) == plan.num_groups
    for ordinal in range(plan.num_shards):
        found = [list(group) for group in plan.groups(ordinal)]
        assert [record for group in found for record in group] == list(plan.shard(ordinal))
        for group, following in pairwise([*found, [-1]]):
            length = plan.num_tokens_of(group[0])
            assert {plan.num_tokens_of(record) for record in group} == {length}
            most = plan.batch_size if plan.batch_tokens is None else max(plan.batch_tokens // length, 1)
            assert len(group) <= min(most, plan.batch_size)
            full = len(group) == min(most, plan.batch_size)
            assert full or following == [-1] or plan.num_tokens_of(following[0]) != length

    # Names are complete, by record and then by input, and lead to their documents.
    names = list(plan.names())
    assert names == sorted(names)
    assert {name.decode(): ordered[record] for record, _, name in names} == {
        name: document.digest for name, document in given
    }
    assert [given[position][0] for _, position, _ in names] == [name.decode() for _, _, name in names]
    assert (plan.num_names, plan.num_inputs) == (len(given), len(given))


def test_shards_are_those_of_the_writer(tmp_path: Path) -> None:
    lengths = [3, 1, 1, 9, 2, 2, 2, 1, 5, 1, 1, 1, 1]
    plan = plan_of(*lengths, shard_nbytes=30_000, shard_slots=4)
    with kvformat.create(
        tmp_path / "ds", schema=SCHEMA, context=kvformat.Context.unknown(), shard_nbytes=30_000, shard_slots=4
    ) as writer:
        for record in range(plan.num_records):
            planned = plan.document(record)
            values = torch.ones(2, planned.document.num_tokens, 1, 256)
            writer.add(planned.name, {"k": values, "v": values}, document=planned.document)
    dataset = kvformat.open(tmp_path / "ds")
    assert dataset.index.first_records(at_most=100) == [plan.shard(n).start for n in range(plan.num_shards)]
    assert dataset.manifest.header_size == plan.header_size
    assert dataset.nbytes == plan.nbytes + plan.num_shards * plan.header_size


def test_a_record_larger_than_a_shard_is_alone() -> None:
    plan = plan_of(1, 9, 1, 1, shard_nbytes=20_000)
    assert members(plan) == [[0], [1], [2, 3]]


def test_a_document_larger_than_a_batch_is_alone() -> None:
    plan = plan_of(9, 9, 2, 2, 2, batch_size=8, batch_tokens=4)
    assert groups(plan) == [[0], [1], [2, 3], [4]]


def test_media_count_as_a_dim() -> None:
    given = [(f"{n}", Document.of([n], media=[IMAGE] * n)) for n in range(4)]
    schema = with_extras(MEDIA, dims=("tokens", "media"))
    plan = make_plan(documents_of(given), schema=schema)
    layout = Layout(schema)
    assert plan.nbytes == sum(layout.place((1, n)).nbytes for n in range(4))


# -------------------------------------------------------------------------------------------------------------- digest


def test_equal_plans_have_equal_digests_in_any_process(tmp_path: Path) -> None:
    path = write_documents(
        tmp_path / "d.jsonl", [{"id": f"n{i}", "token_ids": [i % 7] * (1 + i % 5)} for i in range(50)]
    )
    code = (
        "import sys; from kvformat.extract import Tokeniser; from kvformat.extract.plan import make_plan\n"
        "from kvformat.spec.schema import Schema\n"
        "schema = Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=256, dtype='F32')\n"
        "plan = make_plan(sys.argv[1], Tokeniser(None), schema=schema, order='length', batch_size=3)\n"
        "plan.save(sys.argv[2]); print(plan.digest)\n"
    )
    digests = {make_plan(path, Tokeniser(None), schema=SCHEMA, order="length", batch_size=3).digest}
    for seed in ("0", "random"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, str(path), str(tmp_path / seed)],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        digests |= {done.stdout.strip(), open_plan(tmp_path / seed).digest}
    assert len(digests) == 1
    first, second = (sorted(folder.iterdir()) for folder in (tmp_path / "0", tmp_path / "random"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


GIVEN = [("a", Document.of([1, 2])), ("b", Document.of([3])), ("c", Document.of([4, 5, 6]))]
CHANGES: dict[str, dict[str, Any]] = {
    "token": {"given": [("a", Document.of([1, 9])), *GIVEN[1:]]},
    "positions": {"given": [("a", Document.of([1, 2], position_ids=[5, 6])), *GIVEN[1:]], "schema": None},
    "mask": {"given": [("a", Document.of([1, 2], mask="bidirectional")), *GIVEN[1:]], "schema": None},
    "name": {"given": [("A", GIVEN[0][1]), *GIVEN[1:]]},
    "names exchanged": {"given": [("b", GIVEN[0][1]), ("a", GIVEN[1][1]), GIVEN[2]]},
    "order of documents": {"given": GIVEN[::-1]},
    "one less": {"given": GIVEN[:2]},
    "one more name": {"given": [*GIVEN, ("d", GIVEN[0][1])]},
    "text": {"text": Text(truncate=7)},
    "schema": {"schema": Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=256, dtype="BF16")},
    "layers": {"schema": Schema.uniform(num_layers=2, layers=[0, 2], num_kv_heads=1, head_dim=256, dtype="F32")},
    "shard_nbytes": {"shard_nbytes": 1 << 20},
    "shard_slots": {"shard_slots": 1000},
    "order": {"order": "length"},
    "batch_size": {"batch_size": 2},
    "batch_tokens": {"batch_tokens": 100},
}


def digest_of(*, given: Any = GIVEN, text: Text | None = None, schema: Schema | None = SCHEMA, **options: Any) -> str:
    documents = documents_of(given, text=text)
    return make_plan(documents, schema=schema or with_extras(POSITIONS, MASK), **options).digest


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_gives_another_digest(change: dict[str, Any]) -> None:
    like = {"schema": None} if change.get("schema", 0) is None else {}
    assert digest_of(**like) == digest_of(**like)
    assert digest_of(**like) != digest_of(**change)


@given(
    lists=st.lists(
        st.lists(st.tuples(st.text(min_size=1, max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=4))),
        min_size=2,
        max_size=2,
    )
)
@settings(max_examples=150)
def test_different_inputs_have_different_digests(lists: Any) -> None:
    """However names and ids are cut: "ab" + "c" is not "a" + "bc"."""
    first, second = (
        [(name, Document.of(ids)) for name, ids in {name: ids for name, ids in given if _is_name(name)}.items()]
        for given in lists
    )
    if first and second:
        same = [(name, document.digest) for name, document in first] == [(n, d.digest) for n, d in second]
        assert (digest_of(given=first) == digest_of(given=second)) == same


def _is_name(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "options",
    [
        {"shard_nbytes": 0},
        {"shard_nbytes": 2**48},
        {"shard_slots": 0},
        {"shard_slots": limits.MAX_SHARD_SLOTS + 1},
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": 1.5},
        {"batch_tokens": 0},
        {"order": "random"},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(1, **options)
    assert refused.value.code == "E081"


def test_a_schema_that_is_none() -> None:
    bad = msgspec.structs.replace(SCHEMA, dims=("frames",))
    with pytest.raises(FormatError):
        plan_of(1, schema=bad)


def test_dims_a_plan_cannot_know() -> None:
    boxes = Extra(name="boxes", axes=(Axis(name="boxes", size="boxes"),), dtype="I32")
    with pytest.raises(InputError, match="'boxes' are known only once a record is computed") as refused:
        plan_of(1, schema=with_extras(boxes, dims=("tokens", "boxes")))
    assert refused.value.code == "E111"


@pytest.mark.parametrize(
    ("more", "extra", "what"),
    [
        ({"position_ids": [4, 5]}, POSITIONS, "more than 0 rows of positions"),
        ({"mask": "bidirectional"}, MASK, "a mask"),
        ({"media": [IMAGE]}, None, "media"),
    ],
)
def test_inputs_the_schema_has_no_room_for(more: Any, extra: Extra | None, what: str) -> None:
    documents = documents_of([("a", Document.of([1])), ("b", Document.of([1, 2], **more))])
    with pytest.raises(InputError, match=f"document 1 has {what}, for which the schema has no extra") as refused:
        make_plan(documents, schema=SCHEMA)
    assert (refused.value.code, refused.value.record) == ("E110", "b")
    fitting = with_extras(extra) if extra else with_extras(MEDIA, dims=("tokens", "media"))
    assert make_plan(documents, schema=fitting).num_records == 2


def test_a_source_needs_a_tokeniser_and_documents_do_not(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", [{"id": "a", "token_ids": [1]}])
    with pytest.raises(UsageError, match="a source needs a tokeniser"):
        make_plan(path, schema=SCHEMA)
    documents_of([("a", Document.of([1]))], tmp_path / "d.kvdocs")
    plan = make_plan(path, Tokeniser(None), schema=SCHEMA)
    assert make_plan(tmp_path / "d.kvdocs", schema=SCHEMA).digest == plan.digest
    with pytest.raises(UsageError, match="no columns to choose"):
        make_plan(tmp_path / "d.kvdocs", schema=SCHEMA, columns={"id": "x"})


@pytest.mark.parametrize(
    ("tokeniser", "code", "match"),
    [
        (Tokeniser(tiny_tokenizer(bos=False)), "E305", "another tokenizer than the model's; make the documents file"),
        (Tokeniser(tiny_tokenizer(), max_tokens=4), "E301", "document 1: 5 tokens, but the model has 4 positions"),
        (Tokeniser(tiny_tokenizer(), vocab_size=256), "E300", "token id 256 is beyond the model's vocabulary of 256"),
    ],
)
def test_a_documents_file_for_another_model(tokeniser: Tokeniser, code: str, match: str, tmp_path: Path) -> None:
    lines = [{"id": "a", "text": "abc"}, {"id": "b", "text": "abcd"}]
    source = write_documents(tmp_path / "d.jsonl", lines)
    made = make_plan(source, Tokeniser(tiny_tokenizer()), schema=SCHEMA)
    made._documents.save(LocalFiles(), tmp_path / "d.kvdocs")
    assert make_plan(tmp_path / "d.kvdocs", Tokeniser(tiny_tokenizer()), schema=SCHEMA).digest == made.digest
    with pytest.raises(InputError, match=match) as refused:
        make_plan(tmp_path / "d.kvdocs", tokeniser, schema=SCHEMA)
    assert (refused.value.code, refused.value.path) == (code, str(tmp_path / "d.kvdocs"))


def test_a_damaged_documents_file_is_never_planned(tmp_path: Path) -> None:
    path = tmp_path / "d.kvdocs"
    documents_of([("a", Document.of([1])), ("b", Document.of([2]))], path)
    data = bytearray(path.read_bytes())
    data[HEADER_NBYTES + 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match=r"document 1 \('b'\)"):
        make_plan(path, schema=SCHEMA)
    with pytest.raises(DamageError, match=r"document 1 \('b'\)"):
        make_plan(open_documents(path), schema=SCHEMA)


def test_what_the_documents_leave_out_the_plan_leaves_out() -> None:
    with DocumentsWriter() as writer:
        writer.skip("x", "an image is missing")
        writer.add("a", Document.of([1], media=[IMAGE]), ["there.png"])
        plan = make_plan(writer.finish(), schema=with_extras(MEDIA, dims=("tokens", "media")))
    assert [(one.input, one.name) for one in plan.skipped] == [(0, "x")]
    assert list(plan.names()) == [(0, 1, b"a")]
    assert (plan.num_inputs, plan.num_names) == (2, 1)
    assert plan.media_source(IMAGE.digest) == "there.png"
    assert plan.media_source(bytes(31) + b"x") is None


# ------------------------------------------------------------------------------------------------------------- on disk


def everything(plan: Plan) -> Any:
    return (
        plan.digest,
        [plan.document(record).document.to_bytes() for record in range(plan.num_records)],
        members(plan),
        groups(plan),
        list(plan.names()),
        [plan.shard_documents(ordinal) for ordinal in range(plan.num_shards)],
        [plan.num_tokens_of(record) for record in range(plan.num_records)],
        plan.skipped,
        (plan.schema, plan.text, plan.order, plan.batch_size, plan.batch_tokens, plan.nbytes, plan.longest),
        (plan.num_inputs, plan.num_names, plan.num_records, plan.num_tokens, plan.num_shards, plan.num_groups),
    )


@pytest.fixture
def plan() -> Plan:
    return plan_of(3, 1, 2, 1, 2, shard_nbytes=20_000, order="length", batch_size=2, batch_tokens=3)


def test_a_saved_plan_is_the_same(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "new" / "plan")
    found = open_plan(tmp_path / "new" / "plan")
    assert everything(found) == everything(plan)
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["plan"]
    files = sorted(entry.name for entry in (tmp_path / "new" / "plan").iterdir())
    assert files == ["documents.kvdocs", "order.safetensors", "plan.json"]
    found.save(tmp_path / "copy")  # a plan that was opened can be kept elsewhere
    assert everything(open_plan(tmp_path / "copy")) == everything(plan)


def test_an_equal_plan_is_success_and_another_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    before = {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()}
    plan.save(path)
    with pytest.raises(StorageError, match="another plan is here already; choose another location") as refused:
        plan_of(1, 2).save(path)
    assert (refused.value.code, refused.value.path) == ("E207", str(path))
    assert {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize("make", [lambda p: p.write_text("x"), lambda p: (p.mkdir(), (p / "mine").touch())])
def test_what_is_no_plan_is_never_overwritten(make: Callable[[Path], object], plan: Plan, tmp_path: Path) -> None:
    make(tmp_path / "plan")
    with pytest.raises(StorageError, match="something else is here already") as refused:
        plan.save(tmp_path / "plan")
    assert refused.value.code == "E207"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan"]


def test_an_empty_directory_takes_a_plan(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    plan.save(tmp_path / "plan")
    assert open_plan(tmp_path / "plan").digest == plan.digest


def test_a_damaged_twin_is_told_when_saving(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    path = tmp_path / "plan" / "documents.kvdocs"
    data = bytearray(path.read_bytes())
    data[HEADER_NBYTES] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError) as refused:
        plan.save(tmp_path / "plan")
    assert refused.value.code == "E307"


def test_an_interrupted_save_leaves_nothing(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: LocalFiles, path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFiles, "create_file", stop)
    with pytest.raises(KeyboardInterrupt):
        plan.save(tmp_path / "plan")
    assert list(tmp_path.iterdir()) == []


def test_everything_is_durable_before_the_directory_has_its_name(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = LocalFiles.sync, Path.rename

    def synced(self: LocalFiles, fd: int, path: Path) -> None:
        events.append(path.name)
        sync(self, fd, path)

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(LocalFiles, "sync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    plan.save(tmp_path / "plan")
    *files, draft, renaming, parent = events
    assert sorted(files) == ["documents.kvdocs", "order.safetensors", "plan.json"]
    assert (draft.startswith(".plan."), renaming, parent) == (True, "rename", tmp_path.name)


def test_every_flipped_bit_is_found_out(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    expected = everything(plan)
    for file in sorted((tmp_path / "plan").iterdir()):
        data = file.read_bytes()
        used = len(data[:HEADER_NBYTES].rstrip())
        step = 3 if file.name == HEAD else 59
        for place in [*range(0, used, step), *range(used, len(data), 31)]:
            damaged = bytearray(data)
            damaged[place] ^= 1 << (place % 8)
            file.write_bytes(damaged)
            with pytest.raises(DamageError) as refused:
                everything(open_plan(tmp_path / "plan"))
            assert refused.value.code == "E307", (file.name, place)
            assert refused.value.path.startswith(str(tmp_path / "plan"))
        file.write_bytes(data)
    assert everything(open_plan(tmp_path / "plan")) == expected


def test_every_truncation_and_absence_is_found_out(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    for file in sorted((tmp_path / "plan").iterdir()):
        data = file.read_bytes()
        for length in [*range(0, len(data), 199), len(data) - 1]:
            file.write_bytes(data[:length])
            with pytest.raises(DamageError) as refused:
                open_plan(tmp_path / "plan")
            assert refused.value.code == "E307"
        file.unlink()
        with pytest.raises(DamageError, match="make it again with `kvformat plan`") as refused:
            open_plan(tmp_path / "plan")
        assert refused.value.path == str(file)
        file.write_bytes(data)


def test_no_plan_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(DamageError, match="make one with `kvformat plan`") as refused:
            open_plan(place)
        assert refused.value.code == "E307"


def test_files_of_another_plan_are_found_out(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    others = {
        "documents.kvdocs": plan_of(3, 1, 2, 1, 1, shard_nbytes=20_000, order="length", batch_size=2, batch_tokens=3),
        "order.safetensors": plan_of(3, 1, 2, 1, 2, shard_nbytes=20_000, order="length", batch_size=2),
        "plan.json": plan_of(3, 1, 2, 1, 2, shard_nbytes=20_000, order="length", batch_size=2, batch_tokens=4),
    }
    for name, other in others.items():
        other.save(tmp_path / name)
        kept = (tmp_path / "plan" / name).read_bytes()
        (tmp_path / "plan" / name).unlink()
        (tmp_path / "plan" / name).write_bytes((tmp_path / name / name).read_bytes())
        with pytest.raises(DamageError) as refused:
            open_plan(tmp_path / "plan")
        assert refused.value.code == "E307"
        (tmp_path / "plan" / name).write_bytes(kept)
    assert open_plan(tmp_path / "plan").digest == plan.digest


def resealed(path: Path, **changes: Any) -> None:
    """Change the records, and make the head prove them again: damage no digest finds."""
    head = canonical.convert(canonical.decode((path / HEAD).read_bytes()), PlanHead)
    columns = {**open_plan(path)._arrangement._asdict(), **changes}
    rest = canonical.encode(msgspec.structs.replace(head, records=None))
    (path / RECORDS).unlink()
    fd = os.open(path / RECORDS, os.O_RDWR | os.O_CREAT)
    metadata = {"plan": hashlib.sha256(rest).hexdigest()}
    proof = write_columns(LocalFiles(), fd, path, "order", _COLUMNS, columns, metadata=metadata)
    os.close(fd)
    value = json.loads((path / HEAD).read_bytes())
    value["records"] = {"sha256": proof.sha256, "size": proof.nbytes}
    (path / HEAD).write_bytes(canonical.encode(value))


@pytest.mark.parametrize(
    "changes",
    [
        {"document": [0, 0, 1, 2, 3]},
        {"document": [0, 1, 2, 3, 5]},
        {"document": [0, 1, 2, 3]},
        {"shard_first": [1, 2, 3]},
        {"shard_first": [0, 3, 2]},
        {"shard_first": [0, 2, 9]},
        {"group_first": [0, 1, 4]},
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict[str, list[int]], plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    resealed(path)
    assert everything(open_plan(path)) == everything(plan)
    resealed(path, **{name: np.array(values, dtype=np.uint64) for name, values in changes.items()})
    with pytest.raises(DamageError, match="contradict each other") as refused:
        open_plan(path)
    assert refused.value.code == "E307"


def test_a_document_is_proved_whenever_it_is_read(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    path = tmp_path / "plan" / "documents.kvdocs"
    data = bytearray(path.read_bytes())
    data[HEADER_NBYTES] ^= 1  # of the first document given, which is the longest
    path.write_bytes(data)
    found = open_plan(tmp_path / "plan")
    bad = [record for record in range(found.num_records) if found.num_tokens_of(record) == 3]
    for record in range(found.num_records):
        if record in bad:
            with pytest.raises(DamageError, match="is not as it was written") as refused:
                found.document(record)
            assert (refused.value.code, refused.value.path) == ("E307", str(path))
        else:
            found.document(record)


def test_another_version_is_told(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    head = json.loads((tmp_path / "plan" / HEAD).read_bytes())
    head["version"] = "9.1"
    (tmp_path / "plan" / HEAD).write_bytes(canonical.encode(head))
    with pytest.raises(DamageError, match=r"written by version '9\.1', this one reads 1\.0"):
        open_plan(tmp_path / "plan")


def test_a_temporary_plan_leaves_nothing(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "d.jsonl", [{"id": "a", "token_ids": [1]}])
    plan = make_plan(source, Tokeniser(None), schema=SCHEMA, folder=tmp_path / "space")
    assert list((tmp_path / "space").iterdir()) == []
    source.write_text("changed")  # documents are read once
    assert plan.document(0).document.token_ids.tolist() == [1]
    plan.close()
    plan.close()


def test_errors_of_the_disk_are_no_damage(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvformat.storage import local_read

    plan.save(tmp_path / "plan")

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "no")

    monkeypatch.setattr(local_read.os, "open", refuse)
    with pytest.raises(KVFormatError) as refused:
        open_plan(tmp_path / "plan")
    assert refused.value.code == "E207"
