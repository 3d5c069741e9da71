"""Layer staging: the layers of a batch on the device, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from threading import Lock
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex

import torch

from kvformat.errors import make_error
from kvformat.loader.mover import Moved, Mover, StreamMover, ViewMover
from kvformat.loader.staged import StagedLayer
from kvformat.loader.streams import CudaStreams
from kvformat.loader.sweep import Sweep

__all__ = ["LayerStager", "LayeredBatch"]


class LayeredBatch(Protocol):
    """What the stager needs of a batch. ``role_of(name)``, the role of a component, is used where there is one."""

    @property
    def components(self) -> Mapping[str, torch.Tensor]:
        """Tensors by component name, ``[rows, ...]``; a row is one model layer."""

    @property
    def layers(self) -> Sequence[int]:
        """Model layers the batch holds."""

    def rows_of(self, layer: int) -> Mapping[str, int]:
        """Row that holds a model layer, by component name; for a layer that reuses another's K/V, that one's."""


class LayerStager:
    """Hands out the layers of a batch on a device, and holds few of them there.

    ``stager[i]`` is model layer i. While the consumer computes with it, the layers it is expected to ask for next move
    on a side stream, from the batch where its memory is pinned, else from a ring of ``depth`` pinned slots. Any order
    of access is right; walks up or down in equal steps find every layer prepared. The direction is seen from the last
    two accesses, so the backward pass, and activation checkpoints that recompute a layer each, need no word about it.

    What was handed out is never overwritten: each layer has memory of its own, freed when nobody refers to it. The
    stager refers to ``depth`` layers at most. So does the device hold no more, if the consumer lets go of a layer
    before it asks for the next one: where autograd would save a layer's tensors, ask for the layer *inside* a
    checkpointed function, as in the example, and do not pass it in.

    Where the batch is on the device already, and always on CPU, the tensors are views of it: no copies, no threads.

    Safe in threads; a tensor is ready for what is queued on the stream that was current when it was handed out. Close
    it, or use it as a context manager, when the batch is done with, backward pass included: closing waits for copies
    from the batch that still run, and what was handed out stays valid. A stager that is collected closes itself.

    Parameters
    ----------
    batch
        Layers on the host (pinned or not), or on the device. The stager refers to it until it is closed.
    device
        ``cpu`` or a CUDA device.
    depth
        Layers to hold, that in use included: at least 1. With 1, nothing moves ahead.
    mover
        What brings layers to the device instead, for devices of another kind.

    Raises
    ------
    UsageError
        E081 for a ``depth`` below 1, for a device that is unknown or not there, for a batch on another device.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> class Pairs:
    ...     layers = (0, 1, 2)
    ...     components = {"k": torch.ones(3, 5, 4), "v": torch.ones(3, 5, 4)}
    ...     def rows_of(self, layer): return {"k": layer, "v": layer}
    ...     def role_of(self, name): return {"k": "key", "v": "value"}[name]
    >>> def attend(query, stager, layer):
    ...     staged = stager[layer]
    ...     return query + torch.softmax(query @ staged.key.T, -1) @ staged.value
    >>> query = torch.zeros(2, 4, requires_grad=True)
    >>> with LayerStager(Pairs(), "cpu") as stager:
    ...     hidden = query
    ...     for layer in stager.layers:
    ...         hidden = checkpoint(attend, hidden, stager, layer, use_reentrant=False)
    ...     hidden.sum().backward()
    >>> hidden.sum().item()
    24.0
    """

    _closed = True  # until a new one is whole

    def __init__(
        self, batch: LayeredBatch, device: str | int | torch.device, depth: int = 2, *, mover: Mover | None = None
    ) -> None:
        if not (hasattr(batch, "components") and hasattr(batch, "rows_of")):
            raise make_error("E081", f"expected a batch, found {type(batch).__name__}: make a stager for each batch")
        given: object = depth
        if not isinstance(given, SupportsIndex) or isinstance(given, bool) or index(given) < 1:
            raise make_error("E081", f"depth must be an integer of at least 1, found {depth!r}")
        depth = min(index(given), max(1, len(batch.layers)))
        self._mover = mover or _mover(batch, device, depth)
        self._components = dict(batch.components)
        self._batch: LayeredBatch | None = batch
        self._layers = tuple(sorted(batch.layers))
        self._rows = {layer: dict(batch.rows_of(layer)) for layer in self._layers}
        self._positions = {layer: position for position, layer in enumerate(self._layers)}
        role_of = getattr(batch, "role_of", None)
        self._roles: dict[str, str] = {name: role_of(name) for name in self._components} if role_of else {}
        # A layer that reuses another's rows is held once, under the first of them.
        first: dict[frozenset[tuple[str, int]], int] = {}
        units = [first.setdefault(frozenset(self._rows[layer].items()), layer) for layer in self._layers]
        self._sweep = Sweep(units, depth=depth)
        self._held: dict[int, Moved] = {}
        self._lock = Lock()
        self._closed = False

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layers, ascending."""
        return self._layers

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers the stager refers to now; of those that share their tensors the first, which may not be used yet."""
        return tuple(sorted(self._held))

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[StagedLayer]:
        for layer in self._layers:
            yield self[layer]

    def __getitem__(self, layer: int) -> StagedLayer:
        """Tensors of a model layer, on the device: ``.key`` and ``.value``, or by component name.

        Raises
        ------
        UsageError
            E081 for a layer the batch does not hold, and after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise make_error("E081", "the stager is closed: make one for each batch", layer=layer)
            try:
                position = self._positions.get(layer)
            except TypeError:  # a list, say
                position = None
            if position is None:
                raise make_error("E081", f"the batch has no layer {layer!r}; it holds {list(self._layers)}")
            wanted = self._sweep.visit(position)
            for unit in [unit for unit in self._held if unit not in wanted]:
                self._mover.drop(self._held.pop(unit))  # before others are loaded: its memory serves them
            for unit in wanted:
                if unit not in self._held:
                    self._held[unit] = self._mover.load(self._sources(unit))
            tensors = self._mover.hand_out(self._held[wanted[0]])
        return StagedLayer(layer, tensors, self._roles)

    def close(self) -> None:
        """Wait for running copies, and let go of the batch and its layers. May be called again."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
            try:
                self._mover.close()
            finally:
                self._held.clear()
                self._components = {}
                self._batch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _sources(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: self._components[name][row] for name, row in self._rows[layer].items()}


def _mover(batch: LayeredBatch, device: str | int | torch.device, depth: int) -> Mover:
    """What brings a batch to a device; E081 where nothing does."""
    target = _device(device)
    places = {tensor.device for tensor in batch.components.values()}
    if places <= {target}:
        return ViewMover()
    if target.type == "cpu" or places != {torch.device("cpu")}:
        found = ", ".join(sorted(map(str, places)))
        raise make_error("E081", f"layers move from the host to a device; found a batch on {found} for {target}")
    return StreamMover(CudaStreams(target), slots=depth)


def _device(device: str | int | torch.device) -> torch.device:
    """A device that is there, with its index if it is of CUDA."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise make_error("E081", f"no device {device!r}: give cpu, cuda, or cuda:0 and the like") from error
    if target.type == "cpu":
        return torch.device("cpu")
    if target.type != "cuda":
        raise make_error("E081", f"layers are staged on cpu or cuda, found {target}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: Any = target.index  # None for the current device, whatever torch's annotation says
    if (index or 0) >= count:
        raise make_error("E081", f"there is no {target}: this process sees {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
