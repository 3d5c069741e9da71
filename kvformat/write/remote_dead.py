"""What dead workers of this machine left at a URL; nothing but their spool directories proves that they are dead."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from kvformat.errors import KVFormatError
from kvformat.spec.paths import STAGING
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.storage.store import MissingFault, StoreFault
from kvformat.write.remote_workers import STATE_NBYTES
from kvformat.write.spool import dead_spools, sweep
from kvformat.write.spool_places import plan_of, worker_of
from kvformat.write.worker_state import WorkerState

__all__ = ["forget", "forget_dead", "sweep_dead"]

_FORGET_TIMEOUT_S = 10.0


def forget(remote: Remote, spool: Path) -> None:
    """Remove what the dead worker of a spool directory said of itself.

    Raises
    ------
    KVFormatError
        What the store refuses.
    """
    name = _said_in(spool)
    if name is not None:
        try:
            said = remote.read(name, max_nbytes=STATE_NBYTES)
        except KVFormatError as error:
            if error.code not in ("E002", "E004"):
                raise
            return
        if not _is_elsewhere(said):
            remote.delete(name)


def forget_dead(remote: Remote, base: Path) -> frozenset[Path]:
    """Remove what dead workers of this machine said of themselves; returns spool directories that prove nothing more.

    Each request is made once, and none after one that fails, or when they take long.
    """
    forgotten: set[Path] = set()
    with contextlib.suppress(StoreFault, KVFormatError, OSError):
        dead = dead_spools(base, remote.url)
        deadline = time.monotonic() + _FORGET_TIMEOUT_S
        for path in dead:
            if (left_s := deadline - time.monotonic()) <= 0.0:
                break
            if _forget_at_once(remote, path, timeout_s=left_s / 2):
                forgotten.add(path)
    return frozenset(forgotten)


def sweep_dead(remote: Remote, base: Path, files: LocalFiles) -> None:
    """Remove what dead workers of this machine left at a URL and below ``base``. Never fails loudly."""
    forgotten = forget_dead(remote, base)
    with contextlib.suppress(KVFormatError, OSError):  # there is another run
        sweep(files, base, forgotten)


def _forget_at_once(remote: Remote, spool: Path, *, timeout_s: float) -> bool:
    """Whether nobody can read it any more."""
    name = _said_in(spool)
    if name is None:
        return False
    try:
        said = remote.store.get_all(name, max_nbytes=STATE_NBYTES, timeout_s=timeout_s)
    except MissingFault:
        return True
    if _is_elsewhere(said):
        return False
    remote.store.delete(name, timeout_s=timeout_s)
    return True


def _said_in(spool: Path) -> str | None:
    """Object in which the worker of a spool directory says who it is; None where its writer shares nothing."""
    worker = worker_of(spool)
    return None if worker is None else f"{STAGING}/{plan_of(spool)}/{worker}"


def _is_elsewhere(said: bytes) -> bool:
    """Whether it is of a worker on another machine, of which a lock that can be had proves nothing."""
    state = WorkerState.decode(said)
    return state is not None and state.host != socket.gethostname()
