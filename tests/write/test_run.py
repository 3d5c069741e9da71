"""What makes two runs one: a key, and agreement in everything else."""

from __future__ import annotations

import pytest

import kvformat
from kvformat.spec.context import Context
from kvformat.write.run import RunIdentity, differences, run_differs
from tests.write.planning import COVERED, SCHEMA, SmallPlan, run_of

PLAN = SmallPlan()


def test_it_survives_a_file():
    run = run_of(PLAN, extensions={"made": ["by", {"a": 1}]})
    assert RunIdentity.decode(run.encode(), path="x") == run
    assert run.header_size == 4096
    assert (run.num_shards, run.num_records, run.num_tokens) == (4, 7, PLAN.num_tokens)
    assert run.nbytes == PLAN.nbytes + 4 * 4096
    for data in (b"", b"{}", run.encode()[:-1], run.encode().replace(b'"tag"', b'"tog"')):
        with pytest.raises(kvformat.DamageError) as caught:
            RunIdentity.decode(data, path="x")
        assert (caught.value.code, caught.value.path) == ("E116", "x")


OTHER_SCHEMA = kvformat.Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F16")


@pytest.mark.parametrize(
    ("changes", "same_key"),
    [
        ({"tag": "x"}, False),
        ({"schema": OTHER_SCHEMA}, False),
        ({"provenance": {"torch": "2"}}, True),
        ({"covered": {}}, True),
        ({"text": kvformat.Text(truncate=5)}, True),
        ({"extensions": {"a": 1}}, True),
        ({"shard_nbytes": 5}, True),
    ],
)
def test_keys_and_differences(changes, same_key):
    run, other = run_of(PLAN), run_of(PLAN, **changes)
    assert (run.key == other.key) == same_key
    found = differences(run, other)
    assert found
    assert all(" here, " in one and " there)" in one for one in found)
    assert differences(run, run_of(PLAN)) == []


def test_what_provenance_tells_too_is_not_told_of_the_tag_again():
    run = run_of(PLAN, provenance={"threads": "1"}, tag='{"threads":1}')
    assert differences(run, run_of(PLAN, provenance={"threads": "2"}, tag='{"threads":2}')) == [
        "provenance.threads ('1' here, '2' there)"
    ]
    assert differences(run, run_of(PLAN, provenance={"threads": "1"}, tag='{"threads":2}')) == [
        "tag.threads (1 here, 2 there)"
    ]


def test_another_plan_is_another_key():
    assert run_of(SmallPlan(first_id=1)).key != run_of(PLAN).key
    assert len(run_of(PLAN).key) == 16


def test_the_message_names_some_fields_with_both_values():
    run = run_of(PLAN, provenance={f"p{number:02}": "mine" * 40 for number in range(14)})
    error = run_differs(differences(run, run_of(PLAN)), "somewhere")
    assert (error.code, error.path) == ("E120", "somewhere")
    assert "provenance.p00 ('minemine" in error.message
    assert "... here, absent there)" in error.message
    assert error.message.count(" here, ") == 10
    assert "and 5 more" in error.message
    assert "kvformat clean" in error.message


def test_what_a_reader_would_refuse_is_refused():
    with pytest.raises(kvformat.FormatError):
        run_of(PLAN, covered={"No label": b""}).draft("x", {"No label": b""})
    run_of(PLAN, context=Context.unknown(), schema=SCHEMA).draft("x", COVERED)
