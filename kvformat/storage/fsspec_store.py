"""An object store through fsspec: every scheme it has a package for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvformat.storage.attempts import run_coroutine, run_in_thread
from kvformat.storage.fsspec_files import AsyncFiles, SyncFiles
from kvformat.storage.fsspec_http import HttpFiles
from kvformat.storage.fsspec_local import DirectoryFiles, MemoryFiles
from kvformat.storage.fsspec_s3 import S3Files, s3_options
from kvformat.storage.spool import SpooledUpload
from kvformat.storage.store import Buffer, MissingFault, ShortFault, Stat, StoreFault, TransportFault, Upload
from kvformat.storage.store_faults import fault_of

__all__ = ["FsspecStore"]

_CLOSE_TIMEOUT_S = 5.0
_FILES: dict[str, type[Any]] = {
    "s3": S3Files,
    "s3a": S3Files,
    "http": HttpFiles,
    "https": HttpFiles,
    "memory": MemoryFiles,
    "file": DirectoryFiles,
    "local": DirectoryFiles,
}


class FsspecStore:
    """Objects below a URL, through the file system that fsspec has for its scheme.

    File systems of coroutines share fsspec's event loop, and a time-out cancels the attempt. Blocking ones run each
    attempt in a thread, which a time-out leaves behind. S3 takes uploads in parts; elsewhere the parts wait on local
    disk until the upload completes (:class:`~kvformat.storage.spool.SpooledUpload`).

    Parameters
    ----------
    url
        Of the directory, for example ``s3://bucket/prefix``.
    storage_options
        For the file system of the scheme.
    max_requests
        Connections kept open.
    filesystem
        Instead of the one of the scheme; for tests.

    Raises
    ------
    ImportError
        Where the package of the scheme is missing.
    ValueError
        Where fsspec knows no such scheme.
    """

    def __init__(
        self, url: str, storage_options: dict[str, Any] | None, *, max_requests: int, filesystem: Any = None
    ) -> None:
        import fsspec

        scheme = url.partition("://")[0].lower()
        if filesystem is None:
            cls = fsspec.get_filesystem_class(scheme)
            options = {**cls._get_kwargs_from_urls(url), **(storage_options or {})}
            if scheme in ("s3", "s3a"):
                options = s3_options(options, max_requests)
            options.update(skip_instance_cache=True, use_listings_cache=False)
            filesystem = cls(**options)
        self._url = url.partition("?")[0].rstrip("/")
        general = AsyncFiles if filesystem.async_impl else SyncFiles
        self._files = _FILES.get(scheme, general)(filesystem, url.rstrip("/"))
        self._loop = filesystem.loop if filesystem.async_impl else None

    @property
    def url(self) -> str:
        """Without a query."""
        return self._url

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        """See :class:`~kvformat.storage.store.Store`."""
        found: Buffer = self._attempt(self._files.read, name, start, start + nbytes, timeout_s=timeout_s)
        if len(found) < nbytes:
            raise ShortFault(f"{name}: {len(found)} bytes from {start}, expected {nbytes}")
        if len(found) > nbytes:
            raise TransportFault(f"{name}: {len(found)} bytes from {start}, expected {nbytes}")
        return found

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        """See :class:`~kvformat.storage.store.Store`."""
        return bytes(self._attempt(self._files.read_all, name, max_nbytes, timeout_s=timeout_s))

    def stat(self, name: str, *, timeout_s: float) -> Stat:
        """See :class:`~kvformat.storage.store.Store`."""
        found: Stat = self._attempt(self._files.stat, name, timeout_s=timeout_s)
        return found

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        self._attempt(lambda: self._files.write(name, data, create=False), timeout_s=timeout_s)

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        self._attempt(lambda: self._files.write(name, data, create=True), timeout_s=timeout_s)

    def begin(self, name: str, *, timeout_s: float) -> Upload:
        """See :class:`~kvformat.storage.store.Store`."""
        if isinstance(self._files, S3Files):
            upload: str = self._attempt(self._files.begin, name, timeout_s=timeout_s)
            return _PartsUpload(self, self._files, name, upload)

        def send(path: Path, limit_s: float) -> None:
            self._attempt(self._files.write_file, name, path, timeout_s=limit_s)

        return SpooledUpload(send)

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:
        """See :class:`~kvformat.storage.store.Store`; only S3 has pages, others list in one attempt."""
        token: str | None = None
        while True:
            page = self._attempt(self._files.page, prefix, token, timeout_s=timeout_s)
            yield from page.stats
            token = page.token
            if token is None:
                return

    def delete(self, name: str, *, timeout_s: float) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        with contextlib.suppress(MissingFault):
            self._attempt(self._files.remove, name, timeout_s=timeout_s)

    def close(self) -> None:
        """See :class:`~kvformat.storage.store.Store`."""
        with contextlib.suppress(StoreFault):
            self._attempt(self._files.close, timeout_s=_CLOSE_TIMEOUT_S)

    def _attempt(self, call: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        try:
            if self._loop is None:
                return run_in_thread(call, *args, timeout_s=timeout_s)
            return run_coroutine(self._loop, call, *args, timeout_s=timeout_s)
        except Exception as error:
            raise fault_of(error) from error


class _PartsUpload:
    """An upload in parts of S3."""

    def __init__(self, store: FsspecStore, files: S3Files, name: str, upload: str) -> None:
        self._store = store
        self._files = files
        self._name = name
        self._upload = upload
        self._lock = threading.Lock()
        self._etags: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._tried = False

    def part(self, number: int, data: Buffer, *, timeout_s: float) -> int | None:
        etag, crc32 = self._store._attempt(  # noqa: SLF001
            self._files.part, self._name, self._upload, number, data, timeout_s=timeout_s
        )
        with self._lock:
            self._etags[number] = etag
            self._sizes[number] = len(data)
        found: int | None = crc32
        return found

    def complete(self, *, timeout_s: float) -> None:
        numbers = sorted(self._etags)
        if not numbers:  # S3 makes no object of no parts
            self.abort(timeout_s=timeout_s)
            self._store.put(self._name, b"", timeout_s=timeout_s)
            return
        if numbers != list(range(1, len(numbers) + 1)):
            raise TransportFault(f"parts {numbers} were sent, expected 1 to {numbers[-1]}")
        repeated, self._tried = self._tried, True
        try:
            self._store._attempt(  # noqa: SLF001
                self._files.complete, self._name, self._upload, self._etags, timeout_s=timeout_s
            )
        except MissingFault:
            # The upload is gone: the answer to an earlier try was lost, if the object is there.
            if not repeated or self._store.stat(self._name, timeout_s=timeout_s).nbytes != sum(self._sizes.values()):
                raise

    def abort(self, *, timeout_s: float) -> None:
        with contextlib.suppress(StoreFault):
            self._store._attempt(self._files.abort, self._name, self._upload, timeout_s=timeout_s)  # noqa: SLF001
