"""Staged work is held while a model is loaded, whatever run it is of, and keeps nobody else from anything."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import pytest

from kvformat.errors import ConflictError
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.store import TransportFault
from kvformat.testing.faulty_store import FaultyStore, Rule, raised
from kvformat.write import joining
from kvformat.write.holding import hold_staged
from kvformat.write.opening import find_runs
from kvformat.write.sealing import seal
from kvformat.write.spool_places import spools
from kvformat.write.worker_state import SAID_EVERY_S
from tests.write.place import Place
from tests.write.planning import SmallPlan, make, remote, work


def left(place, plan, *, tag="", ordinals=(0, 2)):
    """Work of a run that nobody is at any more."""
    with place.opened(plan, changes={"tag": tag}) as workshop:
        make(workshop, plan, ordinals)


def held(place, plan, **options):
    """Its beats are called by hand."""
    hold = hold_staged(place.target, plan.digest, spool=place.spool, **options)
    hold._beats.stop()
    return hold


def said(place):
    """Of each run, what its workers say: rank, number, phase, and whether they live."""
    return [
        [(one.state.rank, one.state.world_size, one.state.phase, one.liveness) for one in found.workers]
        for found in find_runs(place.target, spool=place.spool)
    ]


def test_the_work_of_all_runs_of_the_plan_is_held_and_of_no_other(place, plan):
    other = SmallPlan(first_id=5)
    left(place, plan)
    left(place, plan, tag="cuda")
    left(place, other)
    before = place.names()
    with held(place, plan, rank=1, world_size=3) as hold:
        assert sorted(said(place)) == [[], [(1, 3, "load", "live")], [(1, 3, "load", "live")]]
        assert hold.since is not None
        (theirs,) = [one for one in find_runs(place.target, spool=place.spool) if one.run.plan == other.digest]
        assert theirs.workers == ()
    hold.release()
    assert said(place) == [[], [], []]
    assert place.names() == before
    assert spools(place.spool) == []


def test_where_nothing_is_staged_nothing_is_made(place, plan):
    with held(place, plan) as hold:
        assert hold.since is None
    assert place.names() == []


def test_what_a_killed_holder_held_is_free(tmp_path, plan):
    place = Place("local", tmp_path)
    left(place, plan)
    code = (
        "import sys; from pathlib import Path; from kvformat.write.holding import hold_staged\n"
        "hold_staged(Path(sys.argv[1]), sys.argv[2]); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(place.directory), plan.digest]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert said(place) == [[(0, 1, "load", "live")]]
        process.kill()
    assert said(place) == [[(0, 1, "load", "dead")]]
    with place.opened(plan):  # who joins sweeps what it said
        assert [len(workers) for workers in said(place)] == [1]


def test_the_last_worker_removes_what_it_published_although_it_is_held(place, plan):
    left(place, plan)
    now = [time.time()]
    with held(place, plan, clock=lambda: now[0]) as hold:
        with place.opened(plan) as workshop:
            work(workshop, plan)
            seal(workshop, plan)
            workshop.remove()
        now[0] += SAID_EVERY_S
        hold._beat()
        assert not [name for name in place.names() if name.startswith(".staging")]
    assert not [name for name in place.names() if name.startswith(".staging")]


def test_a_hold_is_no_work_beside(place, plan):
    """Several workers refuse to work beside another run; one that only looks for its own is none."""
    with place.opened(plan, changes={"tag": "cuda"}), held(place, plan):
        pass
    other = place.opened(plan, changes={"tag": "cuda"})
    hold = held(place, plan)
    other.close()
    with hold, place.opened(plan, rank=1, world_size=2) as workshop:
        assert workshop.beside == ()


def test_shards_without_a_receipt_are_swept_although_somebody_loads(tmp_path, plan):
    place = Place("local", tmp_path)
    left(place, plan)
    (orphan,) = [name for name in place.shards() if "/00000002-" in name]
    place.delete(place.receipt(plan, 2))
    with held(place, plan), place.opened(plan):
        assert orphan not in place.names()


def test_what_is_staged_meanwhile_is_held_at_the_next_beat(place, plan):
    now = [time.time() - 1000.0]
    left(place, SmallPlan(first_id=5))
    with held(place, plan, clock=lambda: now[0]) as hold:
        left(place, plan)
        assert sorted(said(place)) == [[], []]
        now[0] = time.time()
        hold._beat()
        assert sorted(said(place)) == [[], [(0, 1, "load", "live")]]
        (state,) = [one.state for found in find_runs(place.target, spool=place.spool) for one in found.workers]
        assert (state.updated, state.started) == (now[0], hold._state.started)  # else it looked long gone elsewhere
    assert sorted(said(place)) == [[], []]
    assert spools(place.spool) == []


def test_who_holds_nothing_looks_often_at_first(place, plan):
    now = [1000.0]
    with held(place, plan, clock=lambda: now[0]) as hold:
        assert hold._pause_s() == (2.0 if place.kind == "local" else 5.0)
        now[0] += 60.0
        assert hold._pause_s() == SAID_EVERY_S
    left(place, plan)
    with held(place, plan, clock=lambda: now[0]) as hold:
        assert hold._pause_s() == SAID_EVERY_S


def test_a_beat_says_that_the_holder_lives_now_and_then(place, plan):
    left(place, plan)
    now = [1000.0]

    def updated():
        return [one.state.updated for found in find_runs(place.target, spool=place.spool) for one in found.workers]

    with held(place, plan, clock=lambda: now[0]) as hold:
        for later, heard in [(2.0, 1000.0), (SAID_EVERY_S, 1000.0 + SAID_EVERY_S)]:
            now[0] = 1000.0 + later
            hold._beat()
            assert updated() == [heard]


def test_a_store_that_does_not_answer_is_asked_once_at_a_beat_and_not_by_who_leaves(plan, tmp_path):
    rule = Rule("list", raised(TransportFault))
    place = Place("remote", tmp_path)
    store = FaultyStore(place.store, [])
    place.target = remote(store)
    hold = held(place, plan)
    left(place, plan)
    store._rules.append(rule)
    before = store.calls.count(("list", ".staging/"))
    hold._beat()
    assert store.calls.count(("list", ".staging/")) == before + 1
    assert hold.since is None
    store._rules.clear()
    hold._over.set()
    hold._beat()
    assert store.calls.count(("list", ".staging/")) == before + 1
    hold._over.clear()
    hold._beat()
    assert hold.since is not None
    hold.release()
    place.close()


def test_runs_of_other_plans_are_read_once(plan, tmp_path):
    place = Place("remote", tmp_path)
    left(place, SmallPlan(first_id=5))
    with held(place, plan) as hold:
        hold._beat()
        before = len(place.store.calls)
        hold._beat()
        assert [call for call, _ in place.store.calls[before:]] == ["list"]
    place.close()


def test_a_beat_does_not_wait_for_a_clean_that_asks(tmp_path, plan, monkeypatch):
    place = Place("local", tmp_path)
    waited = []
    real = joining.wait_for_lease

    def wait(path, deadline):
        waited.append(deadline - time.monotonic())
        return real(path, time.monotonic())

    with held(place, plan) as hold:
        left(place, plan)
        (found,) = find_runs(place.target)
        lease = DirectoryLease.take(found.place)
        monkeypatch.setattr(joining, "wait_for_lease", wait)
        hold._beat()
        assert hold.since is None
        lease.release()
        hold._beat()
        assert hold.since is not None
    assert max(waited) <= 0.0


def test_another_plan_is_refused_before_the_model_is_loaded(place, plan):
    other = SmallPlan(first_id=5)
    left(place, plan)
    with place.opened(other), pytest.raises(ConflictError, match=r"worker 0 of 1 \(.*\) is at work") as caught:
        held(place, plan)
    assert caught.value.code == "E117"
    left(place, other)
    with held(place, other), pytest.raises(ConflictError, match="is loading its model: wait for it to end, or stop"):
        place.opened(plan)
    assert said(place) == [[], []]


@pytest.mark.parametrize("first", ["this", "other"])
def test_of_two_plans_that_load_at_once_the_first_one_stays(place, plan, monkeypatch, first):
    """Neither saw the other when it looked first."""
    other, inner = SmallPlan(first_id=5), []
    left(place, plan)
    left(place, other)
    started = {"this": 1000.0, "other": 1001.0} if first == "this" else {"this": 1001.0, "other": 1000.0}
    real = find_runs

    def find(target, **options):
        found = real(target, **options)
        if not inner:
            inner.append(None)
            inner[0] = held(place, other, clock=lambda: started["other"])
        return found

    monkeypatch.setattr("kvformat.write.holding.find_runs", find)
    refused = pytest.raises(ConflictError, match="loading") if first == "other" else contextlib.nullcontext()
    with refused, held(place, plan, clock=lambda: started["this"]) as hold:
        monkeypatch.undo()
        with place.opened(plan, since=hold.since), pytest.raises(ConflictError):
            place.opened(other, since=inner[0].since)
    inner[0].release()
    assert said(place) == [[], []]


def test_what_is_being_cleaned_is_not_held(tmp_path, plan, monkeypatch):
    place = Place("local", tmp_path)
    left(place, plan)
    monkeypatch.setattr(joining, "BUSY_TIMEOUT_S", 0.0)
    (found,) = find_runs(place.target)
    lease = DirectoryLease.take(found.place)
    with pytest.raises(ConflictError, match="kvformat clean"):
        held(place, plan)
    lease.release()
    assert said(place) == [[]]
