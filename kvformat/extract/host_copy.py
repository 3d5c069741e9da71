"""Results of a model on their way to host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from kvformat.extract.cuda_clock import CudaClock, TimedStreams, ring_size
from kvformat.extract.meter import PipelineMeter
from kvformat.extract.pinned_ring import Piece, PinnedRing
from kvformat.interfaces import Extracted

__all__ = [
    "BlockingCopy",
    "HostCopy",
    "InPlace",
    "Sent",
    "StreamCopy",
    "host_copy_for",
]

_ALIGNMENT = 256  # of the tensors of a record within its piece; a multiple of every item size


class Sent:
    """One record on its way to host memory.

    Attributes
    ----------
    found
        Its tensors in host memory, whose copies may not have run yet.
    source
        Its tensors on the device, kept as long as something reads them.
    done
        Event after its last copy.
    piece
        The host memory, where it is used again.
    spans
        What to count once it is there: step or wait, and two events.
    """

    __slots__ = ("done", "found", "piece", "source", "spans")

    def __init__(
        self,
        found: Extracted,
        *,
        source: Extracted | None = None,
        done: Any = None,
        piece: Piece | None = None,
        spans: Sequence[tuple[Any, Any, Any]] = (),
    ) -> None:
        self.found = found
        self.source = source
        self.done = done
        self.piece = piece
        self.spans = spans


class HostCopy(Protocol):
    """Brings results to host memory. The model's thread sends, the writing thread receives, in the same order."""

    @property
    def device_timed(self) -> bool:
        """Whether forward and copy run in the background, and the device tells how long they took."""

    def begin(self) -> None:
        """A forward is about to be queued. Only where ``device_timed``."""

    def settle(self) -> None:
        """Wait for the forward that was queued last."""

    def send(self, found: Sequence[Extracted]) -> list[Sent]:
        """Start to copy the results of a forward."""

    def receive(self, sent: Sent, meter: PipelineMeter) -> Extracted:
        """The record in host memory, once it is there; valid until :meth:`release`."""

    def release(self, sent: Sent) -> None:
        """The record's host memory is not needed any more."""

    def close(self) -> None:
        """Return when nothing is copied any more. More than once is harmless."""


class InPlace:
    """For a model on CPU: its results are in host memory already, and are used where they lie."""

    device_timed = False

    def begin(self) -> None:
        """Nothing is queued."""

    def settle(self) -> None:
        """Nothing is queued."""

    def send(self, found: Sequence[Extracted]) -> list[Sent]:
        """The results as they are."""
        return [Sent(one) for one in found]

    def receive(self, sent: Sent, meter: PipelineMeter) -> Extracted:  # noqa: ARG002 - of the protocol
        """The same again."""
        return sent.found

    def release(self, sent: Sent) -> None:
        """Nothing to do: the memory goes with its last tensor."""

    def close(self) -> None:
        """Nothing to do."""


class BlockingCopy(InPlace):
    """For devices without queues of their own, such as MPS: the model's thread waits for the forward, then copies.

    Parameters
    ----------
    synchronize
        Waits for what was queued on the device.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize

    def settle(self) -> None:
        """So that the copy is not charged with the forward."""
        self._synchronize()

    def send(self, found: Sequence[Extracted]) -> list[Sent]:
        """Copies in host memory."""
        return [Sent(Extracted(components=_to_cpu(one.components), extras=_to_cpu(one.extras))) for one in found]


class StreamCopy:
    """For CUDA: a side stream copies into a ring of page-locked memory while the next forward runs.

    A copy begins when its forward is through, and the writing thread waits for the event behind it. The tensors of a
    forward are referred to until then, so the allocator gives their memory to nobody else.

    Parameters
    ----------
    streams
        The device.
    ring_nbytes
        Size of the ring.
    """

    device_timed = True

    def __init__(self, streams: TimedStreams, *, ring_nbytes: int) -> None:
        self._streams = streams
        self._side = streams.side()
        self._ring = PinnedRing(ring_nbytes, streams.pinned)
        self._begun: Any = None  # before the forwards that were not sent yet
        self._through: Any = None  # behind the forward that was sent last
        self._last: Any = None  # behind the copy that was queued last

    def begin(self) -> None:
        """Note on the device's clock when the forward begins."""
        if self._begun is None:
            self._begun = self._streams.record(self._streams.current())

    def settle(self) -> None:
        """Wait for the current stream."""
        self._streams.synchronize(self._streams.record(self._streams.current()))

    def send(self, found: Sequence[Extracted]) -> list[Sent]:
        """Queue the copies; the host goes on."""
        streams = self._streams
        sources = [Extracted(components=self._dense(one.components), extras=self._dense(one.extras)) for one in found]
        current = streams.current()
        through = streams.record(current)
        spans: list[tuple[Any, Any, Any]] = []
        if self._begun is not None:
            spans.append(("model", self._begun, through))
            if self._through is not None:
                spans.append(("blocked", self._through, self._begun))
        self._begun, self._through = None, through
        streams.wait(self._side, through)
        before = streams.record(self._side)
        sent = []
        try:
            for source in sources:
                host, piece = self._copy(source)
                done = streams.record(self._side)
                spans.append(("copy", before, done))
                sent.append(Sent(host, source=source, done=done, piece=piece, spans=spans))
                before, spans = done, []
        except BaseException:
            # Copies that were queued must neither read nor write memory that others have by then.
            streams.synchronize(streams.record(self._side))
            raise
        self._last = before
        return sent

    def receive(self, sent: Sent, meter: PipelineMeter) -> Extracted:
        """Wait for the event behind the copy, and let go of the device's memory."""
        self._streams.synchronize(sent.done)
        sent.source = None
        for what, begun, ended in sent.spans:
            meter.add(what, self._streams.elapsed_s(begun, ended))
        return sent.found

    def release(self, sent: Sent) -> None:
        """The next copies may use the piece."""
        if sent.piece is not None:
            self._ring.give_back(sent.piece)
            sent.piece = None

    def close(self) -> None:
        """Wait for the last copy: the ring is freed behind it."""
        if self._last is not None:
            self._streams.synchronize(self._last)
            self._last = None

    def _dense(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors whose memory can be copied as it is; still part of the forward."""
        return {
            name: tensor.resolve_neg().contiguous() if self._streams.holds(tensor) else tensor
            for name, tensor in tensors.items()
        }

    def _copy(self, source: Extracted) -> tuple[Extracted, Piece]:
        """Queue the copies of one record; what is in host memory already is passed on."""
        mine = [t for t in (*source.components.values(), *source.extras.values()) if self._streams.holds(t)]
        piece = self._ring.take(sum(_aligned(tensor.nbytes) for tensor in mine))
        end = 0

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal end
            if not self._streams.holds(tensor):
                return tensor
            target = piece.memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            end += _aligned(tensor.nbytes)
            self._streams.copy(self._side, target, tensor)
            return target

        components = {name: copied(tensor) for name, tensor in source.components.items()}
        extras = {name: copied(tensor) for name, tensor in source.extras.items()}
        return Extracted(components=components, extras=extras), piece


def host_copy_for(found: Sequence[Extracted], *, inflight_nbytes: int) -> HostCopy:
    """What brings results such as these to host memory: the first of a model show where it computes.

    Parameters
    ----------
    inflight_nbytes
        Bytes that will be on the way at once.
    """
    tensors = (tensor for one in found for tensor in (*one.components.values(), *one.extras.values()))
    devices = [tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
    if not devices:
        return InPlace()
    device = devices[0]
    if device.type == "cuda":
        return StreamCopy(CudaClock(device), ring_nbytes=ring_size(inflight_nbytes))
    return BlockingCopy(lambda: torch.get_device_module(device).synchronize())


def _to_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu") for name, tensor in tensors.items()}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
