"""Objects through s3fs, by S3's own calls: no listing to find a size, no path syntax, no retries inside."""

from __future__ import annotations

import base64
import contextlib
import re
from pathlib import Path
from typing import Any

from kvformat.storage.fsspec_files import Page
from kvformat.storage.store import Buffer, ShortFault, Stat, TransportFault
from kvformat.storage.store_faults import plain_etag

__all__ = ["S3Files", "s3_options"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")
_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 3600  # the time-out of the attempt is shorter


def s3_options(options: dict[str, Any], max_requests: int) -> dict[str, Any]:
    """The options for s3fs with the client's retries off; ours know deadlines, and throttle all threads together."""
    config = dict(options.get("config_kwargs") or {})
    config.setdefault("connect_timeout", _CONNECT_TIMEOUT_S)
    config.setdefault("read_timeout", _READ_TIMEOUT_S)
    config.setdefault("max_pool_connections", max(max_requests, 10))
    config["retries"] = {"total_max_attempts": 1, "mode": "standard"}
    return {**options, "config_kwargs": config}


class S3Files:
    """Objects of a bucket below a prefix. As :class:`~kvformat.storage.fsspec_files.AsyncFiles`, and parts."""

    def __init__(self, filesystem: Any, url: str) -> None:
        filesystem.retries = 1
        self._fs = filesystem
        self._bucket, prefix, _ = filesystem.split_path(url)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    async def read(self, name: str, start: int, stop: int) -> Buffer:
        """See the class."""
        answer = await self._call("get_object", Key=self._prefix + name, Range=f"bytes={start}-{stop - 1}")
        try:
            _check_range(answer, name, start, stop)
        except TransportFault:
            answer["Body"].close()
            raise
        return await _body(answer, name, limit=stop - start)

    async def read_all(self, name: str, max_nbytes: int) -> bytes:
        """See the class."""
        answer = await self._call("get_object", Key=self._prefix + name)
        return await _body(answer, name, limit=max_nbytes + 1)

    async def stat(self, name: str) -> Stat:
        """See the class."""
        answer = await self._call("head_object", Key=self._prefix + name)
        return Stat(name, int(answer["ContentLength"]), plain_etag(answer.get("ETag")))

    async def write(self, name: str, data: Buffer, *, create: bool) -> None:
        """See the class."""
        condition = {"IfNoneMatch": "*"} if create else {}
        await self._call("put_object", Key=self._prefix + name, Body=_sendable(data), **condition)

    async def write_file(self, name: str, path: Path) -> None:
        """Only for completeness: uploads go in parts."""
        await self.write(name, path.read_bytes(), create=False)  # noqa: ASYNC240 -- never used for large files

    async def remove(self, name: str) -> None:
        """See the class."""
        await self._call("delete_object", Key=self._prefix + name)

    async def page(self, prefix: str, token: str | None) -> Page:
        """See the class."""
        more = {"ContinuationToken": token} if token else {}
        answer = await self._call("list_objects_v2", Prefix=self._prefix + prefix, **more)
        found = [
            Stat(each["Key"][len(self._prefix) :], int(each["Size"]), plain_etag(each.get("ETag")))
            for each in answer.get("Contents", [])
        ]
        following = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
        if following is not None and following == token:
            raise TransportFault("the listing does not get on")
        return Page([each for each in found if each.name], following)

    async def begin(self, name: str) -> str:
        """Begin an upload in parts; its id."""
        answer = await self._call("create_multipart_upload", Key=self._prefix + name)
        return str(answer["UploadId"])

    async def part(self, name: str, upload: str, number: int, data: Buffer) -> tuple[str, int | None]:
        """Send a part; its ETag as given, and the CRC-32 the store says it has."""
        answer = await self._call(
            "upload_part", Key=self._prefix + name, UploadId=upload, PartNumber=number, Body=_sendable(data)
        )
        return str(answer["ETag"]), _crc32(answer.get("ChecksumCRC32"))

    async def complete(self, name: str, upload: str, etags: dict[int, str]) -> None:
        """Make the object of its parts."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        await self._call(
            "complete_multipart_upload", Key=self._prefix + name, UploadId=upload, MultipartUpload={"Parts": parts}
        )

    async def abort(self, name: str, upload: str) -> None:
        """Free the parts."""
        await self._call("abort_multipart_upload", Key=self._prefix + name, UploadId=upload)

    async def close(self) -> None:
        """Close the client's connections."""
        client = self._fs._s3  # noqa: SLF001 -- s3fs closes it only when it is collected
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()

    async def _call(self, operation: str, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(  # noqa: SLF001 -- its public twin blocks
            operation, self._fs.req_kw, Bucket=self._bucket, **options
        )
        return answer


def _check_range(answer: dict[str, Any], name: str, start: int, stop: int) -> None:
    """Let only the range asked for pass; a whole object is one where it begins there and is no longer."""
    told, length = answer.get("ContentRange"), answer.get("ContentLength")
    if told is None:
        fits = start == 0 and length is not None and length <= stop
    else:
        found = _CONTENT_RANGE.match(told)
        fits = found is not None and int(found[1]) == start and int(found[2]) < stop
    if not fits:
        raise TransportFault(f"{name}: bytes {start}-{stop - 1} were asked for, {told or 'the whole object'} is sent")


async def _body(answer: dict[str, Any], name: str, *, limit: int) -> bytes:
    """The body; the first ``limit`` bytes of a longer one."""
    body = answer["Body"]
    length = answer.get("ContentLength")
    try:
        chunks: list[bytes] = []
        found = 0
        while found < limit and (chunk := await body.read(limit - found)):
            chunks.append(chunk)
            found += len(chunk)
    finally:
        body.close()
    if length is not None and found < min(length, limit):
        raise ShortFault(f"{name}: cut off after {found} of {length} bytes")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _crc32(text: object) -> int | None:
    """The number that S3 writes in base64."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return None
    return int.from_bytes(data, "big") if len(data) == 4 else None


def _sendable(data: Buffer) -> bytes:
    """What botocore and aiohttp take: a bytearray is refused by one, a memoryview by the other."""
    return bytes(data)
