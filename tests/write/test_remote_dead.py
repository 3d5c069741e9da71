"""What a dead worker of this machine said in a store goes before its spool directory, which alone proves its death."""

from __future__ import annotations

import os
import time

import pytest
from msgspec.structs import replace

from kvformat.errors import KVFormatWarning
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.store import DeniedFault
from kvformat.testing.faulty_store import FaultyStore, Rule, raised
from kvformat.write.holding import hold_staged
from kvformat.write.opening import find_runs
from kvformat.write.remote_dead import forget_dead, sweep_dead
from kvformat.write.sealing import seal
from kvformat.write.spool import Spool, SpoolFiles, dead_spools
from kvformat.write.spool_places import spools
from kvformat.write.worker_state import STALE_S
from tests.write.place import Place
from tests.write.planning import fill, make, remote, work


@pytest.fixture
def place(tmp_path):
    place = Place("remote", tmp_path)
    yield place
    place.close()


def killed(workshop):
    """Leave it as a kill does: its word stays, its locks go."""
    workshop._beats.stop()
    workshop._shared._spool._lease.release()


def killed_at_work(place, plan, **options):
    """A worker killed with a shard in its spool."""
    workshop = place.opened(plan, **options)
    make(workshop, plan, [0])
    fill(workshop.begin(1), plan, stop=1)
    killed(workshop)
    return workshop


def killed_in_load(place, plan, **options):
    """A worker killed while it loads its model."""
    hold = hold_staged(place.target, plan.digest, spool=place.spool, **options)
    hold._beats.stop()
    (held,) = hold._held.values()
    held._spool._lease.release()


def said(place):
    return [
        (one.state.rank, one.state.phase, one.liveness)
        for found in find_runs(place.target, spool=place.spool)
        for one in found.workers
    ]


def staged(place):
    return [name for name in place.names() if name.startswith(".staging")]


def test_who_holds_the_work_of_a_dead_worker_removes_what_it_said(place, plan):
    killed_at_work(place, plan)
    assert said(place) == [(0, "start", "dead")]
    killed_in_load(place, plan)
    assert said(place) == [(0, "load", "dead")]
    with hold_staged(place.target, plan.digest, spool=place.spool):
        assert said(place) == [(0, "load", "live")]
    assert said(place) == []
    assert spools(place.spool) == []


def test_nothing_stays_of_dead_workers_after_publication(place, plan):
    killed_at_work(place, plan)
    with place.opened(plan) as workshop:
        killed_in_load(place, plan, rank=1, world_size=3)  # after it began
        late = place.opened(plan, rank=2, world_size=3)
        killed(late)
        work(workshop, plan)
        seal(workshop, plan)
        workshop.remove()
    assert staged(place) == []
    assert spools(place.spool) == []


@pytest.mark.parametrize("why", ["another URL", "a store that does not let"])
def test_while_what_a_dead_worker_said_stays_its_proof_does(place, plan, why):
    workshop = killed_at_work(place, plan)
    path = workshop._shared._spool.path
    assert list(path.iterdir())
    if why == "another URL":
        Spool.create(SpoolFiles(), place.spool, "s3://bucket/other", "a" * 16).remove()
    else:
        refusing = FaultyStore(place.store, [Rule("delete", raised(DeniedFault))])
        sweep_dead(remote(refusing), place.spool, SpoolFiles())
    assert list(path.iterdir()) == []  # disk space is free
    assert said(place) == [(0, "start", "dead")]
    os.utime(path, (time.time() - STALE_S - 60, time.time() - STALE_S - 60))
    Spool.create(SpoolFiles(), place.spool, "s3://bucket/other", "a" * 16).remove()
    assert spools(place.spool) == []


def test_the_age_of_a_spool_is_that_of_the_last_word(place, plan):
    with place.opened(plan) as workshop, hold_staged(place.target, plan.digest, spool=place.spool) as hold:
        for path in spools(place.spool):
            os.utime(path, (1000.0, 1000.0))
        workshop._shared.say(workshop.state)
        for held in hold._held.values():
            held.say(hold._state)
        assert [path.stat().st_mtime > 1000.0 for path in spools(place.spool)] == [True, True]


def test_live_workers_and_those_of_other_machines_are_left_alone(place, plan):
    """Spool directories may be on a disk that machines share, where locks do not reach from one to the other."""
    there = place.opened(plan, rank=1, world_size=2)
    there._shared.say(replace(there.state, host="elsewhere"))
    killed(there)
    with place.opened(plan):
        assert said(place) == [(0, "start", "live"), (1, "start", "unknown")]
        assert dead_spools(place.spool, place.target.url) == [there._shared._spool.path]
        assert forget_dead(place.target, place.spool) == frozenset()
        assert said(place) == [(0, "start", "live"), (1, "start", "unknown")]


def test_who_is_dead_is_told_only_while_nobody_begins(place, plan, monkeypatch):
    """One that begins has no lease for a moment."""
    killed_at_work(place, plan)
    monkeypatch.setattr("kvformat.write.spool._BUSY_TIMEOUT_S", 0.0)
    beginning = DirectoryLease.take(place.spool)
    assert forget_dead(place.target, place.spool) == frozenset()
    assert said(place) == [(0, "start", "dead")]
    beginning.release()
    assert forget_dead(place.target, place.spool) == frozenset(spools(place.spool))


@pytest.mark.parametrize(("silent_s", "warned"), [(10.0, False), (200.0, True)])
def test_work_that_nobody_removes_is_told(place, plan, silent_s, warned, recwarn):
    """Of one on another machine it is only known how long it has been silent."""
    with place.opened(plan) as workshop:
        other = place.opened(plan, rank=1, world_size=2)
        killed(other)
        other._shared.say(replace(other.state, host="elsewhere", updated=time.time() - silent_s))
        work(workshop, plan)
        seal(workshop, plan)
        workshop.remove()
    found = [str(one.message) for one in recwarn.list if one.category is KVFormatWarning]
    assert [("W002" in one, "worker 1 of 2 (elsewhere, " in one) for one in found] == [(True, True)] * warned
    assert staged(place)
