"""A proxy's page in place of any one answer of the target: the copy is whole, and nothing is called foreign."""

from __future__ import annotations

import pytest

import kvformat
from kvformat.storage.store import Stat
from kvformat.testing.faulty_store import ERROR_BODY, FaultyStore, Rule

MOST_CALLS = 400


@pytest.mark.parametrize("route", ["local", "remote"])
@pytest.mark.parametrize("nbytes", [0, len(ERROR_BODY)])
def test_one_head_that_lies(route, nbytes, source, target, dataset, spool) -> None:
    origin, goal = source(route), target("remote")
    for nth in range(MOST_CALLS):
        goal.store.objects.clear()
        store = FaultyStore(goal.store, [Rule("stat", lambda operation: Stat(operation.name, nbytes), nth=nth)])
        report = kvformat.copy(origin.location, goal.remote(store), spool=spool, threads=1)
        assert goal.files() == {**origin.files()}, nth
        assert report.id == kvformat.open(dataset).id
        if sum(called == "stat" for called, _ in store.calls) <= nth:
            assert nth > len(origin.files())
            return
    raise AssertionError
