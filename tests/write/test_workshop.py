"""Workers of one plan: first receipts count, damage costs one shard, and whoever differs is told in what."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

import kvformat
from kvformat.errors import KVFormatError, KVFormatWarning
from kvformat.storage.lease import DirectoryLease
from kvformat.testing.memory_store import MemoryStore
from kvformat.write import joining
from kvformat.write.opening import find_runs
from kvformat.write.receipt_file import decode_receipt, encode_receipt
from kvformat.write.run import differences
from kvformat.write.sealing import seal
from kvformat.write.spool_places import spools
from kvformat.write.staging import Receipt, SkippedDocument
from tests.write.place import Place
from tests.write.planning import COVERED, SmallPlan, fill, make, opened, remote, run_of, simple, work


def code_of(call, *args, **options):
    with pytest.raises(KVFormatError) as caught:
        call(*args, **options)
    return caught.value.code


# ---------------------------------------------------------------------------------------------------- making a dataset


def test_one_worker_makes_what_the_simple_writer_makes(place, plan, tmp_path):
    with place.opened(plan) as workshop:
        assert workshop.finished() == frozenset()
        assert workshop.beside == ()
        work(workshop, plan)
        assert workshop.finished() == frozenset(range(4))
        assert workshop.root() is None
        identity = seal(workshop, plan)
        workshop.remove()
    assert identity == simple(tmp_path / "simple", plan)
    assert place.whole(tmp_path).id == identity
    assert [name for name in place.names() if name.startswith(".staging")] == []
    assert not (place.directory / ".staging").exists()
    assert spools(place.spool) == []


def test_a_worker_goes_on_where_others_stopped(place, plan, tmp_path):
    with place.opened(plan, rank=1, world_size=3) as workshop:
        make(workshop, plan, [1, 3])
    with place.opened(plan) as workshop:
        assert workshop.finished() == {1, 3}
        assert workshop.check(1)
        assert workshop.check(3)
        assert not workshop.check(0)
        make(workshop, plan, [0, 2])
        identity = seal(workshop, plan)
    assert identity == simple(tmp_path / "simple", plan)
    assert place.whole(tmp_path).id == identity


def test_ten_thousand_finished_shards_are_known_by_their_names(place, monkeypatch, plan):
    """No receipt is read, and an object store is asked once for each page of names."""
    with place.opened(plan) as workshop:
        make(workshop, plan, [0])
        folder = place.receipt(plan, 0).rpartition("/")[0]
        for ordinal in range(1, 10_000):
            place.write(f"{folder}/{ordinal:08d}.json", b"unread")
            if place.kind == "local":
                place.write(f"{folder}/{ordinal:08d}-{'0' * 16}.shard", b"")
        place.store.calls.clear()
        monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
        assert workshop.finished() == frozenset(range(10_000))
        monkeypatch.undo()
        assert place.store.calls == ([("list", folder + "/")] if place.kind == "remote" else [])


def test_a_store_that_may_not_be_listed(plan, tmp_path):
    from kvformat.storage.store import DeniedFault
    from kvformat.testing.faulty_store import FaultyStore, Rule, raised

    store = MemoryStore()
    faulty = FaultyStore(store, [Rule("list", raised(lambda: DeniedFault("no")))])
    with opened(remote(faulty), plan, spool=tmp_path / "spool", keep_open=False) as workshop:
        make(workshop, plan, [0, 2])
        assert workshop.finished() == {0, 2}
        assert workshop.workers() == []
        make(workshop, plan, [1, 3])
        identity = seal(workshop, plan)
        workshop.remove()
    assert identity == simple(tmp_path / "simple", plan)
    assert [name for name in store.objects if name.startswith(".staging/") and "/worker-" not in name] == []


# ------------------------------------------------------------------------------------------------------------ receipts


@pytest.mark.parametrize("variant", [0, 1])
def test_the_first_receipt_decides(place, plan, variant):
    """A late twin is discarded, whether its bytes are equal or not; its caller is told what counts."""
    with place.opened(plan) as first, place.opened(plan) as second:
        early, late = first.begin(1), second.begin(1)
        counts = first.deliver(fill(early, plan)).result(60)
        before = [name for name in place.names() if not name.endswith(".part")]
        assert second.deliver(fill(late, plan, variant=variant)).result(60) == counts
        assert place.names() == before
        assert not early.path.exists()
        assert not late.path.exists()


@pytest.mark.parametrize("variant", [0, 1])
def test_twins_that_are_completed_side_by_side(place, plan, variant, monkeypatch):
    """Both look for a receipt before there is one: the one that creates it wins, the other keeps nothing here."""
    both = threading.Barrier(2)
    with place.opened(plan) as first, place.opened(plan) as second:
        for workshop in (first, second):
            keep = workshop._shared.keep

            def kept(path, receipt, keep=keep):
                both.wait(60)
                keep(path, receipt)
                both.wait(60)

            monkeypatch.setattr(workshop._shared, "keep", kept)
        futures = [
            first.deliver(fill(first.begin(0), plan)),
            second.deliver(fill(second.begin(0), plan, variant=variant)),
        ]
        one, other = (future.result(60) for future in futures)
        assert one == other
        kept_here = 1 if place.kind == "local" or variant == 0 else 2  # what arrived in a store is never removed
        assert len(place.shards()) == kept_here
        assert any(one.sha256[:16] in name for name in place.shards())
        assert first.check(0)


def test_a_receipt_of_other_documents_is_refused(place, plan):
    with place.opened(plan) as workshop:
        receipt = workshop.deliver(fill(workshop.begin(0), plan)).result(60)
        odd = replace(receipt, records=receipt.records[::-1])
        place.write(place.receipt(plan, 0), encode_receipt(odd, key=workshop.run.key))
        with pytest.raises(KVFormatError) as caught:
            workshop.deliver(fill(workshop.begin(0), plan)).result(60)
        assert caught.value.code == "E112"
        assert "neither stored nor skipped" in caught.value.message
        with pytest.raises(KVFormatError) as caught:
            list(workshop.receipts())
        assert caught.value.code == "E112"


def test_documents_are_those_of_the_plan_in_its_order(place, plan):
    with place.opened(plan) as workshop:
        document = plan.document(1).digest
        shard = workshop.begin(0)
        assert code_of(shard.skip, document, "not its turn") == "E112"
        assert not shard.path.exists()
        assert code_of(shard.skip, plan.document(0).digest, "gone") == "E115"
        shard = fill(workshop.begin(0), plan)
        assert code_of(shard.skip, document, "one too many") == "E112"
        shard = fill(workshop.begin(0), plan, stop=1)
        assert code_of(workshop.deliver, shard) == "E115"
        assert not shard.path.exists()
        assert code_of(workshop.begin, 4) == "E081"
        assert code_of(workshop.begin, -1) == "E081"
        for reason in ("", 7, "\udc80"):
            assert code_of(workshop.begin(1).skip, plan.document(2).digest, reason) == "E081"
        assert place.shards() == []


def test_one_shard_is_begun_once_by_a_worker(place, plan):
    with place.opened(plan) as workshop:
        shard = workshop.begin(0)
        assert code_of(workshop.begin, 0) == "E115"
        shard.discard()
        workshop.begin(0)


def test_a_shard_without_records_is_finished_and_not_published(place, plan, tmp_path):
    """Work goes on after it; sealing names it, with skips allowed too, and a run that allows none tries it again."""
    with place.opened(plan) as workshop:
        shard = fill(workshop.begin(1), plan, skip=[2, 3])
        receipt = workshop.deliver(shard).result(60)
        assert receipt == Receipt.without_records(1, receipt.skipped)
        assert [one.reason for one in receipt.skipped] == ["record 2 is odd", "record 3 is odd"]
        assert (receipt.size, receipt.records, receipt.sha256) == (0, (), hashlib.sha256(b"").hexdigest())
        assert not shard.path.exists()
        assert place.shards() == []
        assert workshop.finished() == {1}
        make(workshop, plan, [0, 2, 3])
        assert [None if one is None else one.size > 0 for _, one in workshop.receipts()] == [True, False, True, True]
        for allow_skips in (False, True):
            with pytest.raises(kvformat.ConflictError) as caught:
                seal(workshop, plan, allow_skips=allow_skips)
            assert caught.value.code == "E119"
            for said in (
                "1 shard holds no record",
                "skipped: 1, with 'clip-2' (record 2 is odd); 'alias-of-2' (record 2 is odd); 'clip-3' (record 3 is",
                "not even where skips are allowed",
                "without allowing skips, which tries these documents again, or plan again without them",
            ):
                assert said in caught.value.message, caught.value.message
        assert caught.value.record == "clip-2"
        assert workshop.root() is None
    with place.opened(plan) as workshop:
        assert workshop.finished() == frozenset(range(4))
        assert workshop.check(1)
        assert not workshop.check(1, allow_skips=False)
        assert not workshop.check(1)
        assert workshop.finished() == {0, 2, 3}
        assert not [name for name in place.names() if name.endswith((".skipped", ".bad"))]
        make(workshop, plan, [1])
        assert seal(workshop, plan) == simple(tmp_path / "simple", plan)
        workshop.remove()
    assert not [name for name in place.names() if name.startswith(".staging")]


def test_missing_shards_are_named_before_those_without_records(place, plan):
    with place.opened(plan) as workshop:
        make(workshop, plan, [0, 1], skip=[2, 3])
        with pytest.raises(kvformat.ConflictError, match=r"2 of 4 shards are missing, with 3 records: 2, 3;"):
            seal(workshop, plan, allow_skips=True)


@pytest.mark.parametrize("first", ["records", "none"])
def test_twins_one_of_which_has_no_records(place, plan, first):
    with place.opened(plan) as one, place.opened(plan) as other:
        early, late = one.begin(1), other.begin(1)
        skips = ([], [2, 3]) if first == "records" else ([2, 3], [])
        counts = one.deliver(fill(early, plan, skip=skips[0])).result(60)
        assert counts.is_empty == (first == "none")
        assert other.deliver(fill(late, plan, skip=skips[1])).result(60) == counts
        assert other.finished() == {1}
        assert other.check(1)
        assert len(place.shards()) == (1 if first == "records" else 0)


def test_a_receipt_without_records_alone_is_not_trusted(plan, tmp_path):
    """Its mark is durable before it; a mark without a receipt is swept, and keeps nothing out."""
    place = Place("local", tmp_path)
    with place.opened(plan) as workshop:
        make(workshop, plan, [1], skip=[2, 3])
        (mark,) = [name for name in place.names() if name.endswith(".skipped")]
        place.delete(mark)
        assert workshop.finished() == frozenset()
        with pytest.warns(KVFormatWarning, match="W006"):
            make(workshop, plan, [1], skip=[2, 3])
        assert workshop.finished() == {1}
        place.delete(place.receipt(plan, 1))
        assert workshop.finished() == frozenset()
    with place.opened(plan) as workshop:
        assert mark not in place.names()
        make(workshop, plan, range(4))
        assert len(place.shards()) == 4


def test_what_another_worker_made_without_records_meanwhile_stays(place, plan, monkeypatch):
    """Only the receipt that was looked at goes, and what belongs to it."""
    with place.opened(plan) as workshop, place.opened(plan) as other:
        make(workshop, plan, [1], skip=[2, 3])
        set_aside = workshop._shared.set_aside

        def then_made(*args):
            set_aside(*args)
            make(other, plan, [1], skip=[2, 3])

        monkeypatch.setattr(workshop._shared, "set_aside", then_made)
        assert not workshop.check(1, allow_skips=False)
        assert workshop.finished() == {1}
        assert workshop.check(1)


def test_a_receipt_without_records_is_of_this_very_form(plan):
    skipped = tuple(SkippedDocument(document=f"{n:064}", reason="odd") for n in range(2))
    receipt = Receipt.without_records(3, skipped)
    assert decode_receipt(encode_receipt(receipt, key="k"), key="k", ordinal=3, path="") == receipt
    for odd in (replace(receipt, skipped=()), replace(receipt, size=1), replace(receipt, sha256="0" * 64)):
        data = encode_receipt(odd, key="k")
        assert code_of(decode_receipt, data, key="k", ordinal=3, path="") == "E116"


def test_finished_shards_without_records_are_known_by_their_names(place, plan, monkeypatch):
    with place.opened(plan) as workshop:
        make(workshop, plan, [1], skip=[2, 3])
        monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
        assert workshop.finished() == {1}


# ------------------------------------------------------------------------------------------------- looking at it again


def damaged(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_damaged_shard_costs_itself_alone(plan, tmp_path):
    place = Place("local", tmp_path)
    with place.opened(plan) as workshop:
        make(workshop, plan, range(4))
    name = place.shards()[2]
    data = place.read(name)
    place.write(name, damaged(data))
    with place.opened(plan) as workshop:
        with pytest.warns(KVFormatWarning, match=r"W006.*shard 2 is set aside.*damaged") as warned:
            assert not workshop.check(2)
        assert warned[0].message.path == str(workshop.place)
        assert workshop.finished() == {0, 1, 3}
        assert place.read(f"{name}.bad") == damaged(data)
        assert all(workshop.check(ordinal) for ordinal in (0, 1, 3))
        make(workshop, plan, [2])
        assert place.read(name) == data
        assert seal(workshop, plan) == simple(tmp_path / "simple", plan)
        workshop.remove()
    assert not (place.directory / ".staging").exists()
    place.whole(tmp_path)


@pytest.mark.parametrize(
    "how", ["shard missing", "shard short", "receipt cut", "receipt of another", "receipt flipped"]
)
def test_a_fault_of_one_shard_is_found_by_every_look(place, plan, tmp_path, how):
    with place.opened(plan) as workshop:
        make(workshop, plan, range(4))
        shard, receipt = place.shards()[1], place.receipt(plan, 1)
        good = place.read(shard)
        change = {
            "shard missing": lambda: place.delete(shard),
            "shard short": lambda: place.write(shard, good[:-1]),
            "receipt cut": lambda: place.write(receipt, place.read(receipt)[:-1]),
            "receipt of another": lambda: place.write(receipt, place.read(place.receipt(plan, 0))),
            "receipt flipped": lambda: place.write(receipt, place.read(receipt).replace(b'"size":', b'"size":1')),
        }[how]
        before = place.read(receipt)
        change()
        with pytest.warns(KVFormatWarning, match="W006"):
            assert not workshop.check(1)
        assert workshop.finished() == {0, 2, 3}
        place.write(receipt, before)
        place.write(shard, good)
        assert workshop.check(1)
        change()
        if how == "shard missing" and place.kind == "local":
            assert workshop.finished() == {0, 2, 3}
        with pytest.warns(KVFormatWarning, match="W006"):
            assert [receipt is None for _, receipt in workshop.receipts()] == [False, True, False, False]
        place.write(receipt, before)
        place.write(shard, good)
        change()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert code_of(seal, workshop, plan) == "E119"
        seen_in_names = how == "shard missing" and place.kind == "local"
        assert [one.message.code for one in warned] == ([] if seen_in_names else ["W006"])
        if how == "shard short" and place.kind == "remote":
            place.delete(shard)  # a store's object under a final name is nobody's to replace
        with pytest.warns(KVFormatWarning) if seen_in_names else contextlib.nullcontext():
            make(workshop, plan, [1])
        assert seal(workshop, plan) == simple(tmp_path / "simple", plan)


def test_a_late_twin_takes_the_place_of_what_is_damaged(place, plan):
    """A receipt that cannot be read does not keep a good shard out."""
    with place.opened(plan) as workshop:
        make(workshop, plan, [0])
        place.write(place.receipt(plan, 0), b"{")
        with pytest.warns(KVFormatWarning, match="W006"):
            receipt = workshop.deliver(fill(workshop.begin(0), plan)).result(60)
        data = place.read(place.receipt(plan, 0))
        assert decode_receipt(data, key=workshop.run.key, ordinal=0, path="") == receipt
        assert workshop.check(0)


def test_what_several_find_damaged_one_sets_aside(plan, tmp_path):
    """The second must not set aside what was made again meanwhile."""
    place = Place("local", tmp_path)
    with place.opened(plan) as first, place.opened(plan) as second:
        make(first, plan, [0])
        (shard,) = place.shards()
        place.write(shard, damaged(place.read(shard)))
        found = second._shared.read(0)
        with pytest.warns(KVFormatWarning, match="W006"):
            assert not first.check(0)
        odd = first.deliver(fill(first.begin(0), plan, variant=1)).result(60)
        second._shared.set_aside(0, found, decode_receipt(found, key=first.run.key, ordinal=0, path=""))
        assert second.check(0)
        assert second.deliver(fill(second.begin(0), plan)).result(60) == odd


def test_a_shard_left_without_a_receipt_is_not_trusted(plan, tmp_path, monkeypatch):
    """Killed between the two: whatever stands under the name is hashed before it is used."""
    place = Place("local", tmp_path)
    with place.opened(plan) as workshop:
        make(workshop, plan, [0, 1])
        names = place.shards()
        good = [place.read(name) for name in names]
        for ordinal in (0, 1):
            place.delete(place.receipt(plan, ordinal))
        place.write(names[1], damaged(good[1]))
        assert workshop.finished() == frozenset()
        make(workshop, plan, [0, 1])
        assert [place.read(name) for name in names] == good
        assert place.read(f"{names[1]}.bad") == damaged(good[1])
        assert workshop.check(0)
        assert workshop.check(1)


# --------------------------------------------------------------------------------------------------------------- skips


def test_skipped_documents_are_listed_where_that_is_allowed(place, plan, tmp_path):
    with place.opened(plan) as workshop:
        make(workshop, plan, range(4), skip=[2, 5])
        receipt = workshop._receipts.counting(1)
        assert receipt.skipped == (SkippedDocument(document=plan.document(2).digest.hex(), reason="record 2 is odd"),)
        with pytest.raises(kvformat.ConflictError) as caught:
            seal(workshop, plan)
        assert caught.value.code == "E119"
        for said in ("3 names", "'clip-2' (record 2 is odd)", "'alias-of-2'", "'clip-5'", "--allow-skips"):
            assert said in caught.value.message
        assert caught.value.record == "clip-2"
        assert workshop.root() is None
        identity = seal(workshop, plan, allow_skips=True)
        workshop.remove()
    dataset = place.whole(tmp_path)
    assert dataset.id == identity
    assert [(one.input, one.name, one.reason) for one in dataset.manifest.skipped] == [
        (2, "clip-2", "record 2 is odd"),
        (5, "clip-5", "record 5 is odd"),
        (7, "alias-of-2", "record 2 is odd"),
        (8, "empty", "no tokens"),
    ]
    assert dict(dataset.names()) == {"clip-0": 0, "clip-1": 1, "clip-3": 2, "clip-4": 3, "clip-6": 4}
    assert dataset["clip-3"].extra("token_ids").tolist() == plan.document(3).token_ids.tolist()


def test_what_was_skipped_is_tried_again_on_request(place, plan, tmp_path):
    with place.opened(plan) as workshop:
        make(workshop, plan, range(4), skip=[2])
    with place.opened(plan) as workshop:
        assert workshop.check(1)
        assert workshop.check(0, allow_skips=False)
        assert not workshop.check(1, allow_skips=False)
        assert workshop.finished() == {0, 2, 3}
        assert len(place.shards()) == (
            3 if place.kind == "local" else 4
        )  # what is in a store under a final name stays
        make(workshop, plan, [1])
        assert seal(workshop, plan) == simple(tmp_path / "simple", plan)


# --------------------------------------------------------------------------------------------------- who may take part


def test_a_worker_of_another_run_is_told_in_what_it_differs(place, plan):
    with place.opened(plan) as workshop:
        make(workshop, plan, [0])
        before = place.names()
        for changes, covered, said in [
            ({"provenance": {"variant": "1"}}, COVERED, ["provenance.variant ('1' here, '0' there)"]),
            ({"provenance": {}}, COVERED, ["provenance.variant (absent here, '0' there)"]),
            ({"text": kvformat.Text(special_tokens=True)}, COVERED, ["text.special_tokens (True here, absent there)"]),
            ({}, {**COVERED, "notes": b"others"}, ["files.notes ('", "' here, '", "' there)"]),
            ({}, {"notes": COVERED["notes"]}, ["files.tokenizer (absent here, '"]),
        ]:
            with pytest.raises(kvformat.IdentityError) as caught:
                place.opened(plan, changes=changes, covered=covered)
            assert caught.value.code == "E120"
            assert all(one in caught.value.message for one in said), caught.value.message
        assert place.names() == before
        assert len(spools(place.spool)) == (0 if place.kind == "local" else 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            '{"device":"cuda","threads":4}',
            '{"device":"cpu","threads":8}',
            ["tag.device ('cuda' here, 'cpu' there)", "tag.threads (4 here, 8 there)"],
        ),
        (
            '{"tag":"{\\"device\\":\\"cuda\\"}","values":"ab"}',
            '{"tag":"{\\"device\\":\\"cpu\\"}","values":"cd"}',
            ["tag.device ('cuda' here, 'cpu' there)", "tag.values ('ab' here, 'cd' there)"],
        ),
        (
            '{"tag":"mine","values":"ab"}',
            '{"tag":"","values":"ab"}',
            ["tag.tag ('mine' here, '' there)"],
        ),
        (
            '{"tag":"{}","values":"ab"}',
            "x",
            [
                "tag (absent here, 'x' there)",
                "tag.tag ('{}' here, absent there)",
                "tag.values ('ab' here, absent there)",
            ],
        ),
        ('{"tag":"{\\"a\\":1}"}', '{"a":1}', ['tag (\'{"tag":"{\\\\"a\\\\":1}"}\' here, \'{"a":1}\' there)']),
        ("[1]", "{ }", ["tag ('[1]' here, '{ }' there)"]),
        ("{}", "", ["tag ('{}' here, '' there)"]),
    ],
)
def test_the_members_of_tags_are_named(plan, ours, theirs, said):
    found = differences(run_of(plan, tag=ours), run_of(plan, tag=theirs))
    assert [one for one in found if one.startswith("tag")] == said
    assert len([one for one in found if not one.startswith("tag")]) == 0
    assert differences(run_of(plan, tag=ours), run_of(plan, tag=ours)) == []


def test_a_plan_is_the_one_of_the_run(place, plan):
    other = SmallPlan(first_id=1)
    with pytest.raises(kvformat.IdentityError) as caught:
        opened_with(place, plan, other)
    assert caught.value.code == "E120"
    with place.opened(plan) as workshop:
        assert code_of(seal, workshop, other) == "E120"


def opened_with(place, plan, other):
    from kvformat.write.opening import open_workshop

    return open_workshop(place.target, run_of(plan), other, covered=COVERED, spool=place.spool)


def test_covered_files_that_mean_the_same(place, plan, tmp_path):
    """The first worker's count; whoever says that its own mean the same may take part."""
    asked = []

    def same_file(label, theirs, ours):
        asked.append((label, theirs, ours))
        return label == "notes" and theirs.lower() == ours.lower()

    with place.opened(plan) as first:
        mine = {**COVERED, "notes": b"MADE BY A TEST"}
        with place.opened(plan, covered=mine, same_file=same_file) as second:
            assert asked == [("notes", COVERED["notes"], mine["notes"])]
            assert second.run == first.run
            assert second.covered == COVERED
            make(second, plan, range(4))
            assert seal(second, plan) == simple(tmp_path / "simple", plan)
        with pytest.raises(kvformat.IdentityError):
            place.opened(plan, covered={**COVERED, "notes": b"others"}, same_file=same_file, published=True)


@pytest.mark.parametrize("left", ["receipt", "worker", "nothing"])
def test_work_of_another_run_of_the_plan(place, plan, tmp_path, left):
    """Workers would make two datasets without noticing: refused. A single one begins anew beside what is left."""
    other = place.opened(plan, changes={"tag": "cuda"})
    if left == "receipt":
        make(other, plan, [0])
    if left != "worker":
        other.close()
    try:
        if left == "nothing":
            with place.opened(plan, rank=1, world_size=2) as workshop:
                assert workshop.beside == ()
            return
        before = place.names()
        with pytest.raises(kvformat.IdentityError) as caught:
            place.opened(plan, rank=1, world_size=2)
        assert caught.value.code == "E120"
        assert "tag ('' here, 'cuda' there)" in caught.value.message
        assert place.names() == before
        if left == "worker":  # two datasets are two, however many workers each has
            with pytest.raises(kvformat.IdentityError) as caught:
                place.opened(plan)
            assert caught.value.code == "E120"
            assert place.names() == before
            return
        with place.opened(plan) as workshop:
            (beside,) = workshop.beside
            assert beside.same_plan
            assert beside.differences == ("tag ('' here, 'cuda' there)",)
            assert (beside.num_finished, beside.num_alive) == (1, 0)
            assert workshop.finished() == frozenset()
            work(workshop, plan)
            assert seal(workshop, plan) == simple(tmp_path / "simple", plan)
    finally:
        other.close()


def test_abandoned_work_of_another_plan_is_nobody_elses_business(place, plan):
    with place.opened(SmallPlan(first_id=5)) as other:
        make(other, SmallPlan(first_id=5), [0])
    with place.opened(plan, rank=1, world_size=2) as workshop:
        (beside,) = workshop.beside
        assert (beside.same_plan, beside.num_finished, beside.num_alive) == (False, 1, 0)
        assert workshop.finished() == frozenset()


@pytest.mark.parametrize("phase", ["start", "seal"])
def test_another_plan_that_is_being_made_is_refused(place, plan, phase):
    """At once, and nothing is left of who was refused."""
    other = SmallPlan(first_id=5)
    with place.opened(other, rank=1, world_size=2) as workshop:
        make(workshop, other, [0])
        before = place.names()
        with pytest.raises(kvformat.ConflictError) as caught:
            place.opened(plan, phase=phase)
        assert caught.value.code == "E117"
        who = f"worker 1 of 2 ({workshop.state.host}, pid {os.getpid()})"
        remedy = "wait for it to end, or stop it, and run this again; or choose another location"
        for said in (other.digest[:16], plan.digest[:16], f"{who} is at work: {remedy}"):
            assert said in caught.value.message, caught.value.message
        assert place.names() == before
        assert len(spools(place.spool)) == (0 if place.kind == "local" else 1)
        with place.opened(other) as second:
            assert second.finished() == {0}
    with place.opened(plan):
        pass


def test_a_worker_that_may_have_been_killed_elsewhere_blocks_for_a_while_that_is_told(place, plan, monkeypatch):
    """Nobody can ask it: neither who runs another plan, nor who wants to clean."""
    other = SmallPlan(first_id=5)
    with place.opened(other) as workshop:
        make(workshop, other, [0])
        state = replace(workshop.state, host="elsewhere", pid=7)
        spoken = f".staging/{workshop.run.key}{'' if place.kind == 'remote' else '-workers'}/{state.name}"
    place.write(spoken, state.encode())
    for ahead, seconds in ((40.0, 261), (299.0, 2)):
        clock = lambda ahead=ahead: state.updated + ahead  # noqa: E731
        monkeypatch.setattr("kvformat.write.local_workers.time", SimpleNamespace(time=clock))
        monkeypatch.setattr("kvformat.write.remote_workers.time", SimpleNamespace(time=clock))
        with pytest.raises(kvformat.ConflictError) as caught:
            place.opened(plan, clock=clock)
        assert (
            f"its worker 0 of 1 (elsewhere, pid 7) was heard of {ahead:.0f} s ago, and whether it still runs cannot "
            "be told from here: where it does, wait for it to end, or stop it; where it was killed, it counts as gone "
            f"300 s after its last word: run this again in {seconds} s; or choose another location"
        ) in caught.value.message
    later = lambda: state.updated + 301.0  # noqa: E731
    monkeypatch.setattr("kvformat.write.local_workers.time", SimpleNamespace(time=later))
    monkeypatch.setattr("kvformat.write.remote_workers.time", SimpleNamespace(time=later))
    with place.opened(plan, clock=later):
        pass


@pytest.mark.parametrize("earlier", ["this", "other"])
def test_of_two_plans_that_begin_at_once_the_first_one_stays(place, plan, monkeypatch, earlier):
    """Neither saw the other when it looked first."""
    from kvformat.write import opening as module

    other, real, inner = SmallPlan(first_id=5), module.find_runs, []
    started = {"this": 1000.0, "other": 1001.0} if earlier == "this" else {"this": 1001.0, "other": 1000.0}

    def find(target, **options):
        found = real(target, **options)
        if not inner:
            inner.append(None)
            inner[0] = place.opened(other, clock=lambda: started["other"])
        return found

    monkeypatch.setattr(module, "find_runs", find)
    if earlier == "this":
        with place.opened(plan, clock=lambda: started["this"]) as workshop:
            make(workshop, plan, [0])
    else:
        assert code_of(place.opened, plan, clock=lambda: started["this"]) == "E117"
    inner[0].close()


def test_plans_that_begin_at_once_are_not_both_refused(place, plan, monkeypatch):
    """Both look, then both speak, then both look again, and neither leaves before the other has decided."""
    from kvformat.write import opening as module

    both, real, results = threading.Barrier(2), module.refuse_other_plans, []
    shared = module.LocalShared if place.kind == "local" else module.RemoteShared
    found = shared.found

    def refuse(*args, **options):
        real(*args, **options)
        if options["since"] is None:
            both.wait(60)

    def look(self):
        both.wait(60)
        seen = found(self)
        both.wait(60)
        return seen

    def begin(one):
        workshop = None
        try:
            workshop = place.opened(one)
            results.append(None)
        except KVFormatError as error:
            results.append(error.code)
        both.wait(60)
        if workshop is not None:
            workshop.close()

    monkeypatch.setattr(module, "refuse_other_plans", refuse)
    monkeypatch.setattr(shared, "found", look)
    threads = [threading.Thread(target=begin, args=(one,)) for one in (plan, SmallPlan(first_id=5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results, key=str) == ["E117", None]


def test_a_published_dataset_is_no_workshop(place, plan):
    with place.opened(plan) as workshop:
        work(workshop, plan)
        seal(workshop, plan)
        workshop.remove()
    before = place.names()
    with pytest.raises(kvformat.DatasetExistsError) as caught:
        place.opened(plan)
    assert caught.value.code == "E100"
    assert place.names() == before


def test_a_dataset_published_while_a_worker_begins(place, plan, monkeypatch):
    """The last ones left after it had looked, and took the staging with them."""
    from kvformat.write import opening as module

    real, times = module._require_free, []

    def require_free(target):
        times.append(target)
        if len(times) > 1:
            real(target)
            return
        real(target)
        with place.opened(plan) as first:
            work(first, plan)
            seal(first, plan)
            first.remove()

    monkeypatch.setattr(module, "_require_free", require_free)
    with pytest.raises(kvformat.DatasetExistsError):
        place.opened(plan)
    assert len(times) == 4  # twice by each
    assert not [name for name in place.names() if name.startswith(".staging")]
    assert spools(place.spool) == []


def test_arguments_that_make_no_sense(place, plan):
    for rank, world_size in [(1, 1), (-1, 2), (0, 0)]:
        assert code_of(place.opened, plan, rank=rank, world_size=world_size) == "E081"
    with pytest.raises(kvformat.FormatError):
        place.opened(plan, covered={"Not a label": b""})
    assert place.names() == []


def test_a_run_that_cannot_be_read(place, plan):
    with place.opened(plan):
        pass
    name = place.receipt(plan, 0).rpartition("/")[0] + "/run.json"
    place.write(name, b"{}")
    assert code_of(place.opened, plan) == "E116"
    assert place.read(name) == b"{}"


# --------------------------------------------------------------------------------------------- who is at work, leaving


def test_workers_say_how_they_get_on(place, plan):
    now = [1000.0]
    with place.opened(plan, rank=2, world_size=4, clock=lambda: now[0]) as workshop, place.opened(plan) as other:
        second, first = workshop.workers()[::-1]
        assert (first.state.rank, first.state.phase, first.liveness) == (0, "start", "live")
        state = second.state
        assert (state.rank, state.world_size, state.pid, second.liveness) == (2, 4, os.getpid(), "live")
        assert (state.started, state.updated) == (1000.0, 1000.0)
        now[0] = 1000.5
        workshop.report(replace(workshop.state, phase="work", shard=3, nbytes=10))
        assert workshop.workers()[1].state.shard == 3
        workshop.report(replace(workshop.state, nbytes=11))  # too soon to be passed on
        assert workshop.workers()[1].state.nbytes == 10
        workshop._beat()
        assert workshop.workers()[1].state.nbytes == 10
        now[0] = 1060.0
        workshop._beat()
        assert (workshop.workers()[1].state.nbytes, workshop.workers()[1].state.updated) == (11, 1060.0)
        (run,) = find_runs(place.target, spool=place.spool)
        assert (run.run, run.num_finished, len(run.workers)) == (workshop.run, 0, 2)
        other.close()
        assert [worker.state.rank for worker in workshop.workers()] == [2]
        before = workshop.state
    assert before.rank == 2
    assert find_runs(place.target, spool=place.spool)[0].workers == ()


def test_the_last_one_out_removes_the_staging(place, plan):
    first, second = place.opened(plan), place.opened(plan)
    work(first, plan)
    seal(first, plan)
    first.remove()
    assert [name for name in place.names() if name.startswith(".staging")]
    assert second.finished() == frozenset(range(4))
    assert second.root() is not None
    second.remove()
    assert [name for name in place.names() if name.startswith(".staging")] == []
    second.close()
    assert spools(place.spool) == []


def test_what_is_not_published_is_never_removed(place, plan):
    with place.opened(plan) as workshop:
        make(workshop, plan, [0])
        workshop.remove()
    with place.opened(plan) as workshop:
        assert workshop.finished() == {0}


def test_a_directory_that_is_removed_while_it_is_joined(plan, tmp_path, monkeypatch):
    """Opened, then gone and made again by others before the lease was had: that lease is of nothing."""
    place = Place("local", tmp_path)
    real, seen = DirectoryLease.take, []

    def take(path, *, shared=False):
        lease = real(path, shared=shared)
        if shared and not seen:
            seen.append(path)
            path.rmdir()
            path.mkdir()
        return lease

    monkeypatch.setattr(DirectoryLease, "take", take)
    with place.opened(plan) as workshop:
        assert real(workshop.place) is None
        make(workshop, plan, [0])
        assert workshop.finished() == {0}
    assert len(seen) == 1


def test_clean_keeps_workers_out(plan, tmp_path, monkeypatch):
    place = Place("local", tmp_path)
    with place.opened(plan) as workshop:
        path = workshop.place
    monkeypatch.setattr(joining, "BUSY_TIMEOUT_S", 0.0)
    lease = DirectoryLease.take(path)
    assert code_of(place.opened, plan) == "E117"
    lease.release()
    with place.opened(plan):
        assert DirectoryLease.take(path) is None


def test_an_interrupt_leaves_what_is_finished(place, plan):
    with pytest.raises(KeyboardInterrupt), place.opened(plan) as workshop:
        make(workshop, plan, [0])
        fill(workshop.begin(1), plan, stop=1)
        raise KeyboardInterrupt
    assert [name for name in place.names() if name.endswith(".part")] == []
    assert spools(place.spool) == []
    with place.opened(plan) as workshop:
        assert workshop.finished() == {0}


def test_an_error_lets_complete_shards_arrive(place, plan, monkeypatch):
    class LostError(Exception):
        pass

    go = threading.Event()
    with pytest.raises(LostError), place.opened(plan) as workshop:
        keep = workshop._shared.keep

        def kept(path, receipt):
            assert go.wait(60)
            keep(path, receipt)

        monkeypatch.setattr(workshop._shared, "keep", kept)
        for ordinal in range(3):
            workshop.deliver(fill(workshop.begin(ordinal), plan))
        threading.Timer(0, go.set).start()
        raise LostError
    with place.opened(plan) as workshop:
        assert workshop.finished() == {0, 1, 2}


def test_a_worker_that_is_stopped_delivers_no_more(plan, tmp_path):
    """Nobody waits for an upload that nobody wants."""
    place = Place("remote", tmp_path)
    with place.opened(plan) as workshop:
        make(workshop, plan, [0])
        workshop.stop()
        with pytest.raises(KVFormatError) as caught:
            workshop.deliver(fill(workshop.begin(1), plan)).result(60)
        assert caught.value.code == "E115"
        assert workshop.finished() == {0}
    assert workshop._shared._patience.finished.is_set()
    place.close()


def test_without_leases_workers_are_known_by_what_they_say(plan, tmp_path, monkeypatch):
    """On such a file system the last one out is the one that finds no other's word, or only old ones."""
    import errno
    import fcntl

    def fail(fd, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    place = Place("local", tmp_path)
    first, second = place.opened(plan), place.opened(plan)
    assert [worker.liveness for worker in first.workers()] == ["unknown", "unknown"]
    work(first, plan)
    seal(first, plan)
    first.remove()
    assert second.finished() == frozenset(range(4))
    second.report(replace(second.state, phase="seal"))
    state = second._shared._said.path
    state.write_bytes(replace(second.state, updated=second.state.updated - 301).encode())
    third = place.opened(plan, published=True)
    assert [worker.liveness for worker in third.workers()] == ["unknown"]  # the stale one was swept
    third.remove()
    assert not (place.directory / ".staging").exists()
