"""Sealing: all of the plan or nothing, by anyone, any number of times."""

from __future__ import annotations

import gc
import threading

import pytest
from msgspec.structs import replace

import kvformat
from kvformat.errors import KVFormatError
from kvformat.storage.remote import Remote
from kvformat.testing.memory_store import MemoryStore
from kvformat.write import opening, sealing
from kvformat.write.attach import attach_workshop
from kvformat.write.opening import find_runs
from kvformat.write.receipt_file import encode_receipt
from kvformat.write.sealing import seal
from kvformat.write.shared_receipts import SharedReceipts
from kvformat.write.staging import Receipt
from kvformat.write.workshop import Workshop
from tests.write.planning import COVERED, SmallPlan, fill, make, opened, remote, run_of, simple, work


@pytest.fixture(params=["local", "remote"])
def target(request, tmp_path):
    if request.param == "local":
        yield tmp_path / "ds"
        return
    target = remote(MemoryStore())
    yield target
    target.close()


@pytest.fixture
def options(tmp_path):
    return {"spool": tmp_path / "spool"}


def test_what_is_missing_is_counted_and_named(target, options, plan):
    with opened(target, plan, **options) as workshop:
        make(workshop, plan, [1])
        with pytest.raises(kvformat.ConflictError) as caught:
            seal(workshop, plan)
        assert caught.value.code == "E119"
        assert "3 of 4 shards are missing, with 5 records: 0, 2, 3;" in caught.value.message
        assert "run the workers of this plan again" in caught.value.message
        assert workshop.root() is None


def test_beside_live_workers_nobody_is_told_to_run_them(target, options, plan):
    with opened(target, plan, rank=1, world_size=3, **options) as workshop:
        make(workshop, plan, [1])
        for count in ("1 worker is", "2 workers are"):
            with attach_workshop(target, plan, **options) as sealer, pytest.raises(kvformat.ConflictError) as caught:
                seal(sealer, plan)
            assert caught.value.code == "E119"
            assert f"3 of 4 shards are missing, with 5 records: 0, 2, 3; {count} at work" in caught.value.message
            assert "wait" in caught.value.message
            assert "run the workers" not in caught.value.message
            if count == "1 worker is":
                second = opened(target, plan, rank=2, world_size=3, **options)
        second.close()
    with (
        attach_workshop(target, plan, **options) as sealer,
        attach_workshop(target, plan, **options),  # who seals makes nothing
        pytest.raises(kvformat.ConflictError, match="run the workers of this plan again"),
    ):
        seal(sealer, plan)


def test_a_worker_that_loads_its_model_is_at_work_on_nothing_yet(target, options, plan):
    with opened(target, plan, rank=1, world_size=2, **options) as workshop:
        make(workshop, plan, [1])
        workshop.report(replace(workshop.state, phase="load"))
        with attach_workshop(target, plan, **options) as sealer, pytest.raises(kvformat.ConflictError) as caught:
            seal(sealer, plan)
        assert caught.value.code == "E119"
        assert "run the workers of this plan again" in caught.value.message


def test_many_missing_ones_are_not_all_named(tmp_path):
    plan = SmallPlan(60)
    with opened(tmp_path / "ds", plan) as workshop, pytest.raises(kvformat.ConflictError) as caught:
        seal(workshop, plan)
    assert "30 of 30 shards are missing, with 60 records: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...;" in caught.value.message


def test_sealed_twice_is_the_same(target, options, plan):
    with opened(target, plan, **options) as workshop:
        work(workshop, plan)
        first = seal(workshop, plan)
        assert seal(workshop, plan) == first
        with attach_workshop(target, plan, **options) as other:
            assert seal(other, plan) == first
            other.remove()
        workshop.remove()


def test_sealers_at_once(target, options, plan, tmp_path):
    """All of them are told the same."""
    with opened(target, plan, **options) as workshop:
        work(workshop, plan)
        together, found = threading.Barrier(4), []

        def one():
            with attach_workshop(target, plan, **options) as other:
                together.wait(60)
                found.append(seal(other, plan))

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [simple(tmp_path / "simple", plan)] * 4


def test_a_worker_that_races_the_seal(target, options, plan, tmp_path):
    """It makes a shard again while another seals and leaves: its own is discarded, and what is published is whole."""
    with opened(target, plan, **options) as slow:
        late = slow.begin(3)
        with opened(target, plan, **options) as fast:
            work(fast, plan)
            identity = seal(fast, plan)
            fast.remove()
        receipt = slow.deliver(fill(late, plan, variant=1)).result(60)
        assert receipt == slow._receipts.counting(3)
        assert slow.root() is not None
        assert seal(slow, plan) == identity
        slow.remove()
    if not isinstance(target, Remote):
        assert kvformat.verify(target).id == identity
        assert not (target / ".staging").exists()


def test_another_dataset_was_published_meanwhile(target, options, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "work_beside", lambda *_: ())  # as where one cannot see the other
    with opened(target, plan, **options) as workshop:
        work(workshop, plan)
        with opened(target, plan, changes={"tag": "x", "provenance": {"variant": "1"}}, **options) as other:
            work(other, plan, variant=1)
            seal(other, plan)
        with pytest.raises(kvformat.ConflictError) as caught:
            seal(workshop, plan)
        assert caught.value.code == "E113"


def test_a_receipt_of_other_documents_is_refused(tmp_path, plan):
    with opened(tmp_path / "ds", plan) as workshop:
        work(workshop, plan)
        receipt = workshop._receipts.counting(2)
        path = workshop.place / "00000002.json"
        path.write_bytes(encode_receipt(replace(receipt, records=receipt.records[::-1]), key=workshop.run.key))
        with pytest.raises(kvformat.ConflictError) as caught:
            seal(workshop, plan)
        assert caught.value.code == "E112"
        assert "shard 2" in caught.value.message


def test_an_interrupted_seal_is_begun_again_with_other_shards(tmp_path, plan, monkeypatch):
    """What it left in staging is of the shards there were: it must not be in the way."""
    with opened(tmp_path / "ds", plan) as workshop:
        make(workshop, plan, range(4), variant=1)
        link = workshop._shared._files.link

        def refuse(source, target):
            if target.name == "kvformat.json":
                raise KeyboardInterrupt
            return link(source, target)

        monkeypatch.setattr(workshop._shared._files, "link", refuse)
        with pytest.raises(KeyboardInterrupt):
            seal(workshop, plan)
        monkeypatch.undo()
        for ordinal in range(4):
            workshop._shared.set_aside(ordinal, workshop._shared.read(ordinal), None)
        make(workshop, plan, range(4))
        assert seal(workshop, plan) == simple(tmp_path / "simple", plan)


def test_receipts_are_not_kept_in_memory(tmp_path, monkeypatch):
    """A few are read ahead; when the tables are complete, none is left."""
    plan = SmallPlan(400)
    read, added, ahead, kept = [0], [0], [], []
    with opened(tmp_path / "ds", plan) as workshop:
        work(workshop, plan)
        counting, add, publish = SharedReceipts.counting, sealing._Gathered.add, Workshop.publish

        def counted(self, ordinal, sizes=None):
            read[0] += 1
            return counting(self, ordinal, sizes)

        def gathered(self, *args):
            ahead.append(read[0] - added[0])
            added[0] += 1
            add(self, *args)

        def published(self, **options):
            gc.collect()
            kept.append(sum(type(one) is Receipt for one in gc.get_objects()))
            return publish(self, **options)

        monkeypatch.setattr(SharedReceipts, "counting", counted)
        monkeypatch.setattr(sealing._Gathered, "add", gathered)
        monkeypatch.setattr(Workshop, "publish", published)
        before = sum(type(one) is Receipt for one in gc.get_objects())
        seal(workshop, plan)
    assert (read[0], max(ahead)) == (200, 64)
    assert kept[0] <= before + 1


# ----------------------------------------------------------------------------------------------------------- attaching


def test_attached_without_what_made_it(target, options, plan, tmp_path):
    """Run and covered files are read from the staging."""
    with opened(target, plan, **options) as workshop:
        work(workshop, plan)
    with attach_workshop(target, plan, **options) as workshop:
        assert workshop.covered == COVERED
        assert workshop.run == run_of(plan)
        (worker,) = workshop.workers()
        assert (worker.state.phase, worker.liveness) == ("seal", "live")
        assert seal(workshop, plan) == simple(tmp_path / "simple", plan)
        workshop.remove()
    assert find_runs(target, **options) == []


def test_nothing_to_attach_to(target, options, plan):
    with pytest.raises(kvformat.ConflictError) as caught:
        attach_workshop(target, plan, **options)
    assert caught.value.code == "E119"
    with opened(target, SmallPlan(first_id=1), **options), pytest.raises(kvformat.ConflictError) as caught:
        attach_workshop(target, plan, **options)
    assert caught.value.code == "E119"


def test_nothing_is_published_while_workers_of_another_plan_live(target, options, plan):
    other = SmallPlan(first_id=1)
    with opened(target, plan, **options) as workshop:
        work(workshop, plan)
        staged = workshop.place
    with opened(target, other, **options) as workshop, pytest.raises(kvformat.ConflictError) as caught:
        attach_workshop(target, plan, **options)
    assert caught.value.code == "E117"
    with attach_workshop(target, plan, **options) as workshop:
        assert workshop.place == staged
        seal(workshop, plan)


def test_many_shards_without_records_are_not_all_named(tmp_path):
    plan = SmallPlan(60)
    with opened(tmp_path / "ds", plan) as workshop:
        make(workshop, plan, range(30), skip=range(4, 60))
        with pytest.raises(kvformat.ConflictError) as caught:
            seal(workshop, plan, allow_skips=True)
    message = caught.value.message
    assert "28 shards hold no record, as all of their documents were skipped: 2, 3, 4, 5, 6, 7, 8, 9" in message
    assert "11, ..., with 'clip-4' (record 4 is odd); " in message
    assert "'clip-13' (record 13 is odd); ...; shards" in message
    assert "clip-14" not in message


def test_of_several_runs_the_complete_one_is_attached_to(target, options, plan):
    with opened(target, plan, changes={"tag": "half"}, **options) as half:
        make(half, plan, [0])
    with opened(target, plan, changes={"tag": "more"}, **options) as more:
        make(more, plan, [0, 1])
    with attach_workshop(target, plan, **options) as workshop:
        assert workshop.run.tag == "more"
    with opened(target, plan, changes={"tag": "half"}, **options) as half:
        make(half, plan, [1, 2, 3])
    with attach_workshop(target, plan, **options) as workshop:
        assert workshop.run.tag == "half"
    with opened(target, plan, changes={"tag": "more"}, **options) as more:
        make(more, plan, [2, 3])
    with pytest.raises(kvformat.IdentityError) as caught:
        attach_workshop(target, plan, **options)
    assert caught.value.code == "E120"
    assert "'half'" in caught.value.message


def test_a_damaged_covered_file(target, options, plan):
    with opened(target, plan, **options) as workshop:
        work(workshop, plan)
        key, (file, _) = workshop.run.key, workshop.run.files
    if isinstance(target, Remote):
        target.store.objects[f".staging/{key}/files/{file.sha256}"] = b"M" * file.size
    else:
        (target / ".staging" / f"{key}-workers" / "files" / file.sha256).write_bytes(b"M" * file.size)
    with pytest.raises(KVFormatError) as caught:
        attach_workshop(target, plan, **options)
    assert caught.value.code == "E116"
    if not isinstance(target, Remote):
        with pytest.raises(KVFormatError) as caught:
            opened(target, plan)
        assert caught.value.code == "E116"
