"""Objects of a plain HTTP server, through the session of fsspec's HTTP file system."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvformat.storage.fsspec_files import Page
from kvformat.storage.store import Buffer, ShortFault, Stat, TransportFault, UnsupportedFault
from kvformat.storage.store_faults import fault_of_status, plain_etag

__all__ = ["HttpFiles"]

_SLICED_NBYTES = 16 << 20
"""Most bytes taken from the beginning of a whole object, where a server knows no ranges."""
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class HttpFiles:
    """Objects below a URL; its query, a signature for example, goes with every request.

    As :class:`~kvformat.storage.fsspec_files.AsyncFiles`, with the status of each answer looked at: fsspec's own
    methods take a whole object for a range, and any failure for a missing object.
    """

    def __init__(self, filesystem: Any, url: str) -> None:
        self._fs = filesystem
        base, mark, query = url.partition("?")
        self._base = base.rstrip("/")
        self._query = mark + query

    async def read(self, name: str, start: int, stop: int) -> Buffer:
        """See :class:`~kvformat.storage.fsspec_files.AsyncFiles`."""
        async with await self._request("GET", name, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            _refuse(answer)
            if answer.status != 206:
                if stop > _SLICED_NBYTES:
                    raise TransportFault(f"{name}: the server sends the whole object instead of a range")
                return memoryview(await _first(answer, stop))[start:]
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
            if found is None or found[1] is None or int(found[1]) != start or int(found[2]) >= stop:
                raise TransportFault(f"{name}: another range than asked for is sent")
            return await _first(answer, stop - start)

    async def read_all(self, name: str, max_nbytes: int) -> bytes:
        """See :class:`~kvformat.storage.fsspec_files.AsyncFiles`."""
        async with await self._request("GET", name) as answer:
            _refuse(answer)
            data = await _first(answer, max_nbytes + 1)
            length = answer.content_length
            if length is not None and len(data) < min(length, max_nbytes + 1):
                raise ShortFault(f"{name}: cut off after {len(data)} of {length} bytes")
            return data

    async def stat(self, name: str) -> Stat:
        """By HEAD; by one byte where the server refuses that, as it does for signed URLs."""
        async with await self._request("HEAD", name) as answer:
            if answer.status == 404:
                raise fault_of_status(404, text=name)
            length = answer.headers.get("Content-Length", "")
            if answer.status == 200 and length.isdigit():
                return Stat(name, int(length), plain_etag(answer.headers.get("ETag")))
        async with await self._request("GET", name, {"Range": "bytes=0-0"}) as answer:
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
            if answer.status in (206, 416) and found is not None and found[3] != "*":
                return Stat(name, int(found[3]), plain_etag(answer.headers.get("ETag")))
            _refuse(answer)
            if answer.status == 200 and answer.content_length is not None:
                return Stat(name, answer.content_length, plain_etag(answer.headers.get("ETag")))
        raise TransportFault(f"{name}: the server does not tell its size")

    async def write(self, name: str, data: Buffer, *, create: bool) -> None:
        """By PUT. Whether the server heeds the condition is for the caller to try."""
        headers = {"If-None-Match": "*"} if create else {}
        async with await self._request("PUT", name, headers, bytes(data)) as answer:
            _refuse(answer)

    async def write_file(self, name: str, path: Path) -> None:
        """See :class:`~kvformat.storage.fsspec_files.AsyncFiles`."""
        with path.open("rb") as file:
            async with await self._request("PUT", name, {}, file) as answer:
                _refuse(answer)

    async def remove(self, name: str) -> None:
        """By DELETE."""
        async with await self._request("DELETE", name) as answer:
            _refuse(answer)

    async def page(self, prefix: str, token: str | None) -> Page:
        """Never: what links a page shows is no listing."""
        raise UnsupportedFault(f"HTTP servers have no listing ({prefix!r}, {token!r})")

    async def close(self) -> None:
        """Close the session."""
        with contextlib.suppress(Exception):
            await (await self._fs.set_session()).close()

    async def _request(self, method: str, name: str, headers: dict[str, str] | None = None, data: Any = None) -> Any:
        """An answer to be used in a ``with`` block. Never compressed: lengths and ranges are those of the object."""
        from yarl import URL

        options = {key: value for key, value in self._fs.kwargs.items() if key != "headers"}
        sent = {"Accept-Encoding": "identity", **self._fs.kwargs.get("headers", {}), **(headers or {})}
        url = f"{self._base}/{quote(name)}" if name else self._base
        session = await self._fs.set_session()
        return session.request(
            method, URL(url + self._query, encoded=True), headers=sent, data=data, allow_redirects=True, **options
        )


def _refuse(answer: Any) -> None:
    if answer.status >= 300:
        raise fault_of_status(answer.status, text=answer.reason or "")
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise TransportFault(f"the server compresses what it sends: {answer.headers['Content-Encoding']}")


async def _first(answer: Any, nbytes: int) -> bytes:
    """Bytes of the body up to ``nbytes``; what follows is not fetched."""
    chunks: list[bytes] = []
    found = 0
    while found < nbytes and (chunk := await answer.content.read(nbytes - found)):
        chunks.append(chunk)
        found += len(chunk)
    if answer.content.at_eof():
        return b"".join(chunks)
    answer.close()
    return b"".join(chunks)
