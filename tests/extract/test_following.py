from __future__ import annotations

import pytest

from kvformat.errors import make_error
from kvformat.extract.documents import DocumentsWriter
from kvformat.extract.following import Following
from kvformat.extract.plan import make_plan
from kvformat.spec.document import Document
from kvformat.spec.schema import Schema

SCHEMA = Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=4)


@pytest.fixture
def plan():
    with DocumentsWriter() as writer:
        for number in range(100):
            writer.add(f"d{number}", Document.of(range(number + 1)))
        return make_plan(writer.finish(), schema=SCHEMA, shard_slots=40)


def lengths(documents):
    return [document.num_tokens for document in documents]


def document(plan, record):
    return plan.document(record).document


def test_what_follows_are_the_next_records_of_the_shard(plan):
    assert plan.num_shards == 3
    following = Following(plan)
    assert lengths(following(document(plan, 0))) == list(range(2, 34))
    assert lengths(following(document(plan, 1))) == list(range(3, 35))
    assert lengths(following(document(plan, 37))) == [39, 40]
    assert lengths(following(document(plan, 39))) == []


def test_shards_may_come_in_any_order(plan):
    following = Following(plan)
    for record in (95, 3, 41, 99, 40, 0):
        end = plan.shard(plan.shard_of(record)).stop
        assert lengths(following(document(plan, record))) == list(range(record + 2, min(end, record + 33) + 1))


def test_of_what_is_not_planned_nothing_is_foreseen(plan):
    assert list(Following(plan)(Document.of([7, 7, 7]))) == []


def test_a_damaged_document_is_left_to_whoever_computes_it(plan, monkeypatch):
    given = document(plan, 0)
    whole = plan.document

    def read(record):
        if record == 3:
            raise make_error("E307", "not as it was written")
        return whole(record)

    monkeypatch.setattr(plan, "document", read)
    assert lengths(Following(plan)(given)) == [2, 3]
