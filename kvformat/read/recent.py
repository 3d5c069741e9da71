"""What was used lately, for several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key, in the order of their last use. Safe in threads without a lock, which a fork could find held.

    No value is replaced in its place: where the finaliser of the old one lets another thread run, and that one removes
    the key, CPython's OrderedDict keeps a key in its order that it does not hold, and gives up no entry ever after.

    Parameters
    ----------
    most
        Values that :meth:`put` leaves; without it, :meth:`beyond` is the caller's.
    """

    def __init__(self, most: int | None = None) -> None:
        self._found: OrderedDict[K, V] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: K) -> bool:
        return key in self._found

    def get(self, key: K) -> V | None:
        """The value, whose use this does not count as."""
        return self._found.get(key)

    def put(self, key: K, value: V) -> None:
        """Add as the latest, instead of an earlier value; of several threads at once, one has its way."""
        earlier = self._found.pop(key, None)
        self._found.setdefault(key, value)
        del earlier  # not before: it may let other threads run
        if self._most is not None:
            for _ in self.beyond(self._most):
                pass

    def touch(self, key: K) -> bool:
        """Count a use; False where the key is gone."""
        try:
            self._found.move_to_end(key)
        except KeyError:
            return False
        return True

    def beyond(self, most: int) -> Iterator[tuple[K, V]]:
        """Take out, and give, what was used longest ago, until ``most`` are left."""
        while len(self._found) > most:
            try:
                oldest = self._found.popitem(last=False)
            except KeyError:  # other threads took the rest
                return
            yield oldest

    def values(self) -> list[V]:
        """All of them, the one used longest ago first."""
        return list(self._found.values())
