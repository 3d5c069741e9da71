"""What a worker says of itself, and who counts as alive."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvformat.write.worker_state import STALE_S, Worker, WorkerState, is_alive, liveness_of

STATE = WorkerState(
    rank=3, world_size=8, host="node", pid=1, token="0123abcd", started=100.0, updated=200.0, shard=7, nbytes=1 << 40
)


def test_states_survive_a_file():
    assert STATE.name == "worker-3-0123abcd.json"
    assert WorkerState.is_name(STATE.name)
    assert WorkerState.decode(STATE.encode()) == STATE
    assert WorkerState.decode(STATE.encode().replace(b"{", b'{"later":1,', 1)) == STATE
    for data in (b"", b"{}", b"[]", STATE.encode()[:-1], b"\xff"):
        assert WorkerState.decode(data) is None
    for name in ("worker-3-0123abcd.json.part", "00000003.json", "worker--0123abcd.json"):
        assert not WorkerState.is_name(name)


@pytest.mark.parametrize(
    ("held", "here", "age", "expected"),
    [
        (True, True, 0, "live"),
        (True, False, 10 * STALE_S, "live"),
        (False, True, 0, "dead"),
        (False, False, 0, "unknown"),  # a lock may reach no further than its machine
        (False, False, STALE_S, "unknown"),
        (False, False, STALE_S + 1, "stale"),
        (None, True, 0, "unknown"),
        (None, True, STALE_S + 1, "stale"),
        (None, False, -60, "unknown"),  # another clock
    ],
)
def test_who_lives(held, here, age, expected):
    found = liveness_of(STATE, held=held, here=here, now=STATE.updated + age)
    assert found == expected
    assert is_alive(Worker(replace(STATE), found)) == (expected in ("live", "unknown"))
