"""Processes that publish to one URL of a real S3 server at the same time."""

from __future__ import annotations

from collections import Counter

import pytest

import kvformat
from tests.reliability import small
from tests.reliability.racing import run_race

PROCESSES = 4


def race(s3, spool, *, barrier, variants, resume):
    """What became of each process."""
    url, storage_options = s3
    options = {
        "processes": PROCESSES,
        "barrier": barrier,
        "variants": variants,
        "resume": resume,
        "spool": str(spool),
        "storage_options": storage_options,
    }
    return run_race("tests.reliability.remote_writing", url, options)


def check_winner(s3, results):
    """One dataset, whole, of one of the racers."""
    url, storage_options = s3
    report = kvformat.verify(url, storage_options=storage_options)
    assert (report.ok, report.level, report.findings) == (True, 4, ())
    assert {result["id"] for result in results if "id" in result} == {report.id}
    winner = next(result for result in results if result.get("id") == report.id)
    dataset = kvformat.open(url, storage_options=storage_options)
    for number, record in enumerate(dataset):
        components, token_ids = small.tensors(number, variant=winner["variant"])
        for name, values in components.items():
            assert record.component(name).numpy().tobytes() == values.tobytes()
        assert record.extra("token_ids").tolist() == token_ids.tolist()


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    with small.create(location) as writer:
        small.fill(writer)
    return writer.id


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("barrier", ["before", "publishing"])
def test_equal_datasets(s3, tmp_path, identity, barrier, resume):
    """All end with one id, or find the dataset there when they begin."""
    results = race(s3, tmp_path, barrier=barrier, variants=1, resume=resume)
    check_winner(s3, results)
    assert {result["id"] for result in results if "id" in result} == {identity}
    assert {result.get("code") for result in results} <= ({None, "E100"} if barrier == "before" else {None})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variants", [2, PROCESSES])
@pytest.mark.parametrize("barrier", ["before", "publishing"])
def test_other_datasets(s3, tmp_path, barrier, variants):
    """The first wins, its equals win with it, all others are told."""
    results = race(s3, tmp_path, barrier=barrier, variants=variants, resume=False)
    check_winner(s3, results)
    counts = Counter(result.get("code") for result in results)
    if barrier == "publishing":
        assert counts == {None: PROCESSES // variants, "E113": PROCESSES - PROCESSES // variants}
    assert set(counts) <= {None, "E100", "E113"}


@pytest.mark.parametrize("barrier", ["before", "publishing"])
def test_other_datasets_of_one_plan_that_resume(s3, tmp_path, barrier):
    """The first receipt decides: whoever has other values is told long before the commit."""
    results = race(s3, tmp_path, barrier=barrier, variants=2, resume=True)
    counts = Counter(result.get("code") for result in results)
    assert set(counts) <= {None, "E100", "E112", "E113"}
    assert counts[None] >= 1
    check_winner(s3, results)
    assert list(tmp_path.iterdir()) == []
