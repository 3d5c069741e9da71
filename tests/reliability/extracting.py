"""A server that has torch and a model's code loaded, and forks an extraction for each line it reads.

Run as ``python -m tests.reliability.extracting MODEL DOCUMENTS SHARD_NBYTES WARM_UP``. A line on standard input is
JSON: ``out``, where to, and ``pipe``, a named pipe that gets a byte before each operation on the disk and whenever a
record is done. The answers are lines too: the id of the process, and when it has ended its exit status.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from kvformat.extract import run
from kvformat.write import opening
from tests.reliability.writing import Telling

__all__ = ["main"]


class Progress:
    """Tells when a record is done."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def phase(self, name: str, *, tokens: int = 0, nbytes: int = 0) -> None:
        """A phase is no progress yet."""

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """Tell."""
        os.write(self._fd, b".")

    def elsewhere(self, *, nbytes: int) -> None:
        """There are no other workers."""

    def times(self, times: object) -> None:
        """Of no interest."""


def extract(options: dict[str, Any], *, out: str, pipe: str) -> None:
    """One extraction, in a process of its own."""
    fd = os.open(pipe, os.O_WRONLY)
    opening.LocalFiles = lambda: Telling(fd)  # type: ignore[attr-defined,misc,assignment]
    run(**options, out=out, progress=Progress(fd))


def main() -> None:
    """Serve until standard input ends."""
    model, documents, shard_nbytes, warm_up = sys.argv[1:]
    options: dict[str, Any] = {"model": model, "documents": documents, "shard_nbytes": int(shard_nbytes)}
    torch.set_num_threads(1)  # no helper threads of torch's: they would be missing in a forked process
    say(run(**options, out=warm_up).id)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                extract(options, **json.loads(line))
                status = 0
            finally:
                os._exit(status)
        say(pid)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def say(answer: object) -> None:
    """One line, at once."""
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
