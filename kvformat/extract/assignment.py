"""Which shard a worker makes next. Workers that look at the same facts need not talk to each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvformat.write.worker_state import STALE_S, WorkerState

__all__ = ["Movement", "next_shard"]

_WORTH_REPEATING = 0.5


def next_shard(missing: Collection[int], in_hand: Mapping[int, float], *, rank: int, world_size: int) -> int | None:
    """The shard to make next; None while there is nothing worth doing.

    First come the worker's own: those whose ordinal is its rank modulo the number of workers, in order. Then, of what
    others have not begun, it takes from the end, where they come last. What a live worker has in hand is repeated
    where less than half of it is done: its first receipt decides, and the twin is dropped.

    Parameters
    ----------
    missing
        Ordinals of the shards nobody finished.
    in_hand
        Of shards other live workers are at, the part that is done, 0 to 1.
    """
    begun = [ordinal for ordinal in missing if ordinal in in_hand]
    free = sorted(ordinal for ordinal in missing if ordinal not in in_hand)
    own = [ordinal for ordinal in free if ordinal % world_size == rank]
    if own:
        return own[0]
    if free:
        return free[-1 - rank % len(free)]  # two idle workers seldom take the same
    slow = sorted((in_hand[ordinal], ordinal) for ordinal in begun if in_hand[ordinal] < _WORTH_REPEATING)
    return slow[rank % len(slow)][1] if slow else None


class Movement:
    """Which other workers get on. One that hangs may live, and say so for ever: what it has in hand stands still.

    Goes by what this worker sees and when, as the clocks of others may differ from its own.

    Parameters
    ----------
    clock
        Seconds that only grow.
    patience_s
        How long one may stand still.
    """

    def __init__(self, clock: Callable[[], float], *, patience_s: float = STALE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._seen: dict[str, tuple[tuple[object, ...], float]] = {}  # by token: how far it was, and since when

    def gets_on(self, state: WorkerState) -> bool:
        """Whether a worker got on since it was looked at first, or that is a short while ago."""
        now = self._clock()
        far = state.phase, state.shard, state.shard_records, state.num_shards, state.num_tokens
        before, since = self._seen.get(state.token, (None, now))
        if before != far:
            since = now
            self._seen[state.token] = far, now
        return now - since < self._patience_s
