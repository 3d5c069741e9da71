"""Workers of one plan in processes of their own: telling how far they are, racing, or killed at every operation.

Run as ``python -m tests.reliability.working``; see :func:`main`. It forks before any client exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvformat.errors import DatasetExistsError, KVFormatError
from kvformat.storage.connect import connect
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.write.attach import attach_workshop
from kvformat.write.sealing import seal
from tests.reliability.file_store import DyingStore, FileStore
from tests.reliability.racing import race
from tests.reliability.remote_writing import forked
from tests.reliability.writing import Telling
from tests.write.planning import SmallPlan, opened, work

__all__ = ["finish", "main"]

_VERBS = frozenset({"create", "link", "make_dir", "remove_dir", "sync", "sync_dir", "unlink", "write"})


def finish(target: Path | Remote, plan: SmallPlan, *, told: Any = None, **options: Any) -> dict[str, Any]:
    """Work, seal and leave as one worker; what was finished before, and the id."""
    rank, world_size = options.get("rank", 0), options.get("world_size", 1)
    with opened(target, plan, **options) as workshop:
        earlier = sorted(workshop.finished())
        work(workshop, plan, rank=rank, world_size=world_size, told=told or (lambda *_: None))
        identity = seal(workshop, plan)
        workshop.remove()
    return {"earlier": earlier, "id": identity}


class Dying(LocalFiles):
    """Kills the process at its ``count``-th operation, before it is done, once it has finished so many shards."""

    def __init__(self, shards: int, count: int) -> None:
        self._shards = shards
        self._left = count
        self._lock = threading.Lock()

    def finished(self) -> None:
        """One shard more."""
        with self._lock:
            self._shards -= 1

    def __getattribute__(self, name: str) -> Any:
        if name in _VERBS:
            with self._lock:
                self._left -= self._shards <= 0
                if self._left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def dying(location: Path, shards: int, count: int, options: dict[str, Any]) -> None:
    """As :func:`telling`, killed at an operation."""
    files = Dying(shards, count)

    def told(what: str, ordinal: int) -> None:
        if what == "finished":
            os.write(1, f"{ordinal}\n".encode())
            files.finished()

    plan = SmallPlan(options.pop("num_records"))
    with contextlib.suppress(DatasetExistsError):
        finish(location, plan, told=told, files=files, **options)


def telling(location: Path, fd: int, options: dict[str, Any]) -> None:
    """Be a worker; write a byte to a pipe before each operation, and the finished shards to standard output."""

    def told(what: str, ordinal: int) -> None:
        if what == "finished":
            os.write(1, f"{ordinal}\n".encode())

    plan = SmallPlan(options.pop("num_records"))
    with contextlib.suppress(DatasetExistsError):  # others were faster
        finish(location, plan, told=told, files=Telling(fd), **options)


def target_of(place: str, options: dict[str, Any]) -> Path | Remote:
    return (
        Remote(place, storage_options=options["storage_options"], connect=connect) if "://" in place else Path(place)
    )


def _worker(place: str, number: int, wait: Callable[[], None], options: dict[str, Any]) -> dict[str, Any]:
    plan, target = SmallPlan(options["num_records"]), target_of(place, options)
    wait()
    try:
        return finish(target, plan, rank=number, world_size=options["processes"], spool=options.get("spool"))
    except KVFormatError as error:
        return {"code": error.code, "message": str(error)}


def _sealer(place: str, number: int, wait: Callable[[], None], options: dict[str, Any]) -> dict[str, Any]:
    plan, target = SmallPlan(options["num_records"]), target_of(place, options)
    workshop = None
    try:
        with attach_workshop(target, plan, spool=options.get("spool")) as workshop:
            wait()
            identity = seal(workshop, plan)
            workshop.remove()
    except KVFormatError as error:
        if workshop is None:
            wait()
        return {"code": error.code, "message": str(error)}
    return {"id": identity}


def kills(base: Path, *, after: bool, num_records: int) -> list[dict[str, Any]]:
    """Kill a worker at each of its operations on the store, then let two others complete; what they found."""
    results = []
    plan = SmallPlan(num_records)
    for count in range(1, 1000):
        directory, spool = base / f"{count}" / "ds", base / f"{count}" / "spool"

        def dies(count: int = count, directory: Path = directory, spool: Path = spool) -> None:
            store = DyingStore(FileStore(directory), count, after=after)
            finish(Remote("files://x", connect=lambda *_: store), plan, rank=1, world_size=3, spool=spool)

        status = forked(dies)
        if status != -signal.SIGKILL:
            assert status == 0, status
            return results
        found: dict[str, Any] = {"count": count}
        try:
            client = Remote("files://x", connect=lambda *_, at=directory: FileStore(at))
            found |= finish(client, plan, rank=0, world_size=2, spool=spool)
        except KVFormatError as error:
            found["code"] = error.code
        found["spools"] = len(list(spool.iterdir()))
        results.append(found)
    raise AssertionError


def main() -> None:
    """``work LOCATION FD OPTIONS``, ``die LOCATION SHARDS COUNT OPTIONS``, ``race`` or ``kills PLACE OPTIONS``.

    Results are printed as JSON.
    """
    warnings.simplefilter("error")
    command, place, *rest = sys.argv[1:]
    options = json.loads(rest[-1])
    if command == "work":
        telling(Path(place), int(rest[0]), options)
    elif command == "die":
        dying(Path(place), int(rest[0]), int(rest[1]), options)
    elif command == "kills":
        sys.stdout.write(json.dumps(kills(Path(place), **options)))
    else:
        act = {"work": _worker, "seal": _sealer}[options.get("act", "work")]
        results = race(options["processes"], lambda number, wait: act(place, number, wait, options))
        sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
