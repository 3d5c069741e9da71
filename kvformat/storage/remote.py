"""An object store as the rest of the library uses it: deadlines, retries, parallel ranges, errors with codes.

Where to look: ``ranges`` plans requests, ``requests`` runs them in threads within bounds, ``retry`` says which faults
are tried again and when, ``operation`` drives both to an end, ``session`` holds what belongs to one process. Upon them
``fetching`` reads, ``creating`` commits, ``uploading`` sends and confirms; ``store_errors`` says how it all may fail.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvformat.errors import KVFormatError, make_error
from kvformat.storage import faults
from kvformat.storage.creating import Creation
from kvformat.storage.fetching import Write, fetch, placing, read_sized, read_whole, wrong_size
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.retry import Deadline, Timing
from kvformat.storage.session import Session
from kvformat.storage.store import Buffer, MissingFault, Stat, Store, UnsupportedFault
from kvformat.storage.store_errors import Redactor, translated
from kvformat.storage.uploading import Content, FileContent, MemoryContent, Uploading

__all__ = ["Remote", "Write"]

_MOST_NBYTES = 1 << 30
_LISTED_AT_ONCE = 1000
_INHERITED: list[Session] = []
"""Sessions of a parent process: to end them here would say farewell on connections that are still in use there."""


class Remote:
    """Objects below one URL.

    It pickles to URL and options, and makes its client anew in every process: after fork too.

    Parameters
    ----------
    url
        Of the directory, for example ``s3://bucket/prefix``.
    storage_options
        What fsspec's file system of the scheme takes: credentials, endpoint. Kept out of messages.
    options
        See :class:`RemoteOptions`.
    connect
        Makes the store, given URL, storage options and options; tests bring their own.
    clock, sleep
        In place of the system's, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: dict[str, Any] | None = None,
        options: RemoteOptions | None = None,
        connect: Callable[..., Store] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._sessions: dict[int, Session] = {}
        self.url = url.rstrip("/")
        self.options = options or RemoteOptions()
        self._storage_options = storage_options or {}
        self._connect = connect
        self._timing = Timing(clock, sleep)
        self._redact = Redactor(self._storage_options)

    def __reduce__(self) -> tuple[Any, ...]:
        timing = self._timing
        return _rebuild, (self.url, self._storage_options, self.options, self._connect, timing.clock, timing.sleep)

    def __repr__(self) -> str:
        return f"Remote({self.path('')!r})"

    def __del__(self, *, inherited: list[Session] = _INHERITED, process: Callable[[], int] = os.getpid) -> None:
        # Bound here: when the interpreter exits, the module's names may be None by now.
        own = process()
        inherited.extend(session for maker, session in self._sessions.items() if maker != own)

    def path(self, name: str) -> str:
        """Full URL of an object, for messages: without user names, and without what follows a question mark."""
        url = self._redact(self.url).removesuffix("?...")
        return f"{url}/{name}" if name else url

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, name: str, *, nbytes: int | None = None, max_nbytes: int | None = None) -> bytes:
        """A whole small object.

        Raises
        ------
        KVFormatError
            E002 missing, E004 larger than ``max_nbytes``, E005 of another size than ``nbytes``; E203, E207, E208.
        """
        with self._translated(name):
            if nbytes is not None:
                return self._read_sized(name, nbytes)
            limit = _MOST_NBYTES if max_nbytes is None else max_nbytes
            data: bytes = self._session.ask(
                lambda store, timeout_s: read_whole(store, name, limit=limit, timeout_s=timeout_s),
                self._session.deadline(),
                nbytes=min(limit, self._request_nbytes),
            )
        if len(data) > limit:
            raise make_error("E004", f"more than {limit} bytes", path=self.path(name))
        return data

    def fetch(self, name: str, wanted: Sequence[tuple[int, int]], write: Write) -> None:
        """Read ranges of an object in parallel, and give out each byte wanted exactly once.

        Neighbours are fetched in one request, what is larger than ``request_nbytes`` in several. When this returns,
        ``write`` was called for every byte; when it raises, it is not called any more.

        Parameters
        ----------
        wanted
            (start, number of bytes), in any order, not overlapping.

        Raises
        ------
        KVFormatError
            E002 missing, E005 where the object ends before; E203, E207, E208.
        """
        with self._translated(name):
            self._fetch(name, wanted, write, self._session.deadline())

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fill memory from ``start`` of an object; errors as :meth:`fetch`."""
        self.fetch(name, [(start, len(into))], placing(into, start))

    def stat(self, name: str) -> Stat | None:
        """Size and ETag of an object; None where there is none."""
        session = self._session
        with self._translated(name):
            try:
                found: Stat = session.ask(
                    lambda store, timeout_s: store.stat(name, timeout_s=timeout_s), session.deadline()
                )
            except MissingFault:
                return None
        return found

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """All objects whose names begin with ``prefix``. Readers of datasets never call it.

        A listing that fails half way begins again, and leaves out what was listed already.
        """
        session = self._session
        deadline = session.deadline()
        listing = _Listing(prefix)
        seen: set[str] = set()
        while True:
            with self._translated(prefix):
                try:
                    page = listing.take(session.ask(listing.attempt, deadline))
                except MissingFault:  # where names are paths, a prefix without objects is a missing directory
                    return
            if not page:
                return
            new = [stat for stat in page if stat.name not in seen]
            seen.update(stat.name for stat in new)
            yield from new
            if new:
                deadline.renew()

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        """Make a small object whose name is its content's, and confirm it; one that is there already must be equal.

        Raises
        ------
        KVFormatError
            E113 where another content is there; E200, E203, E207, E208, E212.
        """
        self._upload(name, MemoryContent(data), None)

    def put_file(self, name: str, path: Path, *, progress: Callable[[int], None] | None = None) -> None:
        """As :meth:`put` for a local file, in parallel parts; ``progress`` is told the bytes of each as it is sent.

        Raises
        ------
        KVFormatError
            As :meth:`put`.
        """
        with faults.translated(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._upload(name, FileContent(fd, str(path)), progress)
        finally:
            os.close(fd)

    def create(self, name: str, data: Buffer) -> bool:
        """Make an object unless one is there; True where what is there now is ``data``, whoever made it.

        An unclear answer, and a refusal after a repetition, are settled by reading the object.

        Raises
        ------
        KVFormatError
            E203, E207, E208; E209 where the store has no such precondition.
        """
        session = self._session
        with self._translated(name, making=True):
            try:
                made: bool = session.ask(Creation(name, data).attempt, session.deadline())
            except UnsupportedFault as fault:
                raise self._no_precondition(f"has no conditional writes ({self._redact(str(fault))})", name) from None
        return made

    def require_create(self, prefix: str) -> None:
        """Prove that :meth:`create` never replaces an object, with one of a random name that is removed again.

        Raises
        ------
        StorageError
            E209 where the store replaces it, or has no such precondition.
        """
        name = f"{prefix}probe-{secrets.token_hex(16)}"
        first, second = secrets.token_bytes(32), secrets.token_bytes(32)
        try:
            if not self.create(name, first):
                raise self._no_precondition("did not make an object where there was none", name)
            # Read twice, in case it was damaged on the way.
            if self.create(name, second) or all(self.read(name, nbytes=len(first)) != first for _ in range(2)):
                raise self._no_precondition("replaced an object that was to be left alone", name)
        except BaseException:
            with suppress(KVFormatError):  # the first failure says more
                self.delete(name)
            raise
        self.delete(name)

    def delete(self, name: str) -> None:
        """Remove an object, where it exists."""
        session = self._session
        with self._translated(name), suppress(MissingFault):
            session.ask(lambda store, timeout_s: store.delete(name, timeout_s=timeout_s), session.deadline())

    # -- the client ----------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store of this process."""
        return self._session.store

    def close(self) -> None:
        """End threads and let go of connections; the next use begins anew."""
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.close()

    @property
    def _session(self) -> Session:
        """What belongs to this process. A lock around this might be inherited locked."""
        process = os.getpid()
        session = self._sessions.get(process)
        if session is None:
            options, where, redact = self.options, self.path(""), self._redact
            session = self._sessions.setdefault(
                process,
                Session(
                    partial(_connected, self._connect, self.url, self._storage_options, options),
                    max_requests=options.max_requests,
                    max_nbytes=options.max_inflight_nbytes,
                    attempt_timeout_s=options.attempt_timeout_s,
                    deadline_s=options.deadline_s,
                    timing=self._timing,
                    describe=lambda fault: f"{where}: {redact(fault)}",
                ),
            )
        return session

    @property
    def _request_nbytes(self) -> int:
        return min(self.options.request_nbytes, self.options.max_inflight_nbytes)

    def _translated(self, name: str, *, making: bool = False) -> AbstractContextManager[None]:
        return translated(self.path(name), self._redact, making=making)

    def _fetch(self, name: str, wanted: Sequence[tuple[int, int]], write: Write, deadline: Deadline) -> None:
        fetch(
            self._session,
            name,
            wanted,
            write,
            request_nbytes=self._request_nbytes,
            deadline=deadline,
            path=self.path(name),
        )

    def _read_sized(self, name: str, nbytes: int) -> bytes:
        session, path = self._session, self.path(name)
        deadline = session.deadline()
        if nbytes <= self._request_nbytes:
            data: bytes = session.ask(
                lambda store, timeout_s: read_sized(store, name, nbytes, timeout_s=timeout_s, path=path),
                deadline,
                nbytes=nbytes,
            )
            return data
        found: Stat = session.ask(lambda store, timeout_s: store.stat(name, timeout_s=timeout_s), deadline)
        if found.nbytes != nbytes:
            raise wrong_size(found.nbytes, nbytes, path)
        into = bytearray(nbytes)
        self._fetch(name, [(0, nbytes)], placing(memoryview(into)), deadline)
        return bytes(into)

    def _upload(self, name: str, content: Content, progress: Callable[[int], None] | None) -> None:
        uploading = Uploading(
            self._session,
            name,
            content,
            request_nbytes=self._request_nbytes,
            path=self.path(name),
            progress=progress,
        )
        with self._translated(name, making=True):
            uploading.run()

    def _no_precondition(self, what: str, name: str) -> KVFormatError:
        return make_error(
            "E209",
            f"the store {what}, so that two writers could replace each other's dataset: use a store that honours "
            "`If-None-Match: *`, or write to a local disk and let a single writer copy it",
            path=self.path(name),
        )


class _Listing:
    """A listing, page by page. One that failed, or did not come back, is begun again."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._under_way: Iterator[Stat] | None = None

    def attempt(self, store: Store, timeout_s: float) -> tuple[Iterator[Stat], list[Stat]]:
        stats, self._under_way = self._under_way, None
        if stats is None:
            stats = iter(store.list(self._prefix, timeout_s=timeout_s))
        return stats, list(itertools.islice(stats, _LISTED_AT_ONCE))

    def take(self, answer: tuple[Iterator[Stat], list[Stat]]) -> list[Stat]:
        """The page; the listing goes on where it was counted, not where an attempt that was given up left it."""
        self._under_way, page = answer
        return page


def _connected(
    connect: Callable[..., Store] | None, url: str, storage_options: dict[str, Any], options: RemoteOptions
) -> Store:
    if connect is not None:
        return connect(url, storage_options, options)
    from kvformat.storage.connect import connect as by_scheme

    return by_scheme(url, storage_options, options)


def _rebuild(
    url: str,
    storage_options: dict[str, Any],
    options: RemoteOptions,
    connect: Callable[..., Store] | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None] | None,
) -> Remote:
    return Remote(url, storage_options=storage_options, options=options, connect=connect, clock=clock, sleep=sleep)
