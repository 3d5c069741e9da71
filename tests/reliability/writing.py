"""Processes that write: one that tells through a pipe how far it is, and many that race for one location.

Run as ``python -m tests.reliability.writing``; see :func:`main`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvformat.errors import KVFormatError
from kvformat.storage.local_write import Buffer, LocalFiles
from tests.reliability import small
from tests.reliability.racing import race

__all__ = ["main"]


class Telling(LocalFiles):
    """Writes a byte to a pipe before each operation; interrupts the process before a certain one."""

    def __init__(self, fd: int, *, interrupt_at: int | None = None) -> None:
        self._fd = fd
        self._interrupt_at = interrupt_at
        self._count = itertools.count(1)  # several threads take from it

    def make_dir(self, path: Path) -> bool:
        self._tell()
        return super().make_dir(path)

    def create(self, path: Path) -> int:
        self._tell()
        return super().create(path)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int, path: Path) -> int:
        self._tell()
        return super().write(fd, buffers, offset, path)

    def sync(self, fd: int, path: Path) -> None:
        self._tell()
        super().sync(fd, path)

    def link(self, source: Path, target: Path) -> bool:
        self._tell()
        return super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._tell()
        super().unlink(path)

    def remove_dir(self, path: Path) -> bool:
        self._tell()
        return super().remove_dir(path)

    def _tell(self) -> None:
        os.write(self._fd, b".")
        if next(self._count) == self._interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)


def write(location: Path, fd: int, *, repeats: int, resume: bool, interrupt_at: int | None = None) -> None:
    """Write the dataset many times over, in one dataset with so many times the records."""
    with small.create(location, files=Telling(fd, interrupt_at=interrupt_at), resume=resume) as writer:
        small.fill_many(writer, repeats)


def _publish(location: Path, number: int, wait: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Publish, having waited ``before`` entering the writer, or ``publishing``: with everything added."""
    variant = number % options["variants"]
    waited = False
    try:
        if options["barrier"] == "before":
            waited = True
            wait()
        with small.create(
            location, variant=variant, resume=options["resume"], tag=f"{number}" if options["resume"] else ""
        ) as writer:
            small.fill(writer, variant=variant)
            if not waited:
                waited = True
                wait()
    except KVFormatError as error:
        if not waited:
            wait()
        return {"variant": variant, "code": error.code, "message": str(error)}
    return {"variant": variant, "id": writer.id}


def main() -> None:
    """``write LOCATION FD REPEATS MODE [INTERRUPT_AT]``, or ``race LOCATION OPTIONS``, which prints its result."""
    command, location, *rest = sys.argv[1:]
    if command == "write":
        write(
            Path(location),
            int(rest[0]),
            repeats=int(rest[1]),
            resume=rest[2] == "resume",
            interrupt_at=int(rest[3]) if rest[3:] else None,
        )
    else:
        options = json.loads(rest[0])
        results = race(options["processes"], lambda number, wait: _publish(Path(location), number, wait, options))
        sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
