"""Processes that publish to one location at the same time."""

from __future__ import annotations

from collections import Counter

import pytest

import kvformat
from tests.reliability import small
from tests.reliability.racing import run_race

PROCESSES = 16


def race(location, *, barrier, variants, resume=False):
    """What became of each process."""
    options = {"processes": PROCESSES, "barrier": barrier, "variants": variants, "resume": resume}
    return run_race("tests.reliability.writing", location, options)


def check_winner(location, results):
    """One dataset, whole, of one of the racers; nothing else. Returns its id."""
    report = kvformat.verify(location)
    assert (report.ok, report.level, report.findings, report.warnings) == (True, 4, (), ())
    assert {result["id"] for result in results if "id" in result} == {report.id}
    winner = next(result for result in results if result.get("id") == report.id)
    small.check_complete(location, report.id)
    small.check_records(location, variant=winner["variant"])
    assert not (location / ".staging").exists()
    return report.id


@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("below", ["ds", "sets/of/ds"])
def test_equal_datasets_from_the_start(tmp_path, attempt, below):
    """All end with one id, or find the dataset there when they begin."""
    location = tmp_path / below
    results = race(location, barrier="before", variants=1)
    check_winner(location, results)
    assert {result.get("code") for result in results} <= {None, "E100"}


@pytest.mark.parametrize("attempt", range(2))
def test_equal_datasets_at_the_commit(tmp_path, attempt):
    location = tmp_path / "ds"
    results = race(location, barrier="publishing", variants=1)
    check_winner(location, results)
    assert [result for result in results if "code" in result] == []


@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("variants", [2, PROCESSES])
def test_other_datasets_from_the_start(tmp_path, attempt, variants):
    location = tmp_path / "ds"
    results = race(location, barrier="before", variants=variants)
    check_winner(location, results)
    assert {result.get("code") for result in results} <= {None, "E100", "E113"}


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("variants", [2, PROCESSES])
def test_other_datasets_at_the_commit(tmp_path, attempt, variants):
    """The first wins, its equals win with it, all others are told."""
    location = tmp_path / "ds"
    results = race(location, barrier="publishing", variants=variants)
    check_winner(location, results)
    assert Counter(result.get("code") for result in results) == {
        None: PROCESSES // variants,
        "E113": PROCESSES - PROCESSES // variants,
    }


def test_resuming_writers_with_tags_of_their_own(tmp_path):
    """Losers keep what they staged, for that is what resuming is for."""
    location = tmp_path / "ds"
    results = race(location, barrier="publishing", variants=2, resume=True)
    assert Counter(result.get("code") for result in results) == {None: 8, "E113": 8}
    report = kvformat.verify(location)
    assert (report.ok, report.findings) == (True, ())
    assert {warning.code for warning in report.warnings} == {"W002"}
    assert len(list((location / ".staging").iterdir())) == 8
