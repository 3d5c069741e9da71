"""What a worker says of itself now and then, and what that tells others."""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

__all__ = [
    "SAID_EVERY_S",
    "STALE_S",
    "Liveness",
    "Phase",
    "Worker",
    "WorkerState",
    "is_alive",
    "is_loading",
    "liveness_of",
]

Phase = Literal["load", "start", "work", "wait", "seal"]
"""In ``load``, a worker holds staged work of its plan; whether it is its own, the loaded model will tell."""
Liveness = Literal["live", "dead", "unknown", "stale"]
STALE_S = 300.0
"""A worker nobody can ask, and that said nothing for so long, counts as gone. They speak ten times as often."""

SAID_EVERY_S = STALE_S / 10

_NAME = re.compile(r"worker-([0-9]+)-([0-9a-f]{8})\.json")


class WorkerState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. Nothing of it enters what is published.

    Attributes
    ----------
    token
        8 hexadecimal digits, its own: in the names of what it has in work.
    started, updated
        Seconds since 1970.
    proved
        Whether it looked at all shards again that earlier runs finished and that are its own.
    shard
        Ordinal of the one in hand; ``shard_records`` of its ``shard_total`` records are there.
    num_shards, num_tokens, nbytes
        What it finished so far, and bytes of the shard in hand.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    token: str
    started: float
    updated: float
    phase: Phase = "start"
    proved: bool = False
    shard: int | None = None
    shard_records: int = 0
    shard_total: int = 0
    num_shards: int = 0
    num_tokens: int = 0
    nbytes: int = 0

    @classmethod
    def of_this_process(cls, rank: int, world_size: int, *, phase: Phase, now: float) -> WorkerState:
        """Of a worker that begins now, in seconds since 1970."""
        return cls(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            token=secrets.token_hex(4),
            started=now,
            updated=now,
            phase=phase,
        )

    @property
    def name(self) -> str:
        """Of its file."""
        return f"worker-{self.rank}-{self.token}.json"

    def encode(self) -> bytes:
        """As a file."""
        return msgspec.json.encode(self)

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether this may be the name of such a file."""
        return _NAME.fullmatch(name) is not None

    @classmethod
    def decode(cls, data: bytes) -> WorkerState | None:
        """The state in a file; None where that cannot be told."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class Worker(NamedTuple):
    """A worker as others see it.

    ``live`` and ``dead`` are certain. Where nobody can tell, one is ``unknown`` that said something a short while ago,
    and ``stale`` afterwards.
    """

    state: WorkerState
    liveness: Liveness


def liveness_of(state: WorkerState, *, held: bool | None, here: bool, now: float) -> Liveness:
    """Whether a worker lives.

    Parameters
    ----------
    held
        Whether it holds what only a live process can hold; None where that cannot be told.
    here
        Whether it is one of this machine: elsewhere, a lock that can be had proves nothing.
    now
        Seconds since 1970. Clocks of machines may differ by less than a minute or so.
    """
    if held:
        return "live"
    if held is False and here:
        return "dead"
    return "unknown" if now - state.updated <= STALE_S else "stale"


def is_alive(worker: Worker) -> bool:
    """Whether a worker lives, or may well do."""
    return worker.liveness in ("live", "unknown")


def is_loading(state: WorkerState) -> bool:
    """Whether a worker has no part yet in the work it holds: it waits for its model."""
    return state.phase == "load"
