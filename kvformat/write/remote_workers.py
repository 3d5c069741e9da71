"""The workers of runs in an object store, which knows nothing of who is at work: they are known by what they say."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Container, Iterable
from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.spec.paths import STAGING
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.remote import Remote
from kvformat.storage.store import Stat
from kvformat.write.found import FoundRun
from kvformat.write.parallel import side_by_side
from kvformat.write.remote_receipts import kept_plans
from kvformat.write.run import RunIdentity
from kvformat.write.spool_places import spool_of
from kvformat.write.worker_state import Liveness, Worker, WorkerState, liveness_of

__all__ = ["RUN_NBYTES", "STATE_NBYTES", "find_new_runs", "find_runs", "list_or_none", "read_run", "workers_of"]

RUN_NBYTES = 64 << 20
"""Most bytes of a run."""
STATE_NBYTES = 1 << 16
"""Most bytes of what a worker says of itself."""
_RUN = re.compile(re.escape(STAGING) + r"/([0-9a-f]{16})/run\.json")


def list_or_none(remote: Remote, prefix: str) -> list[Stat] | None:
    """Objects whose names begin with a prefix; None where the store, or who asks, may not list."""
    try:
        return list(remote.list(prefix))
    except KVFormatError as error:
        if error.code in ("E203", "E207"):
            return None
        raise


def find_runs(remote: Remote, *, base: Path) -> list[FoundRun]:
    """Runs whose work is staged at a URL, as far as it can be listed and read; ``base`` is where spools are."""
    found = []
    for kept in kept_plans(list_or_none(remote, f"{STAGING}/") or ()).plans:
        run = read_run(remote, kept.digest) if kept.shared else None
        if run is not None:
            workers = workers_of(remote, kept.digest, [stat.name for stat in kept.objects], base=base)
            place = remote.path(f"{STAGING}/{kept.digest}")
            found.append(FoundRun(place, run, len(kept.ordinals), tuple(workers)))
    return found


def read_run(remote: Remote, key: str) -> RunIdentity | None:
    """The run of a key, where it is there and can be read."""
    name = f"{STAGING}/{key}/run.json"
    try:
        return RunIdentity.decode(remote.read(name, max_nbytes=RUN_NBYTES), path=remote.path(name))
    except KVFormatError as error:
        if error.code.startswith("E2"):
            raise
        return None


def find_new_runs(remote: Remote, known: Container[str], *, timeout_s: float) -> list[RunIdentity]:
    """Runs whose keys are not ``known``, as far as they can be read within that time; no request is repeated.

    Raises
    ------
    StoreFault
        As the store fails.
    """
    deadline = time.monotonic() + timeout_s
    keys, found = [], []
    for stat in remote.store.list(f"{STAGING}/", timeout_s=timeout_s):
        match = _RUN.fullmatch(stat.name)
        if match is not None and match[1] not in known:
            keys.append(match[1])
        if time.monotonic() > deadline:
            break
    for key in keys:
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            break
        name = f"{STAGING}/{key}/run.json"
        data = remote.store.get_all(name, max_nbytes=RUN_NBYTES, timeout_s=left_s)
        with contextlib.suppress(KVFormatError):  # damaged, or none at all
            found.append(RunIdentity.decode(data, path=remote.path(name)))
    return found


def workers_of(remote: Remote, key: str, names: Iterable[str], *, base: Path) -> list[Worker]:
    """What the workers of a run said of themselves, by rank; ``names`` are those of all its objects."""
    said = [name for name in names if WorkerState.is_name(name.rpartition("/")[2])]
    found = [
        Worker(state, _liveness(state, remote, key, base))
        for state in side_by_side(lambda name: _state(remote, name), said)
        if state is not None
    ]
    return sorted(found, key=lambda worker: (worker.state.rank, worker.state.token))


def _state(remote: Remote, name: str) -> WorkerState | None:
    try:
        return WorkerState.decode(remote.read(name, max_nbytes=STATE_NBYTES))
    except KVFormatError as error:
        if error.code in ("E002", "E004"):  # it left meanwhile, or that is none
            return None
        raise


def _liveness(state: WorkerState, remote: Remote, key: str, base: Path) -> Liveness:
    """By its spool, where that is on this machine; else by how long ago it said something."""
    here = state.host == socket.gethostname()
    held = None
    if here:
        try:
            lease = DirectoryLease.take(spool_of(base, remote.url, key, state))
        except KVFormatError:  # another directory, or swept
            lease = None
        else:
            held = lease is None or (False if lease.supported else None)
        if lease is not None:
            lease.release()
    return liveness_of(state, held=held, here=here, now=time.time())
