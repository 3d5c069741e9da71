"""A device whose work runs late and in the least convenient order that its streams and events allow."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

POISON = 0xAB


@dataclass(eq=False)
class Event:
    done: bool = False


@dataclass(eq=False)
class Stream:
    """Operations in order. Each returns whether it is through; what waits is asked again later."""

    queue: deque[Callable[[], bool]] = field(default_factory=deque)


@dataclass(eq=False)
class Block:
    memory: NDArray[np.uint8]
    owner: Stream
    kept: set[Stream] = field(default_factory=set)


class SimulatedStreams:
    """Streams, events and a caching allocator as a GPU's, on the host.

    Attributes
    ----------
    peak_nbytes
        Most device memory that was allocated at a time.
    host_waits
        How often the host waited for an event that was not done.
    """

    def __init__(self, seed: int = 0, *, pinned: bool = False, eager: bool = False) -> None:
        self.random = random.Random(seed)
        self.pinned_sources = pinned
        self.eager = eager  # what the current stream waits for runs at once, so that real operators see it
        self.main = Stream()
        self.streams = [self.main]
        self.free: list[Block] = []
        self.pending: list[tuple[Block, list[Event]]] = []
        self.used: dict[int, Block] = {}  # by address
        self.nbytes = self.peak_nbytes = 0
        self.host_waits = 0
        self.pinned_nbytes: list[int] = []

    # -- what the mover calls --------------------------------------------------------------------------------------

    def current(self) -> Stream:
        return self.main

    def side(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        for block, events in self.pending:
            if all(event.done for event in events):
                self.free.append(block)
        self.pending = [(block, events) for block, events in self.pending if not all(e.done for e in events)]
        fitting = [b for b in self.free if b.owner is self.main and b.memory.nbytes == like.nbytes]
        if fitting:
            block = fitting[-1]
            self.free.remove(block)
        else:
            block = Block(np.full(like.nbytes, POISON, dtype=np.uint8), self.main)
        self.used[block.memory.ctypes.data] = block
        self.nbytes += like.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        storage = block.memory[:]  # lives as long as any tensor over it, autograd's included
        weakref.finalize(storage, self._freed, block).atexit = False
        return torch.frombuffer(storage, dtype=like.dtype).view(like.shape)

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_nbytes.append(nbytes)
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.pinned_sources

    def record(self, stream: Stream) -> Event:
        event = Event()

        def done() -> bool:
            event.done = True
            return True

        stream.queue.append(done)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.queue.append(lambda: event.done)
        if self.eager and stream is self.main:
            self.finish(event)

    def synchronize(self, event: Event) -> None:
        self.host_waits += not event.done
        self.finish(event)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert source.is_contiguous()
        memory = self._memory(target)

        def through() -> bool:
            memory.copy_(source)
            return True

        stream.queue.append(through)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.used[tensor.data_ptr()].kept.add(stream)

    # -- what the tests call ---------------------------------------------------------------------------------------

    def compute(self, tensor: torch.Tensor, wanted: torch.Tensor) -> None:
        """Queue work that reads a tensor, on the current stream."""
        memory = self._memory(tensor)

        def through() -> bool:
            assert torch.equal(memory, wanted), "the consumer read something else"
            return True

        self.main.queue.append(through)

    def run(self, operations: int) -> None:
        """Run at most some operations, of streams that can go on."""
        for _ in range(operations):
            if not self._advance():
                return

    def finish(self, event: Event | None = None) -> None:
        """Run until an event is done, or everything is."""
        while any(stream.queue for stream in self.streams) if event is None else not event.done:
            assert self._advance(), "the streams wait for each other"

    def _advance(self) -> bool:
        for stream in self.random.sample(self.streams, len(self.streams)):
            if stream.queue and stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """What queued work has of a tensor: its memory, without a reference that keeps it allocated."""
        block = self.used[tensor.data_ptr()]
        with torch.inference_mode(mode=False):
            return torch.frombuffer(block.memory, dtype=tensor.dtype).view(tensor.shape)

    def _freed(self, block: Block) -> None:
        self.used.pop(block.memory.ctypes.data)
        self.nbytes -= block.memory.nbytes
        if block.kept:
            self.pending.append((block, [self.record(stream) for stream in block.kept]))
            block.kept = set()
        else:
            self.free.append(block)
