"""A CUDA device for copies that are timed: streams, events that tell the time, and page-locked memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvformat.loader.streams import CudaStreams, Streams

__all__ = ["CudaClock", "TimedStreams", "ring_size"]


class TimedStreams(Streams, Protocol):
    """Streams whose events have times."""

    def holds(self, tensor: object) -> bool:
        """Whether something is a tensor in the device's memory."""

    def elapsed_s(self, begun: Any, ended: Any) -> float:
        """Seconds between two events that are done."""


class CudaClock(CudaStreams):
    """Streams of a CUDA device, with events that tell the time.

    Parameters
    ----------
    device
        CUDA device with an index.
    """

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Without a wait of the host; who waits for the event sleeps, and leaves the processor to others."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # as torch has it
        event.record(stream)
        return event

    def holds(self, tensor: object) -> bool:
        """Whether it is a tensor on this device."""
        return isinstance(tensor, torch.Tensor) and tensor.device == self._device

    def elapsed_s(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """By the device's clock."""
        milliseconds: float = begun.elapsed_time(ended)
        return milliseconds / 1e3


def ring_size(inflight_nbytes: int) -> int:
    """Bytes of page-locked memory for copies of which so many bytes are on the way at once.

    A quarter more would always have room (:class:`~kvformat.extract.pinned_ring.PinnedRing`), but torch rounds what it
    locks up to a power of two. So it is the next one, where that is little more, else the one below: what finds no
    room there, now and then, is locked by itself, and torch keeps that for the next time.
    """
    wanted = inflight_nbytes + inflight_nbytes // 4
    above = 1 << (wanted - 1).bit_length()
    return above if 4 * above <= 5 * wanted else above // 2
