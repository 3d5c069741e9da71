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
from kvformat.write.found import FoundRun, refuse_other_plans
from kvformat.write.heartbeat import Heartbeat
from kvformat.write.opening import find_runs, place_of
from kvformat.write.spool import Spool, SpoolFiles, spool_directory
from kvformat.write.worker_state import SAID_EVERY_S, WorkerState

__all__ = ["Hold", "hold_staged"]

_ATTEMPT_TIMEOUT_S = 10.0


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
        self._using = threading.Lock()
        self._beats = Heartbeat(self._beat, every_s=SAID_EVERY_S)
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
        for found in find_runs(self._target, spool=self._spool):
            if found.run.plan == self._plan and found.run.key not in self._held:
                held = self._take(found)
                if held is not None:
                    self._held[found.run.key] = held

    def release(self) -> None:
        """Let go of all of it. More than once is harmless."""
        self._beats.stop()
        with self._using:
            while self._held:
                _, held = self._held.popitem()
                held.leave()

    def _take(self, found: FoundRun) -> _Held | None:
        if isinstance(self._target, Path):
            return _HeldDirectory.take(Path(found.place), self._state)
        base = spool_directory(self._spool)
        return _HeldPrefix.take(self._target, base, found.run.key, self._state)

    def _beat(self) -> None:
        with self._using, contextlib.suppress(KVFormatError, OSError):  # there is another beat soon
            for held in self._held.values():
                held.say(replace(self._state, updated=self._clock()))
            if isinstance(self._target, Path):  # a store that does not answer would be waited for
                self.look()


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

    Others see a worker that loads its model. What a run stages meanwhile in a directory is held soon after. In a store
    that may not be listed nothing is found, and nothing held.

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
    def take(cls, path: Path, state: WorkerState) -> Self | None:
        """Hold a directory; None where it is gone."""
        file = HeldFile(path / state.name)
        try:
            # With a lease for a moment: who has one alone has looked for workers, and is about to remove all there is.
            lease = joining.wait_for_lease(path, time.monotonic() + joining.BUSY_TIMEOUT_S)
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
        held = cls(remote, key, Spool.create(SpoolFiles(), base, remote.url, key, token=state.token), state.name)
        held.say(state)
        return held

    def say(self, state: WorkerState) -> None:
        with contextlib.suppress(StoreFault, KVFormatError):
            store = self._remote.store
            store.stat(self._run, timeout_s=_ATTEMPT_TIMEOUT_S)  # without it, all of it was published, and removed
            store.put(self._name, state.encode(), timeout_s=_ATTEMPT_TIMEOUT_S)

    def leave(self) -> None:
        with contextlib.suppress(KVFormatError, OSError):  # swept by the next one
            self._spool.remove()
        with contextlib.suppress(StoreFault, KVFormatError):  # it goes stale; one attempt, as an interrupt may wait
            self._remote.store.delete(self._name, timeout_s=_ATTEMPT_TIMEOUT_S)
