"""Peers behind a training loader: batches packed in the worker, which is where a collate function runs.

A batch is one fresh tensor ``[2, layers, sum of tokens, heads, head_dim]``, ``k`` then ``v``, so that a single block
of shared memory carries it over. It is filled by numpy, whose strided copy is quicker than ``torch.cat``. The blocks
are new for each batch, as torch's own collate function takes them: a batch stays valid while its user wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

if TYPE_CHECKING:
    from benchmarks.peers import Reader
    from benchmarks.shapes import Shape

__all__ = [
    "Batch",
    "BatchLoader",
    "Collate",
    "DataLoaderOver",
    "Indexed",
    "loader_options",
    "pack_into",
    "reader_views",
]

_ITEM_NBYTES = 2
_PAGE_ITEMS = 4096 // _ITEM_NBYTES

Views = tuple[np.ndarray, np.ndarray]


class Batch(NamedTuple):
    """Packed records.

    Parameters
    ----------
    lengths
        Tokens of each record, int32.
    kv
        BF16 ``[2, layers, sum of tokens, heads, head_dim]``.
    """

    lengths: np.ndarray
    kv: torch.Tensor


class BatchLoader(Protocol):
    """A peer's loader, whose workers live until ``close``."""

    def batches(self, order: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Every batch of ``order``; a loader with an order of its own gives as many epochs of it instead."""

    def close(self) -> None:
        """Stop the workers."""


def pack_into(target: np.ndarray, views: Sequence[Views]) -> None:
    """Copy records beside each other.

    Parameters
    ----------
    target
        uint16 ``[2, layers, sum of tokens, heads, head_dim]``.
    views
        ``k`` and ``v`` of each record, uint16 ``[layers, tokens, heads, head_dim]``.
    """
    start = 0
    for k, v in views:
        end = start + k.shape[1]
        np.copyto(target[0, :, start:end], k)
        np.copyto(target[1, :, start:end], v)
        start = end


class Collate:
    """Packs what a dataset gives for each record.

    Parameters
    ----------
    shape
        Geometry.
    views
        Makes ``k`` and ``v`` of an item; absent where items are the bytes of ``k`` then ``v``.
    """

    def __init__(self, shape: Shape, views: Callable[[Any], Views] | None = None) -> None:
        self._geometry = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self._views = views or self._of_bytes

    def _of_bytes(self, value: Any) -> Views:
        layers, heads, dim = self._geometry
        k, v = np.frombuffer(value, dtype=np.uint16).reshape(2, layers, -1, heads, dim)
        return k, v

    def __call__(self, items: Sequence[Any]) -> Batch:
        layers, heads, dim = self._geometry
        views = [self._views(item) for item in items]
        lengths = np.array([k.shape[1] for k, _ in views], dtype=np.int32)
        dims = (2, layers, int(lengths.sum()), heads, dim)
        nbytes = int(np.prod(dims)) * _ITEM_NBYTES
        if get_worker_info() is None:
            flat = torch.empty(nbytes, dtype=torch.uint8)
        else:
            # What torch's default_collate does: filled where the consumer will find it, instead of copied there.
            storage = torch.UntypedStorage._new_shared(nbytes)  # noqa: SLF001 - no public way without a copy
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        pack_into(flat.numpy().view(np.uint16).reshape(dims), views)
        return Batch(lengths, flat.view(torch.bfloat16).view(dims))


def reader_views(item: tuple[Any, Any]) -> Views:
    """What :meth:`benchmarks.peers.Reader.views` gives, as arrays of bits."""
    k, v = item
    if isinstance(k, torch.Tensor):
        return k.view(torch.uint16).numpy(), v.view(torch.uint16).numpy()
    return k, v


class Indexed(Dataset[Any]):
    """Records by number, of a reader that every process opens for itself; all of them are touched then.

    Parameters
    ----------
    opened
        Opens the reader; picklable where workers are spawned.
    """

    def __init__(self, opened: Callable[[], Reader], num_records: int) -> None:
        self._opened = opened
        self._num_records = num_records
        self._reader: Reader | None = None

    def __len__(self) -> int:
        return self._num_records

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        reader = self._reader or self._open()
        return reader.views_of(numbers)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def _open(self) -> Reader:
        reader = self._reader = self._opened()
        for number in range(self._num_records):
            for part in reader_views(reader.views(number)):
                # One item a page: what is mapped has its pages from then on, as after an epoch.
                part.reshape(-1)[::_PAGE_ITEMS].max()
        return reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def loader_options(num_workers: int, context: str = "fork") -> dict[str, Any]:
    """What every ``DataLoader`` is given: workers that stay, each with two batches ahead."""
    if not num_workers:
        return {}
    return {
        "num_workers": num_workers,
        "persistent_workers": True,
        "prefetch_factor": 2,
        "multiprocessing_context": context,
    }


class _Order:
    """The batches of a round, drawn in the main process."""

    def __init__(self) -> None:
        self.batches: Sequence[Sequence[int]] = ()

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class DataLoaderOver:
    """torch's ``DataLoader`` over a dataset by record number."""

    def __init__(self, dataset: Indexed, collate: Collate, *, num_workers: int, context: str = "fork") -> None:
        self._order = _Order()
        self._dataset = dataset
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset, batch_sampler=self._order, collate_fn=collate, **loader_options(num_workers, context)
        )

    def batches(self, order: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Every batch of ``order``."""
        assert self._loader is not None
        self._order.batches = order
        yield from self._loader

    def close(self) -> None:
        """Stop the workers."""
        self._loader = None
        self._dataset.close()
