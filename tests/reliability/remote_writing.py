"""Processes that write to object stores: killed at every operation, or racing for one URL.

Run as ``python -m tests.reliability.remote_writing``; see :func:`main`. It forks before any client exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvformat
from kvformat.errors import KVFormatError
from kvformat.storage.connect import connect
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from tests.reliability import small
from tests.reliability.file_store import DyingStore, FileStore
from tests.reliability.racing import race

__all__ = ["create", "large", "main"]


def create(location: Any, spool: Path, *, variant: int = 0, **options: Any) -> kvformat.Writer:
    """A writer of the small dataset, whose shards hold two records each."""
    return kvformat.create(
        location,
        schema=small.SCHEMA,
        context=kvformat.Context.unknown(),
        provenance={"variant": f"{variant}"},
        files=small.COVERED,
        shard_slots=2,
        spool=spool,
        **options,
    )


def large(location: Any, spool: Path, **options: Any) -> kvformat.Writer:
    """A writer whose shards, of one record each, are uploaded in several parts."""
    schema = kvformat.Schema.uniform(num_layers=2, num_kv_heads=16, head_dim=256, dtype="F32")
    return kvformat.create(
        location,
        schema=schema,
        context=kvformat.Context.unknown(),
        shard_slots=1,
        spool=spool,
        resume=True,
        **options,
    )


def fill_large(writer: kvformat.Writer, num_records: int = 5) -> None:
    """Records of 13 MB."""
    for record in range(num_records):
        values = np.full((2, 200, 16, 256), record + 1, np.float32)
        writer.add(f"clip-{record}", {"k": values, "v": -values}, token_ids=np.arange(200) + 200 * record)


def forked(work: Callable[[], None]) -> int:
    """Exit status of a process that does this."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def kills(base: Path, *, after: bool, resume: bool) -> list[dict[str, Any]]:
    """Kill a writer at each of its operations on the store, then let another one complete; what that found."""
    results = []
    for count in range(1, 1000):
        directory, spool = base / f"{count}" / "ds", base / f"{count}" / "spool"

        def dies(count: int = count, directory: Path = directory, spool: Path = spool) -> None:
            store = DyingStore(FileStore(directory), count, after=after)
            with create(Remote("files://x", connect=lambda *_: store), spool, resume=resume) as writer:
                small.fill(writer)

        status = forked(dies)
        if status != -signal.SIGKILL:
            assert status == 0, status
            return results
        left = len(list(spool.iterdir())) if spool.exists() else 0
        found: dict[str, Any] = {"count": count, "spools": left}
        try:
            client = Remote("files://x", connect=lambda *_, at=directory: FileStore(at))
            with create(client, spool, resume=True) as writer:
                found["resumed"] = writer._replay.num_shards
                small.fill(writer)
            found["id"] = writer.id
        except KVFormatError as error:
            found["code"] = error.code
        found["spools_then"] = len(list(spool.iterdir()))
        results.append(found)
    raise AssertionError


def _publish(url: str, number: int, wait: Callable[[], None], options: dict[str, Any]) -> dict[str, Any]:
    variant = number % options["variants"]
    waited = False

    def once() -> None:
        nonlocal waited
        if not waited:
            waited = True
            wait()

    try:
        if options["barrier"] == "before":
            once()
        with create(
            url,
            Path(options["spool"]),
            variant=variant,
            resume=options["resume"],
            storage_options=options["storage_options"],
        ) as writer:
            small.fill(writer, variant=variant)
            once()
    except KVFormatError as error:
        once()
        return {"variant": variant, "code": error.code, "message": str(error)}
    return {"variant": variant, "id": writer.id}


def write(url: str, options: dict[str, Any]) -> None:
    """Write large records; a byte to a pipe before each operation on the store."""
    fd = options["fd"]

    def telling(*given: Any) -> Any:
        store = connect(*given)
        for name in ("stat", "get_all", "put", "create", "begin", "delete"):
            setattr(store, name, _telling(getattr(store, name), fd))
        begin = store.begin

        def begun(*args: Any, **more: Any) -> Any:
            upload = begin(*args, **more)
            for name in ("part", "complete"):
                setattr(upload, name, _telling(getattr(upload, name), fd))
            return upload

        store.begin = begun
        return store

    settings = RemoteOptions(request_nbytes=5 << 20)
    client = Remote(url, storage_options=options["storage_options"], options=settings, connect=telling)
    with large(client, Path(options["spool"])) as writer:
        fill_large(writer)
    sys.stdout.write(writer.id)


def _telling(call: Callable[..., Any], fd: int) -> Callable[..., Any]:
    def tell(*args: Any, **options: Any) -> Any:
        os.write(fd, b".")
        return call(*args, **options)

    return tell


def main() -> None:
    """``kills BASE OPTIONS``, ``race URL OPTIONS`` or ``write URL OPTIONS``; results are printed as JSON."""
    command, place, given = sys.argv[1:]
    options = json.loads(given)
    if command == "kills":
        sys.stdout.write(json.dumps(kills(Path(place), **options)))
    elif command == "race":
        results = race(options["processes"], lambda number, wait: _publish(place, number, wait, options))
        sys.stdout.write(json.dumps(results))
    else:
        write(place, options)


if __name__ == "__main__":
    main()
