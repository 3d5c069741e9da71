"""What is told to the log while a store gives no answer: seldom, soon enough, and no secrets."""

from __future__ import annotations

import logging
import re
from itertools import pairwise

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.silence import Silence
from kvformat.storage.store import TransportFault
from kvformat.testing.faulty_store import FaultyStore, Rule, raised, throttled
from kvformat.testing.memory_store import MemoryStore
from tests.storage.clock import Clock


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, logger="kvformat")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kvformat"]


def remote_over(effect, times, clock, **options):
    store = FaultyStore(MemoryStore(objects={"a": b"x" * 64}), [Rule("get", effect, nth=range(times))])
    return Remote(
        "s3://me:pa55@bucket/ds",
        storage_options={"secret": "s3cr3t/x"},
        connect=lambda *_: store,
        options=RemoteOptions(**options),
        clock=clock,
        sleep=clock.sleep,
    )


@pytest.mark.parametrize("effect", [throttled(), raised(lambda text: TransportFault(f"{text} s3cr3t/x refused"))])
def test_a_store_that_stays_silent_is_named_after_ten_seconds_and_then_once_a_minute(effect, told) -> None:
    clock = Clock()
    remote = remote_over(effect, 1 << 30, clock, deadline_s=200)
    remote.stat("a")  # it is there
    with pytest.raises(KVFormatError, match="E208"):
        remote.fetch("a", [(0, 10)], lambda *_: None)
    found = [
        re.fullmatch(r"s3://bucket/ds: .*; no success for (\d+) s, trying again for up to (\d+) s", m) for m in told()
    ]
    assert all(found)
    after = [int(match[1]) for match in found if match]
    assert 3 <= len(after) <= 4
    assert 10 <= after[0] <= 20
    assert all(60 <= later - earlier <= 70 for earlier, later in pairwise(after))
    assert all(abs(int(match[1]) + int(match[2]) - 200) <= 11 for match in found if match)
    assert not any(secret in message for message in told() for secret in ("pa55", "s3cr3t"))
    remote.close()


def test_faults_that_mend_soon_are_not_worth_a_word(told) -> None:
    clock = Clock()
    remote = remote_over(throttled(), 4, clock)
    remote.fetch("a", [(0, 10)], lambda *_: None)
    remote.close()
    assert clock.now < 10
    assert told() == []


@pytest.mark.parametrize("answer", ["right", "missing", "never"])
def test_only_what_was_waited_for_counts(answer, told) -> None:
    """Neither the time before an operation, nor that before an answer, whatever it was."""
    clock = Clock()
    silence = Silence(lambda text: f"there: {text}", clock)
    store = FaultyStore(MemoryStore(objects={"a": b"x" * 64}), [Rule("stat", throttled(), nth=range(0, 99, 2))])
    remote = Remote("s3://bucket/ds", connect=lambda *_: store, clock=clock, sleep=clock.sleep)
    for _ in range(5):
        if answer == "never":
            silence.failed(TransportFault("refused"), seconds=9.0, left_s=50.0)
        else:
            assert (remote.stat("a" if answer == "right" else "nope") is None) == (answer == "missing")
        clock.now += 3600.0
    remote.close()
    assert told() == []
    silence.failed(TransportFault("refused"), seconds=10.0, left_s=90.0)
    silence.failed(TransportFault("refused"), seconds=11.0, left_s=89.0)
    assert told() == ["there: refused; no success for 10 s, trying again for up to 90 s"]
    silence.answered()
    clock.now += 70.0
    silence.failed(TransportFault("refused"), seconds=3600.0, left_s=9.0)
    assert told()[1:] == ["there: refused; no success for 70 s, trying again for up to 9 s"]


@pytest.mark.parametrize("known", [False, True])
def test_a_store_that_hangs_is_told_of_after_its_first_attempt(known, told) -> None:
    clock = Clock()

    def hang(text):
        clock.now += 30.0
        return TransportFault(f"{text} timed out")

    remote = remote_over(raised(hang), 1 << 30, clock, attempt_timeout_s=30.0, deadline_s=100)
    if known:
        remote.stat("a")
    with pytest.raises(KVFormatError, match="E208"):
        remote.fetch("a", [(0, 10)], lambda *_: None)
    remote.close()
    assert "no success for 30 s, trying again for up to " in told()[0]


def test_many_requests_share_a_line(told) -> None:
    clock = Clock()
    remote = remote_over(throttled(), 400, clock, request_nbytes=1, max_requests=16, deadline_s=2000)
    into = []
    remote.fetch("a", [(0, 64)], lambda at, data: into.append((at, bytes(data))))
    remote.close()
    assert len(into) == 64
    assert clock.now > 20
    assert 1 <= len(told()) <= 1 + clock.now / 60
