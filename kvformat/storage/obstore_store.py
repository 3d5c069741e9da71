"""An object store through obstore: S3, Google Cloud Storage and Azure, with the work outside the interpreter."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvformat.storage.attempts import run_in_thread
from kvformat.storage.obstore_options import target_of
from kvformat.storage.spool import SpooledUpload
from kvformat.storage.store import (
    Buffer,
    DeniedFault,
    ExistsFault,
    MissingFault,
    ShortFault,
    Stat,
    StoreFault,
    TransportFault,
    UnsupportedFault,
    Upload,
)
from kvformat.storage.store_faults import fault_of, fault_of_status, plain_etag

__all__ = ["ObstoreStore"]

_STATUS = re.compile(r"status code: (\d{3})[^:]*:?(?:.*?<Code>([A-Za-z0-9]+)</Code>)?", re.DOTALL)
_LIST_CHUNK = 1000
_CLASSES: dict[str, type[StoreFault]] = {
    "AlreadyExistsError": ExistsFault,
    "PreconditionError": ExistsFault,
    "PermissionDeniedError": DeniedFault,
    "UnauthenticatedError": DeniedFault,
    "NotSupportedError": UnsupportedFault,
}


class ObstoreStore:
    """Objects below a URL, through obstore with its own retries off.

    It must not be used, in any form, by the forked child of a process that used it: its threads are gone there, and
    calls wait for ever. Its time-outs belong to the client, so that a shorter one of a single call is kept by leaving
    the call to a thread.

    Parameters
    ----------
    url
        Of the directory: ``s3``, ``s3a``, ``gs``, ``gcs``, ``az``, ``abfs`` or ``abfss``.
    storage_options
        As for fsspec's file system of the scheme.
    max_requests
        Parts under way at once, of uploads that obstore splits itself.
    timeout_s
        Of the client; calls ask for as much, as a rule.
    parts
        Where uploads in parts go, for obstore has none to send one by one; without it they wait on local disk.

    Raises
    ------
    Inexpressible
        For options that obstore has no equal of.
    ImportError
        Where obstore is missing.
    """

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any] | None,
        *,
        max_requests: int,
        timeout_s: float,
        parts: Callable[[], Any] | None = None,
    ) -> None:
        import obstore
        from obstore import store as kinds

        target = target_of(url, storage_options or {}, timeout_s=timeout_s)
        self._url = url.partition("?")[0].rstrip("/")
        self._prefix = f"{target.prefix}/" if target.prefix else ""
        self._obstore = obstore
        self._max_requests = max_requests
        self._timeout_s = timeout_s
        self._parts = parts
        self._parts_store: Any = None
        try:
            self._store: Any = getattr(kinds, target.kind)(
                target.bucket,
                config=target.config,
                client_options=target.client_options,
                retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(seconds=timeout_s)},
            )
        except Exception as error:
            raise _fault(error) from error

    @property
    def url(self) -> str:
        """As given."""
        return self._url

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        """See :class:`~kvformat.storage.store.Store`; the bytes stay where obstore received them."""
        found = self._attempt(
            self._obstore.get_range, self._store, self._prefix + name, start=start, length=nbytes, timeout_s=timeout_s
        )
        view = memoryview(found)
        if len(view) < nbytes:
            raise ShortFault(f"{name}: {len(view)} bytes from {start}, expected {nbytes}")
        if len(view) > nbytes:
            raise TransportFault(f"{name}: {len(view)} bytes from {start}, expected {nbytes}")
        return view

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        """See :class:`~kvformat.storage.store.Store`."""

        def read() -> bytes:
            answer = self._obstore.get(self._store, self._prefix + name)
            nbytes = int(answer.meta["size"])
            if nbytes > max_nbytes:
                del answer
                return bytes(self._obstore.get_range(self._store, self._prefix + name, start=0, length=max_nbytes + 1))
            data = bytes(answer.bytes())
            if len(data) != nbytes:
                raise ShortFault(f"{name}: {len(data)} of {nbytes} bytes")
            return data

        return bytes(self._attempt(read, timeout_s=timeout_s))

    def stat(self, name: str, *, timeout_s: float) -> Stat:
        """See :class:`~kvformat.storage.store.Store`."""
        found = self._attempt(self._obstore.head, self._store, self._prefix + name, timeout_s=timeout_s)
        return Stat(name, int(found["size"]), plain_etag(found["e_tag"]))

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        self._put(name, data, "overwrite", timeout_s)

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        self._put(name, data, "create", timeout_s)

    def begin(self, name: str, *, timeout_s: float) -> Upload:
        """See :class:`~kvformat.storage.store.Store`."""
        if self._parts is not None:
            if self._parts_store is None:
                self._parts_store = self._parts()
            upload: Upload = self._parts_store.begin(name, timeout_s=timeout_s)
            return upload

        def send(path: Path, limit_s: float) -> None:
            self._attempt(
                self._obstore.put,
                self._store,
                self._prefix + name,
                path,
                chunk_size=8 << 20,
                max_concurrency=self._max_requests,
                timeout_s=limit_s,
            )

        return SpooledUpload(send)

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:
        """See :class:`~kvformat.storage.store.Store`."""
        # obstore's prefixes end at a slash, ours anywhere.
        whole = self._prefix + prefix
        folder = whole.rpartition("/")[0]
        pages = self._attempt(
            self._obstore.list, self._store, folder or None, chunk_size=_LIST_CHUNK, timeout_s=timeout_s
        )
        while (page := self._attempt(next, pages, None, timeout_s=timeout_s)) is not None:
            for each in page:
                if each["path"].startswith(whole):
                    yield Stat(each["path"][len(self._prefix) :], int(each["size"]), plain_etag(each["e_tag"]))

    def delete(self, name: str, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        with contextlib.suppress(MissingFault):
            self._attempt(self._obstore.delete, self._store, self._prefix + name, timeout_s=timeout_s)

    def close(self) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        if self._parts_store is not None:
            self._parts_store.close()
            self._parts_store = None
        self._store = None

    def _put(self, name: str, data: Buffer, mode: str, timeout_s: float) -> None:
        self._attempt(
            self._obstore.put,
            self._store,
            self._prefix + name,
            data,
            mode=mode,
            use_multipart=False,
            timeout_s=timeout_s,
        )

    def _attempt(self, call: Callable[..., Any], *args: Any, timeout_s: float, **options: Any) -> Any:
        try:
            # The client has a time-out of its own, and a thread for each request has its price.
            if timeout_s < 0.9 * self._timeout_s:
                return run_in_thread(lambda: call(*args, **options), timeout_s=timeout_s)
            return call(*args, **options)
        except Exception as error:
            raise _fault(error) from error


def _fault(error: Exception) -> StoreFault:
    """By the status in obstore's text, for its exceptions hold nothing else; else by their class."""
    if isinstance(error, StoreFault):
        return error
    text = str(error).partition("\n\nDebug source:")[0]
    if (found := _STATUS.search(text)) is not None:
        return fault_of_status(int(found[1]), found[2] or "")
    if "redirect without LOCATION" in text:
        return DeniedFault("the bucket is in another region: give its name as client_kwargs={'region_name': ...}")
    if kind := _CLASSES.get(type(error).__name__):
        return kind(text.partition("\n")[0])
    if type(error).__module__.startswith("obstore"):
        return TransportFault(text.partition("\n")[0])
    return fault_of(error)
