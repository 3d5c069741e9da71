"""One or several datasets whose records and names are numbered through."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from math import gcd
from operator import index
from typing import SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.read.dataset import Dataset
from kvformat.read.index import IndexReader
from kvformat.read.opening import open_dataset
from kvformat.spec import canonical
from kvformat.spec.context import differences

__all__ = ["MAX_CYCLE", "Collection", "CollectionLike", "as_collection", "concat", "mix"]

Numbers = NDArray[np.int64]
T = TypeVar("T")

MAX_CYCLE = 1 << 16
"""Greatest sum of the weights of a mix."""


class Collection:
    """Datasets whose records are numbered through, in the order given; names likewise.

    Made by :func:`concat`, :func:`mix` and :func:`as_collection`. It pickles to locations, options and ids.

    Attributes
    ----------
    datasets
        The datasets.
    weights
        How often each is drawn from in a cycle, without common divisor; None for one dataset or a concatenation.
    id
        Id of the only dataset, or a digest over the ids of several (SPEC.md, C.1).
    starts, name_starts
        Number of the first record, and of the first name, of each dataset; then their sum.
    """

    def __init__(self, datasets: Iterable[Dataset], weights: Iterable[int] | None = None) -> None:
        self.datasets = tuple(datasets)
        if not self.datasets:
            raise make_error("E081", "a collection has at least one dataset")
        _check_alike(self.datasets)
        self.weights = None if weights is None else _reduced(tuple(weights), len(self.datasets))
        self.id = collection_id([dataset.id for dataset in self.datasets])
        self.starts = (0, *accumulate(len(dataset) for dataset in self.datasets))
        self.name_starts = (0, *accumulate(dataset.num_names for dataset in self.datasets))

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def num_names(self) -> int:
        """Names of all datasets together."""
        return self.name_starts[-1]

    def __repr__(self) -> str:
        kind = "one dataset" if len(self.datasets) == 1 else f"{len(self.datasets)} datasets"
        weights = "" if self.weights is None else f", weights {self.weights}"
        return f"<kvformat.loader.Collection of {kind} ({len(self):,} records, id {self.id[:16]}{weights})>"

    def expect(self, drawn: object) -> None:
        """Refuse what was drawn from another collection: a draw or a batch; what does not say where from passes.

        Raises
        ------
        UsageError
            E081 naming both.
        """
        found = getattr(drawn, "collection_id", self.id)
        if found != self.id:
            raise make_error(
                "E081",
                f"the sampler draws from another dataset, ids {found[:16]} and {self.id[:16]}: give both the same, "
                "and for a state give one of its own batches",
            )

    def resolve(self, record: int) -> tuple[Dataset, int]:
        """Dataset that holds a record, and the record's number there.

        Raises
        ------
        LookupFailedError
            E080 without such a record.
        """
        if not 0 <= record < len(self):
            raise make_error("E080", f"record {record} of {len(self)}")
        number = self._holding(record, self.starts)
        return self.datasets[number], record - self.starts[number]

    def tokens(self, records: Numbers) -> Numbers:
        """Numbers of tokens of records, ``[n]``, from the mapped index.

        Raises
        ------
        KVFormatError
            E080 without such a record; E053 where the index states what no record can have.
        """
        return self._gather(records, self.starts, "record", lambda number, own: self._index(number).dims_of(own)[:, 0])

    def records_of(self, names: Numbers) -> Numbers:
        """Numbers of the records that names belong to, ``[n]``; names are given as slots of the names tables.

        Raises
        ------
        KVFormatError
            E080 without such a name; E056 where the index leads to no record.
        """
        return self._gather(
            names,
            self.name_starts,
            "name",
            lambda number, own: self._index(number).records_of_names(own) + self.starts[number],
        )

    def name(self, slot: int) -> str:
        """The name at a slot of the names tables.

        Raises
        ------
        KVFormatError
            E080 without such a name; E056 where the index holds none there.
        """
        if not 0 <= slot < self.num_names:
            raise make_error("E080", f"name {slot} of {self.num_names}")
        number = self._holding(slot, self.name_starts)
        return self._index(number).name_at(slot - self.name_starts[number])

    def shard_ends(self, number: int, *, names: bool) -> Numbers:
        """Where each shard of a dataset ends, counted in its own records or names, ``[shards]``."""
        dataset = self.datasets[number]
        firsts = dataset.index.shard_starts()[1:]
        if names and dataset.num_names != len(dataset):
            firsts = dataset.index.first_names(firsts)
        total = dataset.num_names if names else len(dataset)
        return np.append(firsts, np.int64(total))

    def _index(self, number: int) -> IndexReader:
        return self.datasets[number].index

    @staticmethod
    def _holding(number: int, starts: tuple[int, ...]) -> int:
        return bisect_right(starts, number) - 1

    def _gather(
        self, numbers: Numbers, starts: tuple[int, ...], what: str, lookup: Callable[[int, Numbers], Numbers]
    ) -> Numbers:
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < starts[-1]):
            wrong = next(int(n) for n in numbers if not 0 <= n < starts[-1])
            raise make_error("E080", f"{what} {wrong} of {starts[-1]}")
        if len(self.datasets) == 1:
            return lookup(0, numbers)
        holders = np.searchsorted(np.array(starts, np.int64), numbers, side="right") - 1
        found = np.empty(len(numbers), np.int64)
        for number in np.unique(holders).tolist():
            chosen = holders == number
            found[chosen] = lookup(number, numbers[chosen] - starts[number])
        return found


CollectionLike: TypeAlias = Dataset | Collection | str | os.PathLike[str]


def as_collection(source: CollectionLike) -> Collection:
    """A collection of what may be a dataset, a collection, or a location.

    Raises
    ------
    KVFormatError
        E081 for anything else; what opening a location raises.
    """
    return source if isinstance(source, Collection) else Collection([_dataset(source)])


def concat(sources: Iterable[CollectionLike]) -> Collection:
    """Datasets one behind the other, to be permuted as one: ``concat([first, second])``.

    A name or document that several have is looked up in the first of them.

    Raises
    ------
    KVFormatError
        E081 without a dataset, for a mix, or where the schemas differ; E083 where known contexts differ.
    """
    found: list[Dataset] = []
    for source in _listed(sources):
        collection = as_collection(source)
        if collection.weights is not None:
            raise make_error("E081", "a mix cannot be part of a concatenation: concatenate its datasets")
        found += collection.datasets
    return Collection(found)


def mix(sources: Mapping[CollectionLike, int] | Iterable[tuple[CollectionLike, int]]) -> Collection:
    """Datasets drawn from by weight: of every sum(weights) draws, exactly ``weight`` are from each.

    ``mix({first: 3, second: 1})`` or ``mix([(first, 3), (second, 1)])``.

    Parameters
    ----------
    sources
        Datasets, or their locations, with weights: integers from 1, whose sum, without common divisor, is at most
        65,536.

    Raises
    ------
    KVFormatError
        E081 without a dataset, for a collection, for other weights, or where the schemas differ; E083 where known
        contexts differ.
    """
    pairs = list(sources.items() if isinstance(sources, Mapping) else _listed(sources))
    try:
        found = [(_dataset(source), weight) for source, weight in pairs]
    except (TypeError, ValueError) as error:
        if isinstance(error, KVFormatError):
            raise
        raise make_error("E081", "a mix is made of pairs: a dataset and its weight") from None
    return Collection([dataset for dataset, _ in found], [weight for _, weight in found])


def collection_id(ids: list[str]) -> str:
    """Id of a collection of datasets with these ids (SPEC.md, C.1)."""
    if len(ids) == 1:
        return ids[0]
    return hashlib.sha256(b"kvf1/collection\0" + canonical.encode(ids)).hexdigest()


def _dataset(source: object) -> Dataset:
    if isinstance(source, Dataset):
        return source
    if isinstance(source, str | os.PathLike):
        return open_dataset(source)
    raise make_error("E081", f"expected a dataset or its location, found {type(source).__name__}")


def _listed(sources: Iterable[T]) -> list[T]:
    given: object = sources
    if isinstance(given, str | bytes | Dataset | Collection) or not isinstance(given, Iterable):
        raise make_error("E081", f"expected several datasets, found {type(given).__name__}")
    return list(sources)


def _reduced(weights: tuple[object, ...], count: int) -> tuple[int, ...]:
    integers = [w for w in weights if isinstance(w, SupportsIndex) and not isinstance(w, bool)]
    found = [index(weight) for weight in integers if index(weight) > 0]
    if not len(found) == len(weights) == count:
        raise make_error("E081", f"weights are integers from 1, one a dataset; found {weights!r}")
    divisor = gcd(*found)
    reduced = tuple(weight // divisor for weight in found)
    if sum(reduced) > MAX_CYCLE:
        raise make_error("E081", f"the weights' sum, {sum(reduced):,}, is above {MAX_CYCLE:,}: round them")
    return reduced


def _check_alike(datasets: tuple[Dataset, ...]) -> None:
    """One batch may hold records of all datasets: tensors of one form, that mean the same."""
    first = datasets[0]
    for other in datasets[1:]:
        if other.schema != first.schema:
            raise make_error(
                "E081", f"the schemas of {first.location} and {other.location} differ", path=other.location
            )
        if first.context.model is None or other.context.model is None:
            continue
        found = differences(first.context, other.context)
        if found:
            raise make_error(
                "E083", f"the contexts differ from those of {first.location}: {'; '.join(found)}", path=other.location
            )
