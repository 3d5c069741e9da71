"""Continuing what an interrupted run staged."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import kvformat
from kvformat import Document, Schema
from kvformat.errors import KVFormatError
from kvformat.spec import canonical
from kvformat.storage.lease import DirectoryLease
from tests.write.make import all_bytes, ids, kv, read, tree, writer

RECORDS = 9


class LostError(Exception):
    """The machine went away."""


def start(location, **options):
    """A resuming writer with shards of two records."""
    return writer(location, **{"shard_slots": 2, "resume": True, **options})


def fill(out, first=0, last=RECORDS, *, seed=0):
    for number in range(first, last):
        out.add(f"{number}", kv(3 + number, seed), token_ids=ids(3 + number))


def staged(location):
    """What is staged: names of shards and receipts."""
    return sorted(path.name for path in location.glob(".staging/*/0*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    with start(location) as out:
        fill(out)
    return out.id


@pytest.fixture
def interrupted(tmp_path):
    """A location where three shards are staged; a fourth was in work."""
    location = tmp_path / "ds"
    with pytest.raises(LostError), start(location) as out:
        fill(out, 0, 7)
        out._shards._finisher._pool.shutdown(wait=True)
        raise LostError
    assert [name for name in staged(location) if name.endswith(".json")] == [f"0000000{n}.json" for n in range(3)]
    return location


def test_the_same_adds_complete_it(interrupted, undisturbed):
    shards = {path.name: path.stat().st_ino for path in interrupted.glob(".staging/*/*.shard")}
    with start(interrupted) as out:
        fill(out)
        assert out.num_records == RECORDS
    assert out.id == undisturbed == read(interrupted).id
    published = {path.name[:8]: path.stat().st_ino for path in interrupted.rglob("*.safetensors")}
    for name in ("00000000", "00000001", "00000002"):
        assert published[name] == shards[f"{name}.shard"], "a finished shard was written again"
    assert not (interrupted / ".staging").exists()


def test_a_writer_that_does_not_resume_leaves_it_alone(interrupted, undisturbed):
    before = staged(interrupted)
    with start(interrupted, resume=False) as out:
        fill(out)
    assert out.id == undisturbed
    assert staged(interrupted) == before
    report = kvformat.verify(interrupted)
    assert (report.ok, [warning.code for warning in report.warnings]) == (True, ["W002"])


def test_a_failing_writer_that_does_not_resume_leaves_it_alone(interrupted):
    before = tree(interrupted)
    with pytest.raises(LostError), start(interrupted, resume=False) as out:
        fill(out, 0, 5)
        raise LostError
    assert tree(interrupted) == before


@pytest.mark.parametrize(
    "options",
    [
        {"tag": "other"},
        {"shard_nbytes": 1 << 20},
        {"shard_slots": 3},
        {"of": Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F16", key_stage="raw")},
    ],
)
def test_another_plan_starts_anew(interrupted, options):
    before = staged(interrupted)
    with start(interrupted, **options) as out:
        assert out._replay.num_shards == 0
        fill(out)
    read_with_warning(interrupted)
    assert staged(interrupted) == before


def read_with_warning(location):
    report = kvformat.verify(location)
    assert (report.ok, report.findings, [warning.code for warning in report.warnings]) == (True, (), ["W002"])


@pytest.mark.parametrize(
    "options",
    [
        {"provenance": {"torch": "other"}},
        {"text": kvformat.Text(truncate=5)},
        {"files": {"notes": b"n"}},
        {"allow_non_finite": ["k"]},
        {"on_duplicate": "keep_first"},
    ],
)
def test_what_is_not_in_the_plan_may_change(interrupted, options):
    with start(interrupted, **options) as out:
        assert out._replay.num_shards == 3
        fill(out)
    read(interrupted)


def mismatch(location, call):
    with pytest.raises(kvformat.ConflictError) as caught, start(location) as out:
        call(out)
    assert (caught.value.code, caught.value.path) == ("E112", str(location))
    return caught.value


MISMATCHES = {
    "other-document": (lambda out: fill(out, 1), "another document as record 0"),
    "other-values": (lambda out: fill(out, seed=1), "another values of the same document as record 0"),
    "other-document-later": (lambda out: (fill(out, 0, 3), fill(out, 4)), "another document as record 3"),
    "less": (lambda out: fill(out, 0, 4), "1 shards are left over"),
    "part-of-a-shard": (lambda out: fill(out, 0, 3), "2 shards are left over"),
    "nothing": (lambda out: None, "3 shards are left over"),
    "other-replay": (lambda out: out.replay("x", Document.of(ids(50))), "another document as record 0"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_other_adds_are_refused_and_keep_what_is_staged(interrupted, undisturbed, case):
    call, message = MISMATCHES[case]
    before = staged(interrupted)
    error = mismatch(interrupted, call)
    assert message in error.message
    finished = [name for name in before if name < "00000003"]
    assert [name for name in staged(interrupted) if name < "00000003"] == finished
    with start(interrupted) as out:
        fill(out)
    assert out.id == undisturbed


def test_a_mismatch_cannot_be_overlooked(interrupted):
    """Nothing can be added after it, and nothing is published."""
    with pytest.raises(kvformat.UsageError) as caught, start(interrupted) as out:
        with pytest.raises(kvformat.ConflictError):
            fill(out, seed=1)
        with pytest.raises(kvformat.UsageError):
            fill(out)
    assert caught.value.code == "E115"
    with pytest.raises(kvformat.DatasetNotFoundError):
        kvformat.open(interrupted)


def test_a_refused_record_may_be_given_again(interrupted, undisturbed):
    """What a writer refuses for itself is no mismatch."""
    with start(interrupted) as out:
        bad = kv(3)
        bad["k"][0, 0, 0, 0] = np.nan
        with pytest.raises(kvformat.InputError):
            out.add("0", bad, token_ids=ids(3))
        fill(out)
    assert out.id == undisturbed


def test_duplicates_and_aliases_are_replayed(tmp_path):
    def everything(out, until=None):
        out.add("a", kv(3), token_ids=ids(3))
        out.add("a again", kv(3), token_ids=ids(3))
        out.skip("gone", "empty")
        out.add("b", kv(4), token_ids=ids(4))
        out.alias("b2", "b")
        out.add("c", kv(5), token_ids=ids(5))
        if until == "c":
            out._shards.close_shard()
            out._shards._finisher._pool.shutdown(wait=True)
            raise LostError
        out.add("a last", kv(3), token_ids=ids(3))
        out.add("d", kv(6), token_ids=ids(6))

    with start(tmp_path / "at-once") as out:
        everything(out)
    with pytest.raises(LostError), start(tmp_path / "ds") as broken:
        everything(broken, until="c")
    with start(tmp_path / "ds") as again:
        assert [len(receipt.records) for receipt in again._replay._left] == [2, 1]
        everything(again)
    # The shard that was closed early stays as it is: the bytes are decided.
    first, second = read(tmp_path / "at-once"), read(tmp_path / "ds")
    assert list(first.names()) == list(second.names())
    assert [record.document for record in first] == [record.document for record in second]
    assert again.id == second.id


# -------------------------------------------------------------------------------------------------------------- replay


def test_replay_spares_the_tensors(interrupted, undisturbed):
    """What is staged needs no values; what is not says so."""
    computed = []
    with start(interrupted) as out:
        for number in range(RECORDS):
            if not out.replay(f"{number}", Document.of(ids(3 + number))):
                computed.append(number)
                out.add(f"{number}", kv(3 + number), token_ids=ids(3 + number))
    assert computed == [6, 7, 8]
    assert out.id == undisturbed == read(interrupted).id


def test_replay_of_a_stored_document_adds_a_name(tmp_path):
    with start(tmp_path / "ds") as out:
        assert not out.replay("a", Document.of(ids()))
        assert (out.num_records, out.num_names) == (0, 0)
        out.add("a", kv(), token_ids=ids())
        assert out.replay("b", Document.of(ids()))
        assert not out.replay("c", Document.of(ids(4)))
        for name, code in (("a", "E107"), ("", "E106")):
            with pytest.raises(KVFormatError) as caught:
                out.replay(name, Document.of(ids()))
            assert caught.value.code == code
    assert read(tmp_path / "ds")[0].names == ["a", "b"]


def test_replay_of_a_document_that_is_staged_later(interrupted):
    error = mismatch(interrupted, lambda out: out.replay("1", Document.of(ids(4))))
    assert "another document as record 0" in error.message


def test_replay_and_add_may_alternate_within_a_shard(interrupted, undisturbed):
    with start(interrupted) as out:
        for number in range(RECORDS):
            if number % 2 or not out.replay(f"{number}", Document.of(ids(3 + number))):
                out.add(f"{number}", kv(3 + number), token_ids=ids(3 + number))
    assert out.id == undisturbed


# ------------------------------------------------------------------------------------------------------ staged damage


def staging(location):
    [path] = (location / ".staging").iterdir()
    return path


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 5000, -1])
@pytest.mark.parametrize("how", ["add", "replay"])
def test_a_damaged_shard_is_found(interrupted, at, how):
    """Present on disk is no reason to trust it: it is hashed again."""
    shard = staging(interrupted) / "00000001.shard"
    flip(shard, at)
    with pytest.raises(kvformat.DamageError) as caught, start(interrupted) as out:
        for number in range(RECORDS):
            document = Document.of(ids(3 + number))
            if how == "add" or not out.replay(f"{number}", document):
                out.add(f"{number}", kv(3 + number), document=document)
    assert (caught.value.code, caught.value.path) == ("E116", str(shard))
    assert shard.exists()
    assert "kvformat clean" in caught.value.message
    with pytest.raises(kvformat.DatasetNotFoundError):
        kvformat.open(interrupted)


@pytest.mark.parametrize("by", [-1, 4096])
def test_a_shard_of_another_size_is_found(interrupted, by):
    shard = staging(interrupted) / "00000002.shard"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size + by)
    with pytest.raises(kvformat.DamageError) as caught:
        start(interrupted).__enter__()
    assert (caught.value.code, caught.value.path) == ("E116", str(shard))


@pytest.mark.parametrize("gone", ["00000001.shard", "00000001.json"])
def test_what_stands_behind_a_gap_is_written_again(interrupted, undisturbed, gone):
    (staging(interrupted) / gone).unlink()
    with start(interrupted) as out:
        assert out._replay.num_shards == 1
        fill(out)
    assert out.id == undisturbed == read(interrupted).id


def test_a_staged_file_with_other_content(tmp_path):
    """A receipt of the same number that says something else was made by another writer in this directory."""
    with pytest.raises(kvformat.DamageError) as caught, start(tmp_path / "ds") as out:
        fill(out, 0, 1)
        (out._staging.path / "00000000.json").write_bytes(canonical.encode({"other": 1}))
        fill(out, 1)
    assert caught.value.code == "E116"


RECEIPTS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "not-canonical": lambda data: data + b" ",
    "other-shard": lambda data: data.replace(b'"ordinal":1', b'"ordinal":2'),
    "no-records": lambda data: data[: data.index(b"[{")] + b"[]" + data[data.rindex(b"}]") + 2 :],
    "other-form": lambda data: data.replace(b'"ordinal"', b'"number"'),
}


@pytest.mark.parametrize("case", RECEIPTS)
def test_a_damaged_receipt_is_found(interrupted, case):
    receipt = staging(interrupted) / "00000001.json"
    data = RECEIPTS[case](receipt.read_bytes())
    assert data != receipt.read_bytes()
    receipt.write_bytes(data)
    with pytest.raises(kvformat.DamageError) as caught:
        start(interrupted).__enter__()
    assert (caught.value.code, caught.value.path) == ("E116", str(receipt))
    assert "kvformat clean" in caught.value.message
    assert receipt.read_bytes() == data


@pytest.mark.parametrize(
    "change",
    [
        {"record_sum": "00" * 16},
        {"record_sum": ""},
        {"dims": [7]},
        {"dims": [6, 1]},
    ],
    ids=str,
)
def test_a_receipt_of_other_records_is_found(interrupted, change):
    """Whoever replays without values would publish them otherwise."""
    path = staging(interrupted) / "00000001.json"
    receipt = canonical.decode(path.read_bytes())
    receipt["records"][1] |= change
    path.write_bytes(canonical.encode(receipt))
    with pytest.raises(kvformat.DamageError) as caught, start(interrupted) as out:
        for number in range(6):
            out.replay(f"{number}", Document.of(ids(3 + number)))
        fill(out, 6)
    assert (caught.value.code, caught.value.path) == ("E116", str(path))
    assert not (interrupted / "kvformat.json").exists()


def test_a_staging_directory_without_a_plan_is_not_taken_over(interrupted, undisturbed):
    (staging(interrupted) / "plan.json").unlink()
    with start(interrupted) as out:
        assert out._replay.num_shards == 0
        fill(out)
    assert out.id == undisturbed
    read_with_warning(interrupted)


def test_the_one_that_got_furthest_is_taken(interrupted, undisturbed):
    path = staging(interrupted)
    for number, keep in (("00000000", 1), ("ffffffff", 2)):
        other = path.with_name(path.name[:17] + number)
        shutil.copytree(path, other)
        for receipt in sorted(other.glob("0*.json"))[keep:]:
            receipt.unlink()
    with start(interrupted) as out:
        assert out._staging.path == path
        assert out._replay.num_shards == 3
        fill(out)
    assert out.id == undisturbed
    read_with_warning(interrupted)


# ----------------------------------------------------------------------------------------------------- two at a time


def test_a_live_writer_is_not_robbed(tmp_path):
    """Of two resuming writers with one plan the second is refused, and does no harm."""
    with start(tmp_path / "ds") as first:
        fill(first, 0, 5)
        for finishing in first._shards._finisher._waiting:
            finishing.result()
        before = tree(tmp_path)
        with pytest.raises(kvformat.ConflictError) as caught:
            start(tmp_path / "ds").__enter__()
        assert caught.value.code == "E117"
        assert caught.value.path == str(first._staging.path)
        assert tree(tmp_path) == before
        fill(first, 5)
    read(tmp_path / "ds")


def test_a_writer_may_be_resumed_where_it_failed(tmp_path, undisturbed):
    """In the same process: the lease was given back."""
    for last in (2, 4, 6):
        with pytest.raises(LostError), start(tmp_path / "ds") as out:
            fill(out, 0, last)
            raise LostError
    with start(tmp_path / "ds") as out:
        fill(out)
    assert out.id == undisturbed


def test_one_of_two_staging_directories_is_held(interrupted, undisturbed):
    path = staging(interrupted)
    other = path.with_name(path.name[:17] + "00000000")
    shutil.copytree(path, other)
    lease = DirectoryLease.take(min(path, other))
    try:
        with start(interrupted) as out:
            assert out._staging.path == max(path, other)
            fill(out)
    finally:
        lease.release()
    assert out.id == undisturbed


def test_a_lease_is_gone_with_its_holder(tmp_path):
    (tmp_path / "d").mkdir()
    first = DirectoryLease.take(tmp_path / "d")
    assert first.supported
    assert DirectoryLease.take(tmp_path / "d") is None
    first.release()
    first.release()
    second = DirectoryLease.take(tmp_path / "d")
    assert second is not None
    second.release()
    with pytest.raises(KVFormatError) as caught:
        DirectoryLease.take(tmp_path / "none")
    assert caught.value.code == "E002"


def test_resumed_values_are_those_of_the_first_run(tmp_path):
    """The first receipt decides the bytes: replayed records are what was staged, to the bit."""
    values = {n: {name: torch.from_numpy(value) for name, value in kv(3 + n, 5).items()} for n in range(6)}
    with pytest.raises(LostError), start(tmp_path / "ds") as out:
        for number, components in values.items():
            out.add(f"{number}", components, token_ids=ids(3 + number))
        raise LostError
    with start(tmp_path / "ds") as out:
        for number, components in values.items():
            if not out.replay(f"{number}", Document.of(ids(3 + number))):
                out.add(f"{number}", components, token_ids=ids(3 + number))
    for number, record in enumerate(read(tmp_path / "ds")):
        for name, value in values[number].items():
            assert all_bytes(record.component(name)) == all_bytes(value)
