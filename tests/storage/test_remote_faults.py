"""Every fault of an object store, on every verb that reads: right data, or the right code within the deadline."""

from __future__ import annotations

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.testing.faulty_store import (
    ERROR_BODY,
    FaultyStore,
    Rule,
    answered,
    conflict,
    denied,
    empty,
    expired,
    full,
    long_by,
    missing,
    raised,
    reset_after,
    short_by,
    throttled,
    timed_out,
)
from kvformat.testing.memory_store import MemoryStore
from tests.storage.clock import Clock

DATA = bytes(range(64))
DEADLINE_S = 120.0

MENDS = {
    "503": throttled(),
    "timeout": timed_out(),
    "xml": answered(ERROR_BODY),
    "empty": empty(),
    "expired": expired(),
    **{f"reset after {n}": reset_after(n) for n in range(len(DATA))},
    **{f"short by {n}": short_by(n) for n in range(1, len(DATA) + 1)},
    **{f"long by {n}": long_by(n) for n in (1, 2, 64, 5000)},
}
LASTS = {
    "503": (throttled(), "E208"),
    "timeout": (timed_out(), "E208"),
    "xml": (answered(ERROR_BODY), "E208"),
    "empty": (empty(), "E208"),
    "expired": (expired(), "E207"),
    "reset": (reset_after(5), "E208"),
    "short": (short_by(1), "E208"),
    "long": (long_by(1), "E208"),
    "404": (missing(), "E002"),
    "403": (denied(), "E207"),
    "507": (full(), "E200"),
    "409": (conflict(), "E203"),
    "foreign": (raised(RuntimeError), "E203"),
}


def run(rules, call):
    clock, store = Clock(), FaultyStore(MemoryStore(objects={"a": DATA}), rules)
    remote = Remote(
        "memory://test",
        connect=lambda *_: store,
        options=RemoteOptions(request_nbytes=4096, deadline_s=DEADLINE_S),
        clock=clock,
        sleep=clock.sleep,
    )
    try:
        return call(remote)
    finally:
        remote.close()
        assert clock.now <= DEADLINE_S


def fetched(remote) -> bytes:
    into = bytearray(len(DATA))
    count = [0]

    def write(start, data) -> None:
        into[start : start + len(data)] = data
        count[0] += len(data)

    remote.fetch("a", [(0, 10), (10, 40), (60, 4), (50, 10)], write)
    assert count == [len(DATA)]
    return bytes(into)


CALLS = {
    "fetch": fetched,
    "read": lambda remote: remote.read("a"),
    "read of a known size": lambda remote: remote.read("a", nbytes=len(DATA)),
    "read of a bounded size": lambda remote: remote.read("a", max_nbytes=len(DATA)),
}


@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize("call", CALLS)
def test_what_mends_gives_right_data(call, times) -> None:
    for name, effect in MENDS.items():
        if name == "expired" and times > 1:
            continue
        rules = [Rule(verb, effect, nth=range(times)) for verb in ("get", "get_all")]
        assert run(rules, CALLS[call]) == DATA, name


@pytest.mark.parametrize("fault", LASTS)
@pytest.mark.parametrize("call", CALLS)
def test_what_lasts_has_its_code(call, fault) -> None:
    effect, code = LASTS[fault]
    with pytest.raises(KVFormatError) as caught:
        run([Rule("get", effect), Rule("get_all", effect)], CALLS[call])
    assert caught.value.code == code
    assert caught.value.path == "memory://test/a"
    if code == "E208":
        assert "attempts in" in caught.value.message
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("nbytes", range(len(DATA)))
def test_an_object_cut_at_any_byte_is_damage(nbytes) -> None:
    """Not a fault of the way: no use trying until the deadline."""
    clock = Clock()
    store = MemoryStore(objects={"a": DATA[:nbytes]})
    remote = Remote("memory://test", connect=lambda *_: store, clock=clock, sleep=clock.sleep)
    for call in (fetched, CALLS["read of a known size"]):
        with pytest.raises(KVFormatError, match=str(nbytes)) as caught:
            call(remote)
        assert caught.value.code == "E005"
    assert clock.now < 5
    remote.close()


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("stat", lambda remote: remote.stat("a")),
        ("list", lambda remote: list(remote.list())),
        ("delete", lambda remote: remote.delete("b")),
        ("create", lambda remote: remote.create("b", b"x")),
        ("put", lambda remote: remote.put("b", b"x")),
    ],
)
@pytest.mark.parametrize("fault", ["503", "timeout", "expired", "403", "507", "foreign"])
def test_the_other_verbs(verb, call, fault) -> None:
    effect, code = LASTS[fault]
    with pytest.raises(KVFormatError) as caught:
        run([Rule(verb, effect)], call)
    assert caught.value.code == code
    if fault in {"503", "timeout", "expired"}:
        run([Rule(verb, effect, nth=0)], call)
