"""Staged records come back one by one, as rows, and nothing else is taken for them."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvformat
from kvformat.spec import canonical
from kvformat.spec.layout import Layout
from kvformat.write.replay import Replay
from kvformat.write.staging import Receipt, StagedRecord
from tests.write.make import UNIFORM

LAYOUT = Layout(UNIFORM)
ROOT = Path("ds")


def digest(number):
    return bytes([number]) * 32


def record_sum(number):
    return bytes([number]) * 16


def receipt(ordinal, *numbers):
    records = tuple(
        StagedRecord(dims=(n + 1,), document=digest(n).hex(), record_sum=record_sum(n).hex()) for n in numbers
    )
    return Receipt(ordinal=ordinal, records=records, sha256="00" * 32, size=1 << 20)


def test_rows_in_order():
    replay = Replay(LAYOUT, ROOT, [receipt(0, 0, 1, 2), receipt(1, 3)])
    first, second = (LAYOUT.place((tokens,)).nbytes for tokens in (1, 2))
    left, rows = [], []
    for number in range(4):
        left.append(replay.num_shards)
        rows.append(replay.take("a", number, digest(number), record_sum(number) if number % 2 else None))
    assert left == [2, 2, 2, 1]
    assert [row.first for row in rows] == [True, False, False, True]
    assert [row.offset for row in rows] == [0, first, first + second, 0]
    assert [row.dims for row in rows] == [(1,), (2,), (3,), (4,)]
    assert [row.record_sum for row in rows] == [record_sum(n) for n in range(4)]
    assert replay.num_shards == 0
    replay.check_empty()


@pytest.mark.parametrize(
    ("document", "values", "what"),
    [
        (digest(9), record_sum(0), "another document"),
        (digest(0), record_sum(9), "another values of the same document"),
    ],
)
def test_another_record_is_refused_and_takes_nothing(document, values, what):
    replay = Replay(LAYOUT, ROOT, [receipt(0, 0, 1)])
    with pytest.raises(kvformat.ConflictError) as caught:
        replay.take("b", 7, document, values)
    assert (caught.value.code, caught.value.record, caught.value.path) == ("E112", "b", "ds")
    assert what in caught.value.message
    assert "record 7" in caught.value.message
    assert replay.take("a", 7, digest(0), record_sum(0)).first


def test_what_is_left_is_refused():
    replay = Replay(LAYOUT, ROOT, [receipt(0, 0, 1), receipt(1, 2)])
    replay.take("a", 0, digest(0))
    with pytest.raises(kvformat.ConflictError, match="2 shards are left over") as caught:
        replay.check_empty()
    assert caught.value.code == "E112"
    Replay(LAYOUT, ROOT).check_empty()


def test_a_receipt_is_canonical():
    for one in (receipt(0, 0), receipt(12_345_678, *range(100))):
        assert one.encode() == canonical.encode(one)
        assert canonical.convert(canonical.decode(one.encode()), Receipt) == one
