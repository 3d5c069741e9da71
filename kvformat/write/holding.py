"""Holding what is staged of a plan while a model is loaded, which alone tells what of it can be continued."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from msgspec.structs import replace

from kvformat.errors import KVFormatError
from kvformat.spec.paths import STAGING
from kvformat.storage.lease import HeldFile
from kvformat.storage.remote import Remote
from kvformat.storage.store import StoreFault
from kvformat.write import joining
from kvformat.write.found import refuse_other_plans
from kvformat.write.heartbeat import Heartbeat
from kvformat.write.opening import find_runs, place_of
from kvformat.write.remote_dead import forget_dead
from kvformat.write.remote_workers import find_new_runs
from kvformat.write.spool import Spool, SpoolFiles
from kvformat.write.spool_places import spool_directory
from kvformat.write.worker_state import SAID_EVERY_S, WorkerState

__all__ = ["Hold", "hold_staged"]

_ATTEMPT_TIMEOUT_S = 10.0
_LOOK_TIMEOUT_S = 5.0
_EARLY_S = 60.0
"""For so long, workers that began together have no work yet that could be held, and look for it often."""
_LOOK_EVERY_S = 2.0
_LIST_EVERY_S = 5.0


class Hold:
    """What keeps ``kvformat clean`` from staged work. Made by :func:`hold_staged`, used as a context manager.

    It has no part in the work: other workers publish, and remove what they published, whether it is held or not.
    """

    def __init__(
        self,
        target: Path | Remote,
        plan: str,
        state: WorkerState,
        *,
        spool: str | os.PathLike[str] | None,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._plan = plan
        self._state = state
        self._spool = spool
        self._clock = clock
        self._held: dict[str, _Held] = {}  # by key
        self._others: set[str] = set()  # keys of other plans
        self._using = threading.Lock()
        self._over = threading.Event()
        self._said = state.updated
        self._beats = Heartbeat(self._beat, every_s=self._pause_s)
        self._beats.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    @property
    def since(self) -> WorkerState | None:
        """What was said; None where there was nothing to hold, so that nobody can know."""
        return self._state if self._held else None

    def look(self) -> None:
        """Hold the work of all runs of the plan that are staged by now.

        Raises
        ------
        ConflictError
            E117 where ``kvformat clean`` is at one of them.
        KVFormatError
            What the storage refuses.
        """
        with self._using:
            for found in find_runs(self._target, spool=self._spool):
                if found.run.plan == self._plan and found.run.key not in self._held:
                    self._take(found.run.key, found.place, wait_s=joining.BUSY_TIMEOUT_S)

    def release(self) -> None:
        """Let go of all of it. More than once is harmless."""
        self._over.set()
        self._beats.stop()
        with self._using:
            while self._held:
                _, held = self._held.popitem()
                held.leave()

    def _take(self, key: str, place: Path | str, *, wait_s: float) -> None:
        """Hold the work of a run. Others may have waited long for it: what is said of it is new."""
        state = replace(self._state, updated=self._clock())
        held: _Held | None
        if isinstance(self._target, Path):
            held = _HeldDirectory.take(Path(place), state, wait_s=wait_s)
        else:
            held = _HeldPrefix.take(self._target, spool_directory(self._spool), key, state)
        if held is not None:
            self._held[key] = held

    def _pause_s(self) -> float:
        """Seconds until the next beat."""
        if self._held or self._clock() - self._state.started >= _EARLY_S:
            return SAID_EVERY_S
        return _LOOK_EVERY_S if isinstance(self._target, Path) else _LIST_EVERY_S

    def _beat(self) -> None:
        with self._using, contextlib.suppress(StoreFault, KVFormatError, OSError):  # there is another beat soon
            now = self._clock()
            if now - self._said >= SAID_EVERY_S / 2:
                self._said = now
                for held in self._held.values():
                    if not self._over.is_set():
                        held.say(replace(self._state, updated=now))
            for key, place in self._new():
                if not self._over.is_set():
                    self._take(key, place, wait_s=0.0)

    def _new(self) -> list[tuple[str, Path | str]]:
        """Keys of the plan's runs that are not held yet, and their places; a store is asked once, and not for long."""
        if self._over.is_set():
            return []
        if isinstance(self._target, Path):
            found = [(one.run, one.place) for one in find_runs(self._target)]
        else:
            known = self._others | self._held.keys()
            runs = find_new_runs(self._target, known, timeout_s=_LOOK_TIMEOUT_S)
            self._others |= {run.key for run in runs if run.plan != self._plan}
            found = [(run, self._target.path(f"{STAGING}/{run.key}")) for run in runs]
        return [(run.key, place) for run, place in found if run.plan == self._plan and run.key not in self._held]


def hold_staged(
    target: Path | Remote,
    plan: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: str | os.PathLike[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> Hold:
    """Hold what is staged of a plan, whatever run it is of: only a loaded model tells which one is continued.

    Others see a worker that loads its model. What a run stages meanwhile is held some seconds after, or within half a
    minute where it is staged late. In a store that may not be listed nothing is found, and nothing held.

    Parameters
    ----------
    target, rank, world_size, spool, clock
        As for :func:`kvformat.write.opening.open_workshop`.
    plan
        Digest of the plan.

    Raises
    ------
    ConflictError
        E117 where workers of another plan are at work, or load their model and began first; where ``kvformat clean``
        is at work.
    KVFormatError
        E200, E203, E207, E208.
    """
    refuse_other_plans(find_runs(target, spool=spool), plan, place_of(target), now=clock())
    state = WorkerState.of_this_process(rank, world_size, phase="load", now=clock())
    hold = Hold(target, plan, state, spool=spool, clock=clock)
    try:
        hold.look()
        if hold.since is not None:
            found = find_runs(target, spool=spool)
            refuse_other_plans(found, plan, place_of(target), since=hold.since, now=clock())
    except BaseException:
        hold.release()
        raise
    return hold


class _Held(Protocol):
    """The staged work of one run."""

    def say(self, state: WorkerState) -> None:
        """Tell others that its holder lives. Never fails loudly."""

    def leave(self) -> None:
        """Let go. Never fails loudly."""


class _HeldDirectory:
    """A staging directory with a file in it that is locked as long as its process lives.

    Of the directory itself no lease is kept: it would keep the last worker out from removing what it published.
    """

    def __init__(self, file: HeldFile) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path, state: WorkerState, *, wait_s: float) -> Self | None:
        """Hold a directory; None where it is gone."""
        file = HeldFile(path / state.name)
        try:
            # With a lease for a moment: who has one alone has looked for workers, and is about to remove all there is.
            lease = joining.wait_for_lease(path, time.monotonic() + wait_s)
        except KVFormatError as error:
            if error.code != "E002":
                raise
            return None
        try:
            if not lease.holds(path):
                return None
            file.replace(state.encode())
        finally:
            lease.release()
        return cls(file)

    def say(self, state: WorkerState) -> None:
        with contextlib.suppress(KVFormatError):
            self._file.replace(state.encode())

    def leave(self) -> None:
        self._file.remove()


class _HeldPrefix:
    """Names in an object store, with what a worker says among them; on this machine its spool tells that it lives."""

    def __init__(self, remote: Remote, key: str, spool: Spool, name: str) -> None:
        self._remote = remote
        self._run = f"{STAGING}/{key}/run.json"
        self._name = f"{STAGING}/{key}/{name}"
        self._spool = spool

    @classmethod
    def take(cls, remote: Remote, base: Path, key: str, state: WorkerState) -> Self:
        """Hold a run."""
        forgotten = forget_dead(remote, base)
        spool = Spool.create(SpoolFiles(), base, remote.url, key, worker=state, forgotten=forgotten)
        held = cls(remote, key, spool, state.name)
        held.say(state)
        return held

    def say(self, state: WorkerState) -> None:
        with contextlib.suppress(StoreFault, KVFormatError):
            self._spool.touch()
            store = self._remote.store
            store.stat(self._run, timeout_s=_ATTEMPT_TIMEOUT_S)  # without it, all of it was published, and removed
            store.put(self._name, state.encode(), timeout_s=_ATTEMPT_TIMEOUT_S)

    def leave(self) -> None:
        with contextlib.suppress(KVFormatError, OSError):  # swept by the next one
            self._spool.remove()
        with contextlib.suppress(StoreFault, KVFormatError):  # it goes stale; one attempt, as an interrupt may wait
            self._remote.store.delete(self._name, timeout_s=_ATTEMPT_TIMEOUT_S)
