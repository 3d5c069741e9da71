"""A copying process that is killed right after it was let go beyond so many steps: the copy itself as a program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvformat
from kvformat.storage.remote import Remote
from tests.conftest import REPOSITORY
from tests.transfer.directory_store import DirectoryStore

__all__ = ["location", "stopped_after"]


def location(text: str) -> Any:
    """``memory://PATH`` is an object store in a directory; anything else is what it is."""
    if not text.startswith("memory://"):
        return text
    return Remote(text, connect=lambda url, *_: DirectoryStore(url.removeprefix("memory://")))


def stopped_after(
    steps: int, source: str, target: str, *, cache: Path, options: Mapping[str, Any] | None = None
) -> int:
    """Copy, and kill within the step behind so many; the exit status. It waits to be let go after each step."""
    told, tell = os.pipe()
    wait, let = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, source, target, json.dumps(dict(options or {})), str(tell), str(wait)],
        pass_fds=[tell, wait],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stderr=subprocess.PIPE,
    )
    os.close(tell)
    for _ in range(steps):
        if not os.read(told, 1):
            break
        os.write(let, b".")
    os.kill(process.pid, signal.SIGKILL)  # a process not waited for yet keeps its id, even where it has ended
    status = process.wait()
    for fd in (told, wait, let):
        os.close(fd)
    assert process.stderr is not None
    error = process.stderr.read().decode()
    process.stderr.close()
    assert status in (0, -signal.SIGKILL), error
    return status


def main(source: str, target: str, options: str, tell: str, wait: str) -> None:
    def told(_done: int, _total: int) -> None:
        os.write(int(tell), b".")
        os.read(int(wait), 1)

    given = json.loads(options)
    kvformat.copy(
        location(source), location(target), source_options=given, target_options=given, threads=2, progress=told
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
