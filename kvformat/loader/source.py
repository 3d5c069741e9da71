"""A collection of datasets as this process feeds batches from it."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakValueDictionary, ref

from kvformat.loader.buffers import BufferPool
from kvformat.loader.collection import Collection, as_collection
from kvformat.loader.layouts import BatchLayout
from kvformat.loader.plan import Plan
from kvformat.read.dataset import Dataset
from kvformat.read.recent import Recent
from kvformat.read.shards import ShardPool

if TYPE_CHECKING:
    from kvformat.read.dataset import Place
    from kvformat.read.record import Record
    from kvformat.read.stored import Wanted

__all__ = ["Origin", "Source", "find_source", "source_of"]

_KEPT_NBYTES = 1 << 30
_REOPENED = 8
_PLANS = 64


class Origin(NamedTuple):
    """Where the records of a batch are, for another process.

    Attributes
    ----------
    token
        The handle the batch was made with. Copies in other processes, forked or unpickled, have it too.
    key
        The same in every process that opened the same datasets alike.
    packed
        The collection, pickled: locations, options and ids.
    """

    token: str
    key: str
    packed: bytes


class _Shared:
    """What all sources of the same open datasets have in common. It is kept with the first of them, and keeps none."""

    def __init__(self, collection: Collection, token: str, key: str) -> None:
        self.origin = Origin(token, key, pickle.dumps(collection))
        self.datasets = [ref(dataset) for dataset in collection.datasets]
        self.plans: dict[BatchLayout, Plan] = {}
        self.pools: dict[bool, BufferPool] = {}
        _SHARED[id(self)] = self

    def source(self) -> Source | None:
        """A source of it, unless a dataset is gone."""
        datasets = [dataset for dataset in (reference() for reference in self.datasets) if dataset is not None]
        return Source(Collection(datasets), self) if len(datasets) == len(self.datasets) else None


class Source:
    """Records by number, the plans of layouts, and the memory batches are packed into.

    It pickles to locations, options and ids. Made by :func:`source_of`.

    Attributes
    ----------
    collection
        The datasets.
    """

    def __init__(self, collection: Collection, shared: _Shared) -> None:
        self.collection = collection
        self._shared = shared

    def __reduce__(self) -> tuple[object, ...]:
        return _source, (self.collection, self.origin.token)

    @property
    def origin(self) -> Origin:
        """What another process needs to find it, or the same datasets."""
        return self._shared.origin

    def plan(self, layout: BatchLayout) -> Plan:
        """The plan of a layout; errors as :class:`Plan`."""
        plans = self._shared.plans
        found = plans.get(layout)
        if found is None:
            if len(plans) >= _PLANS:  # other layers for each batch, say
                plans.clear()
            found = plans[layout] = Plan(self.collection.datasets[0].schema, layout)
        return found

    def pool(self, *, pin_memory: bool = False) -> BufferPool:
        """Memory for batches."""
        pools = self._shared.pools
        found = pools.get(pin_memory)
        if found is None:  # one step, without a lock that a fork could find taken
            found = pools.setdefault(pin_memory, BufferPool(_KEPT_NBYTES, pin_memory=pin_memory))
        return found

    def record(self, number: int) -> Record:
        """A record of the collection."""
        dataset, own = self.collection.resolve(number)
        return dataset[own]

    @property
    def is_remote(self) -> bool:
        """Whether any of it has to be fetched."""
        return any(dataset.reader.is_remote for dataset in self.collection.datasets)

    @property
    def fetches_records(self) -> bool:
        """Whether all that is fetched is fetched by the record, not by the shard."""
        return not any(isinstance(d.shards, ShardPool) and d.reader.is_remote for d in self.collection.datasets)

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that may be fetched ahead of their use without driving out what is in use; None: as many as fit."""
        rooms = [dataset.ahead_nbytes for dataset in self.collection.datasets]
        return min((room for room in rooms if room is not None), default=None)

    def announce(self, numbers: Sequence[int], wanted: Wanted) -> int:
        """Have records fetched meanwhile, where they are elsewhere; the bytes on their way for it."""
        if not self.is_remote:
            return 0
        own: dict[int, tuple[Dataset, list[int]]] = {}
        for number in numbers:
            dataset, at = self.collection.resolve(number)
            own.setdefault(id(dataset), (dataset, []))[1].append(at)
        return sum(dataset.announce(records, wanted) for dataset, records in own.values())

    def forget(self) -> None:
        """Drop what was announced and not used."""
        for dataset in self.collection.datasets:
            if dataset.reader.is_remote:
                dataset.forget()

    def places(self, numbers: Sequence[int], bits: int, wanted: Wanted) -> list[Place]:
        """Where records lie, and which of them may be copied as they are; see :meth:`Dataset.places`."""
        datasets = self.collection.datasets
        if len(datasets) == 1:
            return datasets[0].places(numbers, bits, wanted)
        self.announce(numbers, wanted)
        resolved = map(self.collection.resolve, numbers)
        return [dataset.places((own,), bits, wanted)[0] for dataset, own in resolved]


_SHARED: WeakValueDictionary[int, _Shared] = WeakValueDictionary()
"""By identity, what is open in this process: batches come out of worker processes as references, and nothing else."""
_REOPENED_SOURCES: Recent[str, Source] = Recent(_REOPENED)
"""Sources that a batch from another process had to open here: kept so that the next batch finds them."""


def find_source(origin: Origin) -> Source:
    """The source of a batch in this process: of the handle it was made with, or another one, or opened now."""
    alive = [shared for shared in (reference() for reference in _SHARED.valuerefs()) if shared is not None]
    for shared in sorted(alive, key=lambda shared: shared.origin.token != origin.token):
        found = shared.source() if shared.origin.key == origin.key else None
        if found is not None:
            return found
    found = source_of(pickle.loads(origin.packed))  # noqa: S301 -- made by another process of the same program
    _REOPENED_SOURCES.put(origin.key, found)
    return found


def source_of(source: Source | Collection | Dataset) -> Source:
    """A source; those of the same handles share plans and memory."""
    if isinstance(source, Source):
        return source
    return _source(as_collection(source))


def _source(collection: Collection, token: str = "") -> Source:
    datasets = collection.datasets
    attached, place = datasets[0].attached, "" if len(datasets) == 1 else _key(collection)
    found = attached.get(place)
    if found is None:
        found = attached.setdefault(place, _Shared(collection, token or secrets.token_hex(8), _key(collection)))
    return Source(collection, cast("_Shared", found))


def _key(collection: Collection) -> str:
    return collection.id + "".join(dataset.opened_as for dataset in collection.datasets)
