"""A collection of datasets as this process feeds batches from it."""

from __future__ import annotations

import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from kvformat.errors import make_error
from kvformat.loader.buffers import BufferPool
from kvformat.loader.collection import Collection, as_collection
from kvformat.loader.layouts import BatchLayout
from kvformat.loader.plan import Plan
from kvformat.read.dataset import Dataset
from kvformat.spec.digests import schema_digest

if TYPE_CHECKING:
    from kvformat.read.dataset import Place
    from kvformat.read.record import Record

__all__ = ["Source", "find_source", "source_of"]

_KEPT_NBYTES = 1 << 30
_REOPENED = 8


class Source:
    """Records by number, the plans of layouts, and the memory batches are packed into.

    It pickles to locations, options and ids. One process has one source of the same datasets, opened alike, for all
    batches that come from others.

    Attributes
    ----------
    collection
        The datasets.
    key
        The same in every process that opened the same datasets alike.
    """

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        first, *others = collection.datasets
        for other in others:
            if schema_digest(other.schema) != schema_digest(first.schema):
                raise make_error(
                    "E088", f"{other.location} has another schema than {first.location}: no batch can hold both"
                )
        self.packed = pickle.dumps(collection)
        self.key = _key(collection)
        self._plans: dict[BatchLayout, Plan] = {}
        self._pools: dict[bool, BufferPool] = {}
        self._lock = threading.Lock()
        _SOURCES[self.key] = self

    def __reduce__(self) -> tuple[object, ...]:
        return Source, (self.collection,)

    def plan(self, layout: BatchLayout) -> Plan:
        """The plan of a layout; errors as :class:`Plan`."""
        found = self._plans.get(layout)
        if found is None:
            found = self._plans[layout] = Plan(self.collection.datasets[0].schema, layout)
        return found

    def pool(self, *, pin_memory: bool = False) -> BufferPool:
        """Memory for batches."""
        with self._lock:
            found = self._pools.get(pin_memory)
            if found is None:
                found = self._pools[pin_memory] = BufferPool(_KEPT_NBYTES, pin_memory=pin_memory)
            return found

    def record(self, number: int) -> Record:
        """A record of the collection."""
        dataset, own = self.collection.resolve(number)
        return dataset[own]

    def places(self, numbers: Sequence[int], bits: int) -> list[Place]:
        """Where records lie, and which of them may be copied as they are; see :meth:`Dataset.places`."""
        datasets = self.collection.datasets
        if len(datasets) == 1:
            return datasets[0].places(numbers, bits)
        resolved = map(self.collection.resolve, numbers)
        return [dataset.places((own,), bits)[0] for dataset, own in resolved]


_SOURCES: WeakValueDictionary[str, Source] = WeakValueDictionary()
"""Sources alive in this process: batches come out of worker processes as references, and nothing else comes along."""
_REOPENED_SOURCES: OrderedDict[str, Source] = OrderedDict()
"""Sources that a batch from another process had to open here: kept so that the next batch finds them."""


def find_source(key: str, packed: bytes) -> Source:
    """The source of a key in this process, opened where it is not open yet."""
    found = _SOURCES.get(key)
    if found is None:
        found = Source(pickle.loads(packed))  # noqa: S301 -- made by another process of the same program
        _REOPENED_SOURCES[key] = found
        while len(_REOPENED_SOURCES) > _REOPENED:
            _REOPENED_SOURCES.popitem(last=False)
    return found


def source_of(source: Source | Collection | Dataset | str | os.PathLike[str]) -> Source:
    """A source; the one of open datasets is made once, and kept with the first of them."""
    if isinstance(source, Source):
        return source
    if isinstance(source, Dataset):
        found = source.attached.get("")
        if found is None:
            found = source.attached[""] = Source(as_collection(source))
    else:
        collection = as_collection(source)
        attached = collection.datasets[0].attached
        key = _key(collection)
        found = attached.get(key)
        if not isinstance(found, Source) or found.collection.datasets != collection.datasets:
            found = attached[key] = Source(collection)
    return cast("Source", found)


def _key(collection: Collection) -> str:
    return collection.id + "".join(repr(dataset.__reduce__()[1]) for dataset in collection.datasets)
