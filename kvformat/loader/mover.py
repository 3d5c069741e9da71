"""Layers on their way to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from kvformat.loader.streams import Streams

__all__ = ["Moved", "Mover", "StreamMover", "ViewMover"]

_ALIGNMENT = 256  # of the tensors of a layer within a pinned slot; a multiple of every item size


class Moved:
    """Tensors of a layer on the device, by component name, whose copies may not have run yet.

    Attributes
    ----------
    stream
        The stream their memory belongs to.
    done
        Event after the last copy.
    given
        Whether they were handed out.
    """

    __slots__ = ("done", "given", "stream", "tensors")

    def __init__(self, tensors: Mapping[str, torch.Tensor], stream: Any = None, done: Any = None) -> None:
        self.tensors = tensors
        self.stream = stream
        self.done = done
        self.given = False


class Mover(Protocol):
    """Brings layers to a device. Not safe in threads: the caller takes turns."""

    def load(self, sources: Mapping[str, torch.Tensor]) -> Moved:
        """Start to bring host tensors to the device."""

    def hand_out(self, moved: Moved) -> Mapping[str, torch.Tensor]:
        """The tensors, for work that is queued on the current stream from now on. May be called again."""

    def drop(self, moved: Moved) -> None:
        """Prepare for giving up our references to the tensors. Whoever was handed them may hold on to them."""

    def close(self) -> None:
        """Return when nothing reads from the sources any more."""


class ViewMover:
    """For tensors that are on the device already: hands out the sources themselves."""

    def load(self, sources: Mapping[str, torch.Tensor]) -> Moved:
        """The sources as they are."""
        return Moved(sources)

    def hand_out(self, moved: Moved) -> Mapping[str, torch.Tensor]:
        """The same again."""
        return moved.tensors

    def drop(self, moved: Moved) -> None:
        """Nothing to do: they are not ours."""

    def close(self) -> None:
        """Nothing to do: nothing runs."""


class StreamMover:
    """Copies on a side stream into fresh device memory.

    Every layer gets tensors of its own, which are never written to again: what was handed out stays what it is for as
    long as the consumer, or autograd, holds on to it. The memory belongs to the consumer's stream, and a copy into it
    begins only after what that stream had queued when it was allocated. So memory of a layer that was dropped serves
    the next one without a wait of the host, and a host far ahead of the device needs no more memory than one in step.

    Sources in pinned memory are copied from where they lie. Others pass a ring of pinned slots; a slot is written to
    again once the event after its last copy is done.

    Parameters
    ----------
    streams
        The device.
    slots
        Pinned slots of the ring, each as large as the largest layer that passed it. None is allocated before it is
        needed.
    """

    def __init__(self, streams: Streams, *, slots: int) -> None:
        self._streams = streams
        self._side = streams.side()
        self._ring = [_Slot() for _ in range(slots)]
        self._turn = 0
        self._last: Any = None

    def load(self, sources: Mapping[str, torch.Tensor]) -> Moved:
        """Queue the copies; waits for a slot at most."""
        streams = self._streams
        stream = streams.current()
        with torch.inference_mode(mode=False):  # tensors may serve autograd later, wherever they were loaded
            targets = {name: streams.empty(source) for name, source in sources.items()}
            slot, ready = self._stage(sources)
        streams.wait(self._side, streams.record(stream))
        try:
            for name, source in ready.items():
                streams.copy(self._side, targets[name], source)
            done = streams.record(self._side)
        except BaseException:
            # Copies that were queued must neither read a slot nor write memory that others have by then.
            streams.synchronize(streams.record(self._side))
            raise
        self._last = done
        if slot is not None:
            slot.busy = done
        return Moved(targets, stream, done)

    def hand_out(self, moved: Moved) -> Mapping[str, torch.Tensor]:
        """Let the current stream wait for the copies."""
        current = self._streams.current()
        self._streams.wait(current, moved.done)
        if current != moved.stream:
            for tensor in moved.tensors.values():
                self._streams.keep(tensor, current)
        moved.given = True
        return moved.tensors

    def drop(self, moved: Moved) -> None:
        """Where nobody waited for the copies, let the stream that owns the memory do so."""
        if not moved.given:
            # Its memory is free for the stream it belongs to, which has not waited for the copy into it.
            self._streams.wait(moved.stream, moved.done)

    def close(self) -> None:
        """Wait for the last copy, and free the ring."""
        if self._last is not None:
            self._streams.synchronize(self._last)  # copies run in order
            self._last = None
        self._ring.clear()

    def _stage(self, sources: Mapping[str, torch.Tensor]) -> tuple[_Slot | None, dict[str, torch.Tensor]]:
        """The sources in pinned memory, and the slot of those that were not."""
        ready = dict(sources)
        pageable = {n: t for n, t in sources.items() if not (t.is_contiguous() and self._streams.is_pinned(t))}
        if not pageable:
            return None, ready
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        if slot.busy is not None:
            self._streams.synchronize(slot.busy)
            slot.busy = None
        ready.update(slot.fill(pageable, self._streams))
        return slot, ready


class _Slot:
    """Pinned memory for one layer.

    Attributes
    ----------
    busy
        Event after the last copy from it; None where nothing reads from it.
    """

    def __init__(self) -> None:
        self.busy: Any = None
        self._memory: torch.Tensor | None = None

    def fill(self, sources: Mapping[str, torch.Tensor], streams: Streams) -> dict[str, torch.Tensor]:
        """Copy host tensors here; the copies are contiguous."""
        starts, end = {}, 0
        for name, source in sources.items():
            starts[name] = end
            end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or self._memory.nbytes < end:
            self._memory = streams.pinned(end)
        copies = {}
        for name, source in sources.items():
            part = self._memory[starts[name] : starts[name] + source.nbytes]
            copies[name] = part.view(source.dtype).view(source.shape)
            copies[name].copy_(source)
        return copies
