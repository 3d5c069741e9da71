"""The workers of runs in a local directory, looked at without disturbing them."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.storage.faults import translated
from kvformat.storage.lease import is_held
from kvformat.write.found import FoundRun
from kvformat.write.run import RunIdentity
from kvformat.write.staging import is_shared, stagings
from kvformat.write.worker_state import Worker, WorkerState, liveness_of

__all__ = ["find_runs", "workers_in"]

_RECEIPT = re.compile(r"[0-9]{8}\.json")


def find_runs(root: Path) -> list[FoundRun]:
    """Runs whose work is staged at a dataset's directory, as far as it can be read."""
    found = []
    for path in stagings(root):
        if is_shared(path):
            try:
                run = RunIdentity.decode((path / "run.json").read_bytes(), path=path)
                finished = sum(_RECEIPT.fullmatch(name) is not None for name in _names(path))
                found.append(FoundRun(path, run, finished, tuple(workers_in(path))))
            except (KVFormatError, OSError):  # just begun, damaged, or gone meanwhile
                continue
    return found


def _names(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.name for entry in entries]


def workers_in(path: Path) -> list[Worker]:
    """What the workers of a staging directory said of themselves, by rank."""
    with translated(path):
        names = [name for name in _names(path) if WorkerState.is_name(name)]
    host, now = socket.gethostname(), time.time()
    found = []
    for name in names:
        try:
            state = WorkerState.decode((path / name).read_bytes())
            if state is not None:
                held = is_held(path / name)
                found.append(Worker(state, liveness_of(state, held=held, here=state.host == host, now=now)))
        except (KVFormatError, OSError):  # it left meanwhile
            continue
    return sorted(found, key=lambda worker: (worker.state.rank, worker.state.token))
