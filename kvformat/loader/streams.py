"""Queues of device work: the few operations that moving layers needs, and CUDA's."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "Streams"]


class Streams(Protocol):
    """A device whose work is queued on streams and runs later, in the order of each stream.

    A block of device memory belongs to the stream that was current when it was allocated. Once nobody refers to it,
    it may be allocated again on that stream at once, although work that was queued before may still use it.
    """

    def current(self) -> Any:
        """The stream that the consumer queues work on now."""

    def side(self) -> Any:
        """A new stream of our own."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised contiguous device tensor with the shape and dtype of another, of the current stream."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory the device can copy from in the background: uint8, ``[nbytes]``."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the device can copy from a host tensor in the background."""

    def record(self, stream: Any) -> Any:
        """An event that is done when all that is queued on a stream so far is."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is queued on a stream from now on wait for an event; the host goes on."""

    def synchronize(self, event: Any) -> None:
        """Let the host wait for an event."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from pinned host memory."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor, once nobody refers to it, until what a stream has queued by then is done."""


class CudaStreams:
    """Streams, events and memory of a CUDA device.

    Parameters
    ----------
    device
        CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.cuda.Stream:
        """torch's current stream of the device."""
        return torch.cuda.current_stream(self._device)

    def side(self) -> torch.cuda.Stream:
        """A stream that does not wait for the default one."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch annotates its attributes alone

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """From the caching allocator."""
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """From the caching allocator of page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the memory is page-locked."""
        return tensor.is_pinned()

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Without a wait of the host."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Without a wait of the host."""
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Releases the interpreter meanwhile."""
        event.synchronize()

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous for page-locked contiguous memory."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Tensor.record_stream``."""
        tensor.record_stream(stream)
