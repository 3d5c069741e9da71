"""Names are given once, in order, and those of skipped documents name no record."""

from __future__ import annotations

import pytest

import kvformat
from kvformat.spec.manifest import Skipped
from kvformat.write.names import Names


def code(call):
    with pytest.raises(kvformat.KVFormatError) as caught:
        call()
    return caught.value.code


def test_every_name_counts_as_an_input():
    names = Names()
    assert names.check("ä") == "ä".encode()
    names.add("ä", 0)
    names.skip(names.skipped_as(b"gone", "empty"))
    names.add("b", 0)
    names.skip(names.skipped_as(b"gone too", "empty"))
    assert names.num_inputs == 4
    assert names.skipped == (
        Skipped(input=1, name="gone", reason="empty"),
        Skipped(input=3, name="gone too", reason="empty"),
    )
    assert [names.record(name, alias="x") for name in ("ä", "b")] == [0, 0]


def test_what_is_refused_changes_nothing():
    names = Names()
    names.add("a", 3)
    names.skip(names.skipped_as(b"gone", "empty"))
    assert [code(lambda name=name: names.check(name)) for name in ("a", "gone")] == ["E107", "E107"]
    assert [code(lambda name=name: names.check(name)) for name in ("", "x" * 513, "\ud800", 5)] == ["E106"] * 4
    assert [code(lambda name=name: names.record(name, alias="x")) for name in ("gone", "b")] == ["E109"] * 2
    assert [code(lambda reason=reason: names.skipped_as(b"b", reason)) for reason in ("", "\ud800", None)] == [
        "E081"
    ] * 3
    assert (names.num_inputs, len(names.skipped)) == (2, 1)
