"""Who is at work, in words, and what to do about it for whoever is kept out. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvformat.write.worker_state import STALE_S, Worker, is_alive, is_loading

__all__ = ["at_work", "gone_in_s"]


def at_work(workers: Iterable[Worker], *, now: float, then: str) -> str:
    """Which worker is there, and how to get past it: of several, one that lives for certain, else the last to be gone.

    Parameters
    ----------
    workers
        At least one of which lives, or may do so.
    now
        Seconds since 1970.
    then
        What can be done once all are gone, such as ``run this again``.
    """
    alive = [worker for worker in workers if is_alive(worker)]
    live = [worker for worker in alive if worker.liveness == "live"]
    state = (live[0] if live else max(alive, key=lambda worker: worker.state.updated)).state
    who = f"worker {state.rank} of {state.world_size} ({state.host}, pid {state.pid})"
    if live:
        what = "is loading its model" if is_loading(state) else "is at work"
        return f"{who} {what}: wait for it to end, or stop it, and {then}"
    return (
        f"{who} was heard of {max(now - state.updated, 0.0):.0f} s ago, and whether it still runs cannot be told from "
        f"here: where it does, wait for it to end, or stop it; where it was killed, it counts as gone {STALE_S:.0f} s "
        f"after its last word: {then} in {gone_in_s(now - state.updated):.0f} s"
    )


def gone_in_s(silent_s: float) -> float:
    """In how many seconds one that cannot be asked counts as gone, where it says no more; a little more than exact."""
    return max(STALE_S - max(silent_s, 0.0), 0.0) + 1.0
