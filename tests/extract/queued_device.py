"""A device whose work runs late, in the least convenient order that its streams and events allow."""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvformat.interfaces import Extracted
from kvformat.spec.document import Document
from tests.extract.pipelines import Plain

__all__ = ["QueuedDevice", "QueuedModel"]

POISON = 0xAB


@dataclass(eq=False)
class Event:
    at: float | None = None


@dataclass(eq=False)
class Stream:
    """Operations in order. Each returns whether it is through; what waits is asked again later."""

    queue: deque[Callable[[], bool]] = field(default_factory=deque)


class QueuedDevice:
    """Streams, events and memory as a GPU's, on the host; safe in threads.

    Memory that nobody refers to is overwritten at once, as if it had been given to somebody else. An operation takes a
    second.

    Attributes
    ----------
    nbytes
        Device memory in use.
    pinned_nbytes
        Sizes of the page-locked memory that was asked for.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.now = 0.0
        self.main = Stream()
        self.streams = [self.main]
        self.blocks: dict[int, NDArray[np.uint8]] = {}  # by address
        self.nbytes = 0
        self.pinned_nbytes: list[int] = []

    # -- what the copy calls

    def current(self) -> Stream:
        return self.main

    def side(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_nbytes.append(nbytes)
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.blocks

    def record(self, stream: Stream) -> Event:
        event = Event()

        def through() -> bool:
            event.at = self.now
            return True

        with self.lock:
            stream.queue.append(through)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        with self.lock:
            stream.queue.append(lambda: event.at is not None)

    def synchronize(self, event: Event) -> None:
        with self.lock:
            self.finish(event)

    def elapsed_s(self, begun: Event, ended: Event) -> float:
        assert begun.at is not None
        assert ended.at is not None
        return ended.at - begun.at

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        block = self.blocks[source.data_ptr()]
        flat = target.reshape(-1).view(torch.uint8)

        def through() -> bool:
            flat.copy_(torch.from_numpy(block))
            self.now += 1.0
            return True

        with self.lock:
            stream.queue.append(through)

    # -- what models and tests call

    def compute(self, value: torch.Tensor) -> torch.Tensor:
        """A device tensor that will have these values once the current stream gets there."""
        block = np.full(value.nbytes, POISON, dtype=np.uint8)
        wanted = value.contiguous().reshape(-1).view(torch.uint8).numpy().copy()

        def through() -> bool:
            block[:] = wanted
            self.now += 1.0
            return True

        storage = block[:]  # lives as long as any tensor over it
        with self.lock:
            self.blocks[block.ctypes.data] = block
            self.nbytes += block.nbytes
            self.main.queue.append(through)
        weakref.finalize(storage, self._freed, block).atexit = False
        return torch.frombuffer(storage, dtype=value.dtype).view(value.shape)

    def run(self, operations: int) -> None:
        """Run at most some operations, of streams that can go on."""
        with self.lock:
            for _ in range(operations):
                if not self._advance():
                    return

    def finish(self, event: Event | None = None) -> None:
        """Run until an event is done, or everything is."""
        while any(stream.queue for stream in self.streams) if event is None else event.at is None:
            assert self._advance(), "the streams wait for each other"

    @property
    def queued(self) -> int:
        """Operations that did not run yet."""
        return sum(len(stream.queue) for stream in self.streams)

    def _advance(self) -> bool:
        for stream in self.random.sample(self.streams, len(self.streams)):
            if stream.queue and stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def _freed(self, block: NDArray[np.uint8]) -> None:
        self.blocks.pop(block.ctypes.data)
        self.nbytes -= block.nbytes
        block[:] = POISON


class QueuedModel(Plain):
    """Queues its forwards, and now and then lets the device go on a little."""

    def __init__(self, device: QueuedDevice, **options) -> None:
        super().__init__(**options)
        self.device = device

    def extract(self, documents: Sequence[Document]) -> list[Extracted]:
        with self.device.lock:
            self.device.run(self.device.random.randrange(4))
        return [
            Extracted({name: self.device.compute(tensor) for name, tensor in found.components.items()}, {})
            for found in super().extract(documents)
        ]
