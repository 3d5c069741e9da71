from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.errors import UsageError
from kvformat.extract.sampling import parse_amount, sample_records

ID = "7" * 64


def test_a_sample_is_a_function_of_dataset_seed_and_size() -> None:
    found = sample_records(ID, 1000, count=8, seed=3).tolist()
    assert found == [191, 265, 339, 495, 590, 650, 817, 913]  # forever: it tells which records were looked at
    assert sample_records(ID, 1000, count=8, seed=4).tolist() != found
    assert sample_records("8" * 64, 1000, count=8, seed=3).tolist() != found


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**53 - 1))
def test_records_are_different_ascending_and_there(num_records: int, count: int, seed: int) -> None:
    found = sample_records(ID, num_records, count=count, seed=seed)
    assert len(found) == min(count, num_records)
    assert (np.diff(found) > 0).all()
    assert found[0] >= 0
    assert found[-1] < num_records


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500))
def test_a_larger_sample_holds_a_smaller_one(num_records: int, one: int, other: int) -> None:
    small, large = (set(sample_records(ID, num_records, count=n).tolist()) for n in sorted((one, other)))
    assert small <= large


@pytest.mark.parametrize(
    ("num_records", "fraction", "count"),
    [(1, 0.01, 1), (99, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2), (100, 0.07, 7), (700, 0.01, 7),
     (300, Fraction(1, 3), 100), (5, 1, 5), (5, 1.0, 5), (3, 1e-9, 1)],
)  # fmt: skip
def test_shares_are_rounded_up(num_records: int, fraction: float, count: int) -> None:
    assert len(sample_records(ID, num_records, fraction=fraction)) == count


def test_without_a_size_it_is_one_percent() -> None:
    assert sample_records(ID, 1000).tolist() == sample_records(ID, 1000, fraction=0.01).tolist()


@pytest.mark.parametrize(
    "options",
    [{"fraction": 0}, {"fraction": 1.1}, {"fraction": float("nan")}, {"fraction": "1%"}, {"count": 0}, {"count": 1.5},
     {"fraction": 0.1, "count": 1}, {"seed": -1}, {"seed": 2**53}, {"seed": 0.5}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        sample_records(ID, 10, **options)  # type: ignore[arg-type]
    assert caught.value.code == "E081"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1%", (Fraction(1, 100), None)), ("0.5%", (Fraction(1, 200), None)), ("100 %", (Fraction(1), None)),
     (" 12.5% ", (Fraction(1, 8), None)), ("200", (None, 200)), ("1", (None, 1))],
)  # fmt: skip
def test_amounts(text: str, expected: tuple[Fraction | None, int | None]) -> None:
    assert parse_amount(text, "--recompute") == expected


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "1.5", "1e3", "%", "one", "1%%", "٣", "9" * 20])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--recompute must be a share or number of records such as 1% or 200"):
        parse_amount(text, "--recompute")
