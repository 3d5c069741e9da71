"""Reading objects so that lengths decide: ranges in parallel, and whole small ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.operation import Task
from kvformat.storage.ranges import Request, plan_requests
from kvformat.storage.retry import Deadline
from kvformat.storage.session import Session
from kvformat.storage.store import Buffer, ShortFault, Store, TransportFault, UnsupportedFault

__all__ = ["GAP_NBYTES", "Write", "countdown", "fetch", "placing", "read_sized", "read_whole", "wrong_size"]

Write = Callable[[int, Buffer], object]
"""Takes (offset in the object, bytes). Called from several threads, once for each byte wanted."""

GAP_NBYTES = 256 << 10
"""What takes less time to bring than another request: 2 to 5 ms of a connection."""


def placing(into: memoryview, start: int = 0) -> Write:
    """Puts what is fetched into memory that holds an object from ``start`` on."""

    def write(at: int, data: Buffer) -> None:
        into[at - start : at - start + len(data)] = data

    return write


def fetch(
    session: Session,
    name: str,
    wanted: Sequence[tuple[int, int]],
    write: Write,
    *,
    request_nbytes: int,
    deadline: Deadline,
    path: str,
) -> None:
    """See :meth:`~kvformat.storage.remote.Remote.fetch`; faults are raised as they are.

    Parameters
    ----------
    path
        Of the object, for messages.
    """
    ranges = plan_requests(wanted, request_nbytes=request_nbytes, gap_nbytes=GAP_NBYTES)
    tasks = [Task(_Range(name, request, path).attempt, _into(write, request), request.nbytes) for request in ranges]
    if tasks:
        session.run(tasks, deadline, answered=lambda _: deadline.renew())


def read_sized(store: Store, name: str, nbytes: int, *, timeout_s: float, path: str) -> bytes:
    """A whole object of a known size, in one request; E005 where its size is another one."""
    left = countdown(timeout_s)
    data = store.get_all(name, max_nbytes=nbytes, timeout_s=left())
    if len(data) == nbytes:
        return data
    try:
        found = store.stat(name, timeout_s=left()).nbytes
    except UnsupportedFault:
        found = len(data)
    if found != nbytes:
        raise wrong_size(found, nbytes, path)
    raise TransportFault(f"{len(data)} bytes came of an object of {nbytes}")


def read_whole(store: Store, name: str, *, limit: int, timeout_s: float) -> bytes:
    """A whole object of unknown size, at most ``limit`` bytes, else more than that.

    An answer cut short, or an error page with status 200, is no object: what the store says of the size decides.
    """
    left = countdown(timeout_s)
    data = store.get_all(name, max_nbytes=limit, timeout_s=left())
    try:
        nbytes = store.stat(name, timeout_s=left()).nbytes
    except UnsupportedFault:
        return data
    if len(data) != nbytes and min(len(data), nbytes) <= limit:
        raise TransportFault(f"{len(data)} bytes came of an object of {nbytes}")
    return data


def wrong_size(found: int, expected: int, path: str) -> KVFormatError:
    """E005 for a whole object."""
    return make_error("E005", f"{found} bytes, expected {expected}: restore the object from a copy", path=path)


def countdown(timeout_s: float) -> Callable[[], float]:
    """Seconds left for the next step of an attempt; a little, where there are none, and the attempt ends late."""
    end = time.monotonic() + timeout_s
    return lambda: max(end - time.monotonic(), timeout_s / 8)


class _Range:
    """Attempts of one ranged request."""

    def __init__(self, name: str, request: Request, path: str) -> None:
        self._name = name
        self._request = request
        self._path = path
        self._cut = False

    def attempt(self, store: Store, timeout_s: float) -> memoryview:
        start, nbytes, _ = self._request
        left = countdown(timeout_s)
        try:
            data = memoryview(store.get(self._name, start, nbytes, timeout_s=left())).cast("B")
            if len(data) > nbytes:
                raise TransportFault(f"{len(data)} bytes came for {nbytes}")
            if len(data) < nbytes:
                raise ShortFault(f"{len(data)} bytes came for {nbytes}")
        except ShortFault:
            if self._cut:  # twice: is there more at all?
                self._require_end(store, start + nbytes, left())
            self._cut = True
            raise
        return data

    def _require_end(self, store: Store, end: int, timeout_s: float) -> None:
        try:
            found = store.stat(self._name, timeout_s=timeout_s).nbytes
        except UnsupportedFault:
            return
        if found < end:
            raise make_error(
                "E005",
                f"the object ends at {found}, expected {end} bytes at least: restore it from a copy",
                path=self._path,
            )


def _into(write: Write, request: Request) -> Callable[[memoryview], None]:
    def deliver(data: memoryview) -> None:
        for start, nbytes in request.pieces:
            offset = start - request.start
            write(start, data[offset : offset + nbytes])

    return deliver
