"""Staged work is held while a model is loaded, whatever run it is of, and keeps nobody else from anything."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from kvformat.errors import ConflictError
from kvformat.storage.lease import DirectoryLease
from kvformat.write import joining
from kvformat.write.holding import hold_staged
from kvformat.write.opening import find_runs
from kvformat.write.sealing import seal
from kvformat.write.spool import spools
from tests.write.place import Place
from tests.write.planning import SmallPlan, make, work


@pytest.fixture(params=["local", "remote"])
def place(request, tmp_path):
    place = Place(request.param, tmp_path)
    yield place
    place.close()


@pytest.fixture
def plan():
    return SmallPlan()


def left(place, plan, *, tag="", ordinals=(0, 2)):
    """Work of a run that nobody is at any more."""
    with place.opened(plan, changes={"tag": tag}) as workshop:
        make(workshop, plan, ordinals)


def held(place, plan, **options):
    return hold_staged(place.target, plan.digest, spool=place.spool, **options)


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
    with held(place, plan) as hold:
        with place.opened(plan) as workshop:
            work(workshop, plan)
            seal(workshop, plan)
            workshop.remove()
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


def test_what_is_staged_meanwhile_is_held_at_the_next_beat(tmp_path, plan):
    place = Place("local", tmp_path)
    with held(place, plan) as hold:
        left(place, plan)
        assert said(place) == [[]]
        hold._beat()
        assert said(place) == [[(0, 1, "load", "live")]]
    assert said(place) == [[]]


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
