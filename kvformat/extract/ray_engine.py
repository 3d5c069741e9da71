"""Shards extracted by the workers of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kvformat.errors import KVFormatError, make_error

__all__ = ["Prepare", "Work", "run_with_ray"]

Work = Callable[[Sequence[int]], Any]
"""Extracts shards, given their ordinals, and leaves them staged. What it gives back, ``on_done`` is told: has to
pickle."""

Prepare = Callable[[], Work]
"""Makes a :data:`Work` in a worker process: loads the model, opens the plan. Has to pickle."""

_LISTED = 8
_ANSWER_S = 5.0
_NOT_CONNECTED = "check --ray-address or RAY_ADDRESS, host:port of the cluster's head, and that the cluster runs"
# The first bytes of either side of an HTTP/2 connection, of which Ray's protocol makes use: a frame of settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


def run_with_ray(
    ordinals: Sequence[int],
    prepare: Prepare,
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    num_workers: int | None = None,
    address: str | None = None,
    most_failures: int = 3,
    on_done: Callable[[int, Any], object] | None = None,
) -> None:
    """Have Ray workers extract shards, a task a shard.

    A worker is a process (an actor) with resources of its own, the same GPU for all of its shards. It calls
    ``prepare`` before its first shard and keeps what that gives for the following ones. No worker is given a shard
    before it runs, and each has one at a time. Nothing is repeated: what is missing at the end, another run extracts.

    Uses the cluster the process is connected to (``ray.init``). Otherwise it connects to the one at ``address``, or at
    ``RAY_ADDRESS``, or starts one on this machine, for as long as it runs.

    Parameters
    ----------
    ordinals
        Shards, in the order in which they are begun.
    num_cpus, num_gpus
        What one worker needs, in units of Ray. Ray sets ``OMP_NUM_THREADS`` of the worker to ``num_cpus``: the threads
        a model on CPU computes with.
    num_workers
        Workers at most; as many as the cluster has room for when absent, which leaves nothing to an autoscaler.
    address
        Of a cluster: ``host:port``, ``ray://host:port``, or ``auto`` for one that was started on this machine.
    most_failures
        Shards, or workers, that may fail until no further shard is begun.
    on_done
        Told of each finished shard, and what the work on it gave back, by the calling thread.

    Raises
    ------
    KVFormatError
        What the work on a shard raised, with the shard's ordinal in front; of several the first shard's. E119 where a
        worker died. By then all shards under way have come to an end.
    Exception
        Likewise, with a note.
    DependencyError
        E205 where Ray is not installed.
    UsageError
        E081 where the cluster has no room for a single worker, and where there is no cluster at the address.
    """
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError as error:
        raise make_error("E205", "extraction on a Ray cluster needs ray: pip install 'kvformat[ray]'") from error
    if num_cpus < 0 or num_gpus < 0 or not (num_cpus or num_gpus):
        message = f"a worker needs some of num_cpus and num_gpus, found {num_cpus} and {num_gpus}"
        raise make_error("E081", message)
    if not ordinals:
        return
    with _connected(ray, address):
        room = _room(ray, num_cpus, num_gpus) if num_workers is None else num_workers
        if room < 1:
            has = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}" for name in ("CPU", "GPU"))
            message = f"no worker with num_cpus={num_cpus} and num_gpus={num_gpus} fits the Ray cluster: it has {has}"
            raise make_error("E081", message)
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0}
        worker = ray.remote(_Worker).options(**options)
        tasks = _Tasks(ray, lambda: worker.remote(prepare), ordinals, most_failures, on_done)
        try:
            tasks.run(min(room, len(ordinals)))
        finally:
            tasks.close()
    tasks.check()


class _Worker:
    """In a Ray process: prepares once, then works on one shard after the other."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._work: Work | None = None

    def started(self) -> None:
        """Return, which tells that the process runs."""

    def extract(self, ordinal: int) -> Any:
        """Work on a shard."""
        if self._work is None:
            self._work = self._prepare()
        return self._work([ordinal])


class _Failed(NamedTuple):
    """A shard that failed, or, without an ordinal, a worker that did not start."""

    ordinal: int | None
    cause: Exception
    told: Exception


class _Tasks:
    def __init__(
        self,
        ray: Any,
        start: Callable[[], Any],
        ordinals: Sequence[int],
        most_failures: int,
        on_done: Callable[[int, Any], object] | None,
    ) -> None:
        self._ray = ray
        self._start = start
        self._open = deque(ordinals)
        self._most_failures = most_failures
        self._on_done = on_done
        self._failed: list[_Failed] = []
        self._workers: list[Any] = []
        self._tasks: dict[Any, tuple[Any, int | None]] = {}  # worker and shard, by what the task will give

    def run(self, count: int) -> None:
        """Let so many workers work, until nothing is left or too much has failed."""
        for _ in range(count):
            self._hire()
        while self._tasks and (self._next() is not None or self._under_way()):
            (ready,), _ = self._ray.wait(list(self._tasks), num_returns=1)
            worker, ordinal = self._tasks.pop(ready)
            worker = self._come_back(ready, worker, ordinal)
            following = self._next()
            if following is None:
                continue
            if worker is None:
                self._hire()
            else:
                self._open.popleft()
                self._tasks[worker.extract.remote(following)] = worker, following

    def close(self) -> None:
        """End all workers; what they are at is broken off."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers.clear()
        self._tasks.clear()

    def check(self) -> None:
        """Raise what failed."""
        if not self._failed:
            return
        first = min(self._failed, key=lambda failed: (failed.ordinal is None, failed.ordinal))
        shards = sorted(failed.ordinal for failed in self._failed if failed.ordinal is not None)
        where = "start of a worker" if first.ordinal is None else f"shard {first.ordinal}"
        others = [str(shard) for shard in shards if shard != first.ordinal]
        rest = f"; failed too: {', '.join(others[:_LISTED])}{' and more' * (len(others) > _LISTED)}" if others else ""
        if self._open:
            rest += f"; not begun: {len(self._open)} shards"
        cause = first.cause
        if isinstance(cause, KVFormatError):
            message = f"{where}: {cause.message}{rest}"
            raise make_error(
                cause.code, message, path=cause.path, record=cause.record, layer=cause.layer
            ) from first.told
        cause.add_note(f"{where} on a Ray cluster{rest}")
        raise cause from first.told

    def _next(self) -> int | None:
        """The shard to begin next, if one may be begun."""
        return self._open[0] if self._open and len(self._failed) < self._most_failures else None

    def _under_way(self) -> bool:
        return any(ordinal is not None for _, ordinal in self._tasks.values())

    def _hire(self) -> None:
        worker = self._start()
        self._workers.append(worker)
        self._tasks[worker.started.remote()] = worker, None

    def _come_back(self, ready: Any, worker: Any, ordinal: int | None) -> Any:
        """The worker of a task that ended; None where it died."""
        exceptions = self._ray.exceptions
        try:
            given = self._ray.get(ready)
        except exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            self._failed.append(_Failed(ordinal, cause, error))
        except exceptions.RayError as error:
            message = (
                f"the Ray worker died ({str(error).strip() or type(error).__name__}): run again for what is missing"
            )
            self._failed.append(_Failed(ordinal, make_error("E119", message), error))
            self._workers.remove(worker)
            return None
        else:
            if ordinal is not None and self._on_done is not None:
                self._on_done(ordinal, given)
        return worker


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Within a cluster: the one the process is connected to, or another for the time of the block."""
    if ray.is_initialized():
        yield
        return
    named = address or os.environ.get("RAY_ADDRESS") or None
    if named is not None:
        _require_answer(named)
    try:
        # What workers print would come out here, amid results.
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        where = "on this machine" if named is None else f"at {named!r}"
        raise make_error("E081", f"no Ray cluster to work with {where} ({error}): {_NOT_CONNECTED}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """E081 unless something like a Ray cluster answers at an address: Ray itself would try for minutes."""
    scheme, separator, rest = address.rpartition("://")
    if address in ("auto", "local") or (separator and scheme != "ray"):
        return  # Ray finds, starts, or is told otherwise
    host, _, port = rest.partition("/")[0].partition("?")[0].rpartition(":")
    if not host or not port.isdecimal():
        message = f"the address of a Ray cluster is host:port, ray://host:port or auto, found {address!r}"
        raise make_error("E081", message)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return  # what it says is encrypted
            connection.sendall(_PREFACE)
            answer = _received(connection, 4)
    except (OSError, OverflowError) as error:
        message = f"no Ray cluster answers at {address!r} ({error}): {_NOT_CONNECTED}"
        raise make_error("E081", message) from error
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise make_error("E081", f"what answers at {address!r} is no Ray cluster: {_NOT_CONNECTED}")


def _received(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer where the other side ends."""
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def _room(ray: Any, num_cpus: float, num_gpus: float) -> int:
    """Workers the cluster has room for, others' work not counted."""
    has = ray.cluster_resources()
    needs = {"CPU": num_cpus, "GPU": num_gpus}
    return min(int(has.get(name, 0) // amount) for name, amount in needs.items() if amount)
