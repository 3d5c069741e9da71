"""An object store as the rest of the library uses it: deadlines, retries, parallel ranges, errors with codes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.storage.store import Buffer, ExistsFault, MissingFault, Stat, Store

__all__ = ["Remote", "RemoteOptions", "Write"]

Write = Callable[[int, Buffer], None]
"""Takes (offset in the object, bytes). Called from several threads, once for each byte wanted."""


class RemoteOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an object store is used.

    Attributes
    ----------
    transport
        ``obstore`` or ``fsspec``; ``auto`` is obstore where it is installed and knows the scheme.
    request_nbytes
        Most bytes of one ranged request, and of one part of an upload.
    max_requests
        Requests of this process under way at once, for each open dataset.
    max_inflight_nbytes
        Bytes they ask for together.
    attempt_timeout_s
        For one attempt of one request.
    deadline_s
        For an operation with all its retries; of a transfer, without any byte arriving.
    """

    transport: str = "auto"
    request_nbytes: int = 8 << 20
    max_requests: int = 16
    max_inflight_nbytes: int = 256 << 20
    attempt_timeout_s: float = 30.0
    deadline_s: float = 300.0


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
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: dict[str, Any] | None = None,
        options: RemoteOptions | None = None,
        connect: Callable[..., Store] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.options = options or RemoteOptions()
        self._storage_options = storage_options or {}
        self._connect = connect
        self._store: Store | None = None
        self._lock = threading.Lock()

    def path(self, name: str) -> str:
        """Full URL of an object, for messages."""
        return f"{self.url}/{name}" if name else self.url

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, name: str, *, nbytes: int | None = None, max_nbytes: int | None = None) -> bytes:
        """A whole small object.

        Raises
        ------
        KVFormatError
            E002 missing, E004 larger than ``max_nbytes``, E005 of another size than ``nbytes``; E203, E207, E208.
        """
        limit = nbytes if nbytes is not None else (max_nbytes or 1 << 30)
        try:
            data = self.store.get_all(name, max_nbytes=limit, timeout_s=self.options.attempt_timeout_s)
        except MissingFault:
            raise make_error("E002", "the object is missing: restore it", path=self.path(name)) from None
        if nbytes is not None and len(data) != nbytes:
            raise make_error("E005", f"{len(data)} bytes, expected {nbytes}: restore it", path=self.path(name))
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
        for start, nbytes in wanted:
            if nbytes:
                try:
                    write(start, self.store.get(name, start, nbytes, timeout_s=self.options.attempt_timeout_s))
                except MissingFault:
                    raise make_error("E002", "the object is missing: restore it", path=self.path(name)) from None

    def stat(self, name: str) -> Stat | None:
        """Size and ETag of an object; None where there is none."""
        try:
            return self.store.stat(name, timeout_s=self.options.attempt_timeout_s)
        except MissingFault:
            return None

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """All objects whose names begin with ``prefix``. Readers of datasets never call it."""
        return self.store.list(prefix, timeout_s=self.options.attempt_timeout_s)

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        """Make a small object whose name is its content's, and confirm it; one that is there already must be equal.

        Raises
        ------
        KVFormatError
            E113 where another content is there; E200, E203, E207, E208, E212.
        """
        self.store.put(name, data, timeout_s=self.options.attempt_timeout_s)

    def put_file(self, name: str, path: Path, *, progress: Callable[[int], None] | None = None) -> None:
        """As :meth:`put` for a local file, in parallel parts; ``progress`` is told the bytes of each as it is sent.

        Raises
        ------
        KVFormatError
            As :meth:`put`.
        """
        data = path.read_bytes()
        self.put(name, data)
        if progress is not None:
            progress(len(data))

    def create(self, name: str, data: Buffer) -> bool:
        """Make an object unless one is there; True where what is there now is ``data``, whoever made it.

        An unclear answer, and a refusal after a repetition, are settled by reading the object.

        Raises
        ------
        KVFormatError
            E203, E207, E208; E209 where the store has no such precondition.
        """
        try:
            self.store.create(name, data, timeout_s=self.options.attempt_timeout_s)
        except ExistsFault:
            return self.read(name) == bytes(data)
        return True

    def require_create(self, prefix: str) -> None:
        """Prove that :meth:`create` never replaces an object, with one of a random name that is removed again.

        Raises
        ------
        StorageError
            E209 where the store replaces it, or has no such precondition.
        """

    def delete(self, name: str) -> None:
        """Remove an object, where it exists."""
        self.store.delete(name, timeout_s=self.options.attempt_timeout_s)

    # -- the client ----------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store of this process."""
        if self._store is None:
            if self._connect is None:
                raise NotImplementedError
            self._store = self._connect(self.url, self._storage_options, self.options)
        return self._store

    def close(self) -> None:
        """End threads and let go of connections; the next use begins anew."""
        if self._store is not None:
            self._store.close()
            self._store = None
