"""An object store on which chosen operations fail in the ways object stores do.

Example
-------
>>> store = FaultyStore(MemoryStore(), [Rule("get", throttled(), nth=range(3))])  # doctest: +SKIP
>>> remote = Remote(store.url, connect=lambda *_: store)  # doctest: +SKIP
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvformat.storage.store import (
    Buffer,
    DeniedFault,
    ExistsFault,
    ExpiredFault,
    FullFault,
    MissingFault,
    ShortFault,
    Stat,
    Store,
    StoreFault,
    ThrottledFault,
    TransportFault,
    Upload,
)

__all__ = [
    "ERROR_BODY",
    "Effect",
    "FaultyStore",
    "Operation",
    "Rule",
    "altered",
    "answered",
    "blocked",
    "conflict",
    "cut_after",
    "denied",
    "empty",
    "expired",
    "flipped",
    "flipped_on_the_way",
    "full",
    "long_by",
    "lost",
    "missing",
    "raised",
    "refused_own",
    "reset_after",
    "short_by",
    "stale",
    "throttled",
    "timed_out",
]

Effect = Callable[["Operation"], Any]
"""Takes the operation, does it or not, and returns an answer or raises."""

ERROR_BODY = b'<?xml version="1.0"?><Error><Code>InternalError</Code></Error>'


@dataclass(frozen=True)
class Operation:
    """What was called.

    Attributes
    ----------
    do
        Does it for real. What is written may be given instead of the data.
    data
        What is written, where something is.
    nbytes
        Bytes asked for, where a number of them is.
    """

    verb: str
    name: str
    do: Callable[..., Any]
    data: Buffer | None = None
    nbytes: int | None = None


@dataclass
class Rule:
    """Which operations an effect befalls.

    Attributes
    ----------
    verb
        Name of the method, ``part``, ``complete`` and ``abort`` of uploads included; ``*`` is any.
    name
        Pattern of the object's name, as of a shell; for ``list`` of the prefix.
    nth
        Which of the calls that match, counted from 0 over all threads; None is all of them.
    calls
        Calls that matched so far.
    """

    verb: str
    effect: Effect
    name: str = "*"
    nth: int | range | None = None
    calls: int = field(default=0, compare=False)

    def takes(self, verb: str, name: str) -> bool:
        """Whether this call is meant; counts it where verb and name match."""
        if self.verb not in ("*", verb) or not fnmatch.fnmatchcase(name, self.name):
            return False
        number = self.calls
        self.calls += 1
        return self.nth is None or number == self.nth or (isinstance(self.nth, range) and number in self.nth)


class FaultyStore:
    """Another store, with faults. Of the rules that mean a call, the first counts.

    Attributes
    ----------
    calls
        (verb, name) of every call, failed ones included.
    """

    def __init__(self, store: Store, rules: Iterable[Rule] = ()) -> None:
        self._store = store
        self._rules = list(rules)
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        """Of the store below."""
        return self._store.url

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        """See :class:`~kvformat.storage.store.Store`."""
        answer: Buffer = self._pass(
            Operation("get", name, lambda: self._store.get(name, start, nbytes, timeout_s=timeout_s), nbytes=nbytes)
        )
        return answer

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        """See :class:`~kvformat.storage.store.Store`."""
        answer = self._pass(
            Operation("get_all", name, lambda: self._store.get_all(name, max_nbytes=max_nbytes, timeout_s=timeout_s))
        )
        return bytes(answer)

    def stat(self, name: str, *, timeout_s: float) -> Stat:
        """See :class:`~kvformat.storage.store.Store`."""
        answer: Stat = self._pass(Operation("stat", name, lambda: self._store.stat(name, timeout_s=timeout_s)))
        return answer

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        do = lambda other=data: self._store.put(name, other, timeout_s=timeout_s)  # noqa: E731 -- as the others
        self._pass(Operation("put", name, do, data=data))

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        do = lambda other=data: self._store.create(name, other, timeout_s=timeout_s)  # noqa: E731 -- as the others
        self._pass(Operation("create", name, do, data=data))

    def begin(self, name: str, *, timeout_s: float) -> Upload:
        """See :class:`~kvformat.storage.store.Store`."""
        upload: Upload = self._pass(Operation("begin", name, lambda: self._store.begin(name, timeout_s=timeout_s)))
        return _FaultyUpload(upload, name, self._pass)

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:
        """See :class:`~kvformat.storage.store.Store`."""
        yield from self._pass(Operation("list", prefix, lambda: self._store.list(prefix, timeout_s=timeout_s)))

    def delete(self, name: str, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        self._pass(Operation("delete", name, lambda: self._store.delete(name, timeout_s=timeout_s)))

    def close(self) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        self._store.close()

    def _pass(self, operation: Operation) -> Any:
        with self._lock:
            self.calls.append((operation.verb, operation.name))
            taken = [rule for rule in self._rules if rule.takes(operation.verb, operation.name)]
        return taken[0].effect(operation) if taken else operation.do()


class _FaultyUpload:
    def __init__(self, upload: Upload, name: str, pass_on: Callable[[Operation], Any]) -> None:
        self._upload = upload
        self._name = name
        self._pass = pass_on

    def part(self, number: int, data: Buffer, *, timeout_s: float) -> int | None:
        do = lambda other=data: self._upload.part(number, other, timeout_s=timeout_s)  # noqa: E731 -- as the others
        found = self._pass(Operation("part", self._name, do, data=data))
        return found if isinstance(found, int) else None

    def complete(self, *, timeout_s: float) -> None:
        self._pass(Operation("complete", self._name, lambda: self._upload.complete(timeout_s=timeout_s)))

    def abort(self, *, timeout_s: float) -> None:
        self._pass(Operation("abort", self._name, lambda: self._upload.abort(timeout_s=timeout_s)))


# ------------------------------------------------------------------------------------------------------- not done


def raised(fault: Callable[[str], BaseException]) -> Effect:
    """Any exception, and nothing is done."""

    def effect(operation: Operation) -> Any:
        raise fault(f"{operation.verb} {operation.name}")

    return effect


def missing() -> Effect:
    """404."""
    return raised(MissingFault)


def denied() -> Effect:
    """403."""
    return raised(DeniedFault)


def expired() -> Effect:
    """The credentials are too old."""
    return raised(ExpiredFault)


def throttled() -> Effect:
    """503, please slow down."""
    return raised(ThrottledFault)


def timed_out() -> Effect:
    """No answer, and nothing was done."""
    return raised(TransportFault)


def conflict() -> Effect:
    """409: another creation is under way."""
    return raised(ExistsFault)


def full() -> Effect:
    """507, a quota, ENOSPC."""
    return raised(FullFault)


def blocked(released: threading.Event, begun: threading.Event | None = None) -> Effect:
    """Waits for an event, whatever the time-out; then does it."""

    def effect(operation: Operation) -> Any:
        if begun is not None:
            begun.set()
        released.wait()
        return operation.do()

    return effect


# --------------------------------------------------------------------------------------------- done, but not heard of


def lost() -> Effect:
    """Done, and the answer never came."""

    def effect(operation: Operation) -> Any:
        operation.do()
        raise TransportFault(f"{operation.verb} {operation.name}: no answer")

    return effect


def refused_own() -> Effect:
    """412 for one's own success: a client below tried twice."""

    def effect(operation: Operation) -> Any:
        operation.do()
        raise ExistsFault(f"{operation.verb} {operation.name}: precondition failed")

    return effect


# ---------------------------------------------------------------------------------------------------- wrong answers


def reset_after(nbytes: int) -> Effect:
    """The connection is cut after so many bytes."""

    def effect(operation: Operation) -> Any:
        operation.do()
        raise ShortFault(f"{operation.verb} {operation.name}: reset after {nbytes} bytes")

    return effect


def altered(change: Callable[[bytes], bytes]) -> Effect:
    """Another body than there is, with status 200."""
    return lambda operation: change(bytes(operation.do()))


def answered(body: bytes) -> Effect:
    """Whatever was asked for, these bytes with status 200."""
    return altered(lambda _: body)


def empty() -> Effect:
    """No body, with status 200."""
    return answered(b"")


def short_by(nbytes: int) -> Effect:
    """The last bytes are left out."""
    return altered(lambda data: data[: max(0, len(data) - nbytes)])


def long_by(nbytes: int) -> Effect:
    """More bytes than asked for."""
    return altered(lambda data: data + b"\0" * nbytes)


def flipped(offset: int = 0) -> Effect:
    """One bit of what is read is another."""
    return altered(lambda data: _flip(data, offset))


def flipped_on_the_way(offset: int = 0) -> Effect:
    """One bit of what is written is another in the object."""

    def effect(operation: Operation) -> Any:
        assert operation.data is not None, operation
        return operation.do(_flip(bytes(operation.data), offset))

    return effect


def stale(stats: Sequence[Stat] = (), *, without: str = "") -> Effect:
    """A listing of another time: without the names that match, and with others."""

    def effect(operation: Operation) -> Iterator[Stat]:
        yield from stats
        for stat in operation.do():
            if not fnmatch.fnmatchcase(stat.name, without):
                yield stat

    return effect


def cut_after(count: int, fault: Callable[[str], StoreFault] = TransportFault) -> Effect:
    """A listing fails after so many objects."""

    def effect(operation: Operation) -> Iterator[Stat]:
        for number, stat in enumerate(operation.do()):
            if number == count:
                break
            yield stat
        raise fault(f"list {operation.name}: cut after {count}")

    return effect


def _flip(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
