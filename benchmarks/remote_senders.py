"""Bare clients of an object store that send files in parts. No retries, no checks."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.remote_clients import S3, boto_of, obstore_of

__all__ = ["DIGESTING", "SENDERS", "Send"]

Send = Callable[[str, Sequence[tuple[str, Path]]], None]
"""Takes the bucket, and keys with the files to send there."""


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _obstore_sender(s3: S3, part_nbytes: int, in_flight: int, *, unsigned: bool, digests: bool = False) -> Send:
    import obstore

    def send(bucket: str, files: Sequence[tuple[str, Path]]) -> None:
        config = {"unsigned_payload": True} if unsigned else {}
        store = obstore_of(s3, bucket, **config)
        side_by_side = max(1, min(4, len(files)))

        async def all_of_them() -> None:
            left = iter(files)

            async def work() -> None:
                for key, path in left:
                    hashed = asyncio.to_thread(_sha256, path) if digests else asyncio.sleep(0)
                    put = obstore.put_async(
                        store,
                        key,
                        path,
                        use_multipart=path.stat().st_size > part_nbytes,
                        chunk_size=part_nbytes,
                        max_concurrency=max(1, in_flight // side_by_side),
                    )
                    await asyncio.gather(hashed, put)

            await asyncio.gather(*(work() for _ in range(side_by_side)))

        asyncio.run(all_of_them())

    return send


def obstore_sender(s3: S3, part_nbytes: int, in_flight: int) -> Send:
    """obstore, which splits files itself."""
    return _obstore_sender(s3, part_nbytes, in_flight, unsigned=False)


def obstore_unsigned_sender(s3: S3, part_nbytes: int, in_flight: int) -> Send:
    """As :func:`obstore_sender`, leaving the payload out of the signature: no SHA-256 of it."""
    return _obstore_sender(s3, part_nbytes, in_flight, unsigned=True)


def obstore_digests_sender(s3: S3, part_nbytes: int, in_flight: int) -> Send:
    """As :func:`obstore_unsigned_sender`, with the SHA-256 of each file, which whoever publishes it needs."""
    return _obstore_sender(s3, part_nbytes, in_flight, unsigned=True, digests=True)


def boto_sender(s3: S3, part_nbytes: int, in_flight: int) -> Send:
    """boto3 in threads, a part each."""

    def send(bucket: str, files: Sequence[tuple[str, Path]]) -> None:
        client = boto_of(s3, in_flight)
        sizes = {key: path.stat().st_size for key, path in files}
        split_up = {
            key: client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
            for key, nbytes in sizes.items()
            if nbytes > part_nbytes
        }

        def put(key: str, path: Path, number: int) -> tuple[str, int, str]:
            fd = os.open(path, os.O_RDONLY)
            try:
                data = os.pread(fd, part_nbytes, (number - 1) * part_nbytes)
            finally:
                os.close(fd)
            if key not in split_up:
                client.put_object(Bucket=bucket, Key=key, Body=data)
                return key, number, ""
            answer = client.upload_part(Bucket=bucket, Key=key, UploadId=split_up[key], PartNumber=number, Body=data)
            return key, number, answer["ETag"]

        parts = [
            (key, path, number)
            for key, path in files
            for number in range(1, max(1, -(-sizes[key] // part_nbytes)) + 1)
        ]
        done: dict[str, list[dict[str, Any]]] = {key: [] for key, _ in files}
        with ThreadPoolExecutor(in_flight) as pool:
            for key, number, etag in pool.map(lambda part: put(*part), parts):
                done[key].append({"PartNumber": number, "ETag": etag})
            for _ in pool.map(
                lambda item: client.complete_multipart_upload(
                    Bucket=bucket, Key=item[0], UploadId=item[1], MultipartUpload={"Parts": done[item[0]]}
                ),
                split_up.items(),
            ):
                pass
        client.close()

    return send


SENDERS = {
    "obstore": obstore_sender,
    "obstore, payload unsigned": obstore_unsigned_sender,
    "obstore, payload unsigned, SHA-256 of files": obstore_digests_sender,
    "boto3 threads": boto_sender,
}

DIGESTING = ("obstore", "obstore, payload unsigned, SHA-256 of files", "boto3 threads")
"""Those that compute a SHA-256 of every byte: of each part, for its signature, or of each file."""
