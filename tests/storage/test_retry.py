"""Which faults are tried again, when, and for how long."""

from __future__ import annotations

import random

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.retry import Deadline, ExhaustedFault, Retries
from kvformat.storage.store import (
    DeniedFault,
    ExistsFault,
    ExpiredFault,
    FullFault,
    MissingFault,
    ShortFault,
    StoreFault,
    ThrottledFault,
    TransportFault,
    UnsupportedFault,
)
from kvformat.storage.store_errors import Redactor, translated
from tests.storage.clock import Clock


@pytest.mark.parametrize("fault", [TransportFault, ShortFault, ThrottledFault])
def test_what_may_mend_is_tried_again(fault) -> None:
    clock = Clock(1000.0)
    retries = Retries(Deadline(100, clock))
    assert retries.attempts == 1
    assert 0 <= retries.after(fault("x")) <= 0.2
    assert retries.attempts == 2


@pytest.mark.parametrize(
    "fault", [MissingFault, DeniedFault, ExpiredFault, ExistsFault, UnsupportedFault, FullFault, StoreFault]
)
def test_what_will_not_mend_is_raised_at_once(fault) -> None:
    given = fault("x")
    with pytest.raises(fault) as caught:
        Retries(Deadline(100, Clock(1000.0))).after(given)
    assert caught.value is given


def test_waits_grow_to_a_bound_and_are_drawn_from_all_of_it() -> None:
    waits: list[list[float]] = [[] for _ in range(12)]
    for _ in range(200):
        retries = Retries(Deadline(1e9, Clock(1000.0)))
        for drawn in waits:
            drawn.append(retries.after(ThrottledFault("x")))
    bounds = [min(0.2 * 2**n, 10.0) for n in range(12)]
    for drawn, bound in zip(waits, bounds, strict=True):
        assert 0 <= min(drawn) < 0.2 * bound, "full jitter begins at nothing"
        assert 0.8 * bound < max(drawn) <= bound


def test_draws_are_nobody_elses() -> None:
    """Ranks seed alike, and would come back together; and what they draw must not depend on a retry."""

    def waits() -> list[float]:
        random.seed(5)
        retries = Retries(Deadline(1e9, Clock(1000.0)))
        return [retries.after(TransportFault("x")) for _ in range(8)]

    assert waits() != waits()
    random.seed(5)
    expected = random.random()
    random.seed(5)
    Retries(Deadline(100, Clock(1000.0))).after(TransportFault("x"))
    assert random.random() == expected


def test_the_deadline_ends_it() -> None:
    clock = Clock(1000.0)
    deadline = Deadline(60, clock)
    retries = Retries(deadline)
    last = TransportFault("reset")
    with pytest.raises(ExhaustedFault, match="reset") as caught:
        while True:
            clock.now += 1 + retries.after(last)
    assert 45 < caught.value.seconds <= 60 + 1
    assert caught.value.attempts > 8
    assert caught.value.last is last


def test_progress_moves_the_deadline() -> None:
    clock = Clock(1000.0)
    deadline = Deadline(60, clock)
    clock.now += 50
    deadline.renew()
    assert deadline.left() == 60
    assert deadline.passed() == 50


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (MissingFault("x"), "E002", "missing"),
        (DeniedFault("AccessDenied"), "E207", "storage_options"),
        (ExpiredFault("ExpiredToken"), "E207", "expired"),
        (ExhaustedFault(7, 301.2, ThrottledFault("slow down")), "E208", "7 attempts in 301 s"),
        (ExhaustedFault(1, 301.2, None), "E208", "1 attempt in"),
        (FullFault("quota"), "E200", "quota"),
        (UnsupportedFault("no PUT"), "E203", "no PUT"),
        (StoreFault("odd"), "E203", "odd"),
    ],
)
def test_codes_by_what_can_be_done(fault, code, words) -> None:
    with pytest.raises(KVFormatError, match=words) as caught, translated("s3://b/x", Redactor({})):
        raise fault
    assert caught.value.code == code
    assert caught.value.path == "s3://b/x"
    assert isinstance(caught.value.__cause__, StoreFault)


def test_a_missing_bucket_is_no_damage() -> None:
    with pytest.raises(KVFormatError, match="bucket") as caught, translated("s3://b/x", Redactor({}), making=True):
        raise MissingFault("NoSuchBucket")
    assert caught.value.code == "E203"


def test_neither_message_nor_cause_tells_a_secret() -> None:
    options = {"key": "AKIA123", "secret": "s3cr3t/x", "client_kwargs": {"headers": {"x": "Bearer tok3n"}}}
    said = "GET https://me:pa55@host/obj?X-Amz-Signature=beef&a=b refused: AKIA123 s3cr3t/x, Bearer tok3n (403)"
    for fault in (DeniedFault(said), ExhaustedFault(3, 5.0, TransportFault(said))):
        with pytest.raises(KVFormatError) as caught, translated("p", Redactor(options)):
            try:
                raise RuntimeError(said)  # as the client's own error would stand behind it
            except RuntimeError as error:
                raise fault from error
        shown, exception = "", caught.value
        while exception is not None:
            shown += f"{exception}\n"
            exception = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)
        assert "https://host/obj?..." in shown
        for secret in ("pa55", "beef", "AKIA123", "s3cr3t", "tok3n"):
            assert secret not in shown
