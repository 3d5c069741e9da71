"""An object store in memory: what tests and applications without a server use."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Iterator

from kvformat.storage.store import Buffer, ExistsFault, MissingFault, ShortFault, Stat, TransportFault

__all__ = ["MemoryStore"]


class MemoryStore:
    """Objects in a dict, with the semantics of :class:`~kvformat.storage.store.Store`.

    Attributes
    ----------
    objects
        Content by name; tests look at it and change it.
    calls
        (operation, name) of every call so far.
    states_crc32
        Whether it says what arrived of each part of an upload, as S3 does.
    """

    states_crc32 = False

    def __init__(self, url: str = "memory://test", objects: dict[str, bytes] | None = None) -> None:
        self._url = url
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """As given."""
        return self._url

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:  # noqa: ARG002 -- never waits
        """A slice."""
        self.calls.append(("get", name))
        found = memoryview(self._find(name))[start : start + nbytes]
        if len(found) != nbytes:
            raise ShortFault(f"{name}: {len(found)} bytes from {start}, expected {nbytes}")
        return found

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:  # noqa: ARG002 -- never waits
        """All of it."""
        self.calls.append(("get_all", name))
        return self._find(name)[: max_nbytes + 1]

    def stat(self, name: str, *, timeout_s: float) -> Stat:  # noqa: ARG002 -- never waits
        """Size and MD5, as stores give it for objects put in one piece."""
        self.calls.append(("stat", name))
        found = self._find(name)
        return Stat(name, len(found), hashlib.md5(found, usedforsecurity=False).hexdigest())

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:  # noqa: ARG002 -- never waits
        """Replace."""
        self.calls.append(("put", name))
        self.objects[name] = bytes(data)

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:  # noqa: ARG002 -- never waits
        """Make, unless it is there."""
        self.calls.append(("create", name))
        with self._lock:
            if name in self.objects:
                raise ExistsFault(name)
            self.objects[name] = bytes(data)

    def begin(self, name: str, *, timeout_s: float) -> _Upload:  # noqa: ARG002 -- never waits
        """Begin an upload."""
        self.calls.append(("begin", name))
        return _Upload(self, name)

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:  # noqa: ARG002 -- never waits
        """All that begin with it, sorted."""
        self.calls.append(("list", prefix))
        for name in sorted(self.objects):
            if name.startswith(prefix):
                yield Stat(name, len(self.objects[name]))

    def delete(self, name: str, *, timeout_s: float) -> None:  # noqa: ARG002 -- never waits
        """Remove."""
        self.calls.append(("delete", name))
        self.objects.pop(name, None)

    def close(self) -> None:
        """Nothing to close."""

    def _find(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise MissingFault(name) from None


class _Upload:
    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._parts: dict[int, bytes] = {}

    def part(self, number: int, data: Buffer, *, timeout_s: float) -> int | None:  # noqa: ARG002 -- never waits
        self._store.calls.append(("part", self._name))
        self._parts[number] = bytes(data)
        return zlib.crc32(data) if self._store.states_crc32 else None

    def complete(self, *, timeout_s: float) -> None:  # noqa: ARG002 -- never waits
        self._store.calls.append(("complete", self._name))
        numbers = sorted(self._parts)
        if numbers != list(range(1, len(numbers) + 1)):
            raise TransportFault(f"parts {numbers} were sent, expected 1 to {numbers[-1]}")
        self._store.objects[self._name] = b"".join(self._parts[number] for number in sorted(self._parts))

    def abort(self, *, timeout_s: float) -> None:  # noqa: ARG002 -- never waits
        self._parts.clear()
