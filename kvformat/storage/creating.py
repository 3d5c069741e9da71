"""Making an object unless one is there, whatever becomes of the answers."""

from __future__ import annotations

from kvformat.storage.fetching import countdown, read_whole
from kvformat.storage.store import Buffer, ExistsFault, MissingFault, Store, TransportFault

__all__ = ["Creation"]


class Creation:
    """Attempts of one creation.

    An answer that was lost leaves open whether the object was made, and a refusal whether it was made by the attempt
    before: what is there decides.
    """

    def __init__(self, name: str, data: Buffer) -> None:
        self._name = name
        self._data = bytes(data)
        self._tried = False

    def attempt(self, store: Store, timeout_s: float) -> bool:
        """Whether what is there now is the data."""
        left = countdown(timeout_s)
        if self._tried:
            equal = self._compare(store, left())
            if equal is not None:
                return equal
        self._tried = True
        try:
            store.create(self._name, self._data, timeout_s=left())
        except ExistsFault as fault:
            equal = self._compare(store, left())
            if equal is None:
                raise TransportFault("refused because of another object, and none is there") from fault
            return equal
        return True

    def _compare(self, store: Store, timeout_s: float) -> bool | None:
        """Whether the data are there; None where nothing is.

        A loser must know it lost, and nobody else may think so: bytes that differ are read twice.
        """
        limit = len(self._data)
        left = countdown(timeout_s)
        before = None
        for _ in range(2):
            try:
                found = read_whole(store, self._name, limit=limit, timeout_s=left())[: limit + 1]
            except MissingFault:
                return None
            if found == self._data:
                return True
            if found == before:
                return False
            before = found
        raise TransportFault("two reads of the object differ")
