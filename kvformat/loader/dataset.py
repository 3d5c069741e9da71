"""The dataset and the collate function of a ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import get_worker_info

from kvformat.errors import make_error
from kvformat.loader.batch import Batch
from kvformat.loader.collection import Collection
from kvformat.loader.layouts import BatchLayout, LayoutName, as_layout
from kvformat.loader.source import Origin, Source, find_source, source_of
from kvformat.read.dataset import Dataset
from kvformat.read.opening import open_dataset

if TYPE_CHECKING:
    from kvformat.loader.cursor import Draw
    from kvformat.read.record import Record

__all__ = ["Collate", "KVDataset", "RecordRef", "RecordRefs"]


class RecordRef:
    """A record by number. It pickles to a few bytes, whatever the record's size; the datasets come along once.

    Attributes
    ----------
    number
        Number of the record, of several datasets numbered through.
    """

    __slots__ = ("_source", "number")

    def __init__(self, source: Source, number: int) -> None:
        self._source = source
        self.number = number

    @property
    def source(self) -> Source:
        """Where it is from."""
        return self._source

    @property
    def record(self) -> Record:
        """The record, from this process's own mapping."""
        return self._source.record(self.number)

    def __repr__(self) -> str:
        return f"<kvformat.loader.RecordRef {self.number}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ref, (self._source.origin, self.number)


class RecordRefs(list[RecordRef]):
    """What :class:`KVDataset` gives for a micro-batch, and :class:`Collate` takes.

    Attributes
    ----------
    draw
        What the sampler drew: cursor, names, padding.
    """

    def __init__(self, refs: Iterable[RecordRef], draw: Sequence[int]) -> None:
        super().__init__(refs)
        self.draw = draw

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordRefs, (list(self), self.draw)


class KVDataset(TorchDataset[RecordRef]):
    """Map-style dataset over published datasets, for ``torch.utils.data.DataLoader``.

    Its items are references; :class:`Collate` makes batches of them.

    Parameters
    ----------
    source
        A location, an open dataset, or what :func:`concat` or :func:`mix` made.
    options
        For a location, options of :func:`kvformat.open`: ``expected_id``, ``verify``, ``io``, ``max_open_files``.

    Example
    -------
    >>> from torch.utils.data import DataLoader
    >>> dataset = KVDataset("out/ds", expected_id=pinned)  # doctest: +SKIP
    >>> sampler = BatchSampler(dataset.collection, batch_size=4, seed=7)  # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate("packed"))  # doctest: +SKIP
    """

    def __init__(self, source: str | os.PathLike[str] | Dataset | Collection, **options: Any) -> None:
        if isinstance(source, (str, os.PathLike)):
            source = open_dataset(source, **options)
        elif options:
            raise make_error("E081", f"{', '.join(sorted(options))}: options of a location; this is open already")
        self.source = source_of(source)

    @property
    def collection(self) -> Collection:
        """The datasets, for a sampler."""
        return self.source.collection

    def __len__(self) -> int:
        return len(self.collection)

    def __getitem__(self, number: int) -> RecordRef:
        given: object = number
        if isinstance(given, str):
            raise make_error("E081", f"items are record numbers, found {given!r}; gather and KVLoader take names")
        if isinstance(given, list):
            raise make_error("E081", "a micro-batch is no item: give the sampler as batch_sampler=, not as sampler=")
        if not 0 <= number < len(self):
            raise make_error("E080", f"record {number} of {len(self)}")
        return RecordRef(self.source, number)

    def __getitems__(self, numbers: Draw | Sequence[int]) -> RecordRefs:
        self.collection.expect(numbers)
        return RecordRefs([self[number] for number in numbers], numbers)


class Collate:
    """``collate_fn`` that makes a :class:`Batch` of the references of a :class:`KVDataset`.

    In a worker process it verifies the records and has them read into the page cache, and the batch goes on as
    references; the process that receives it packs it. Without workers it packs at once.

    Parameters
    ----------
    layout
        ``"packed"``, ``"padded"``, ``"hf"``, or a :class:`Packed`, :class:`Padded` or :class:`HF` with options.
    """

    def __init__(self, layout: LayoutName | BatchLayout = "packed") -> None:
        self.layout = as_layout(layout)

    def __call__(self, refs: Sequence[RecordRef]) -> Batch:
        """A batch; errors of damaged records come here or, from a worker, where the batch is first used."""
        if not refs:
            raise make_error("E081", "a batch has at least one record")
        given: object = refs[0]
        if not isinstance(given, RecordRef):
            raise make_error(
                "E081", f"expected what a KVDataset gives, found {type(given).__name__}: load from KVDataset(dataset)"
            )
        draw = getattr(refs, "draw", None)
        batch = batch_of(refs[0].source, [ref.number for ref in refs], self.layout, draw)
        return batch.pack() if get_worker_info() is None else batch.prove()


def batch_of(source: Source, records: Sequence[int], layout: BatchLayout, draw: object = None) -> Batch:
    """A batch that is not packed yet, of what a sampler drew."""
    return Batch(
        source,
        records,
        layout,
        cursor=getattr(draw, "cursor", None),
        slots=getattr(draw, "slots", None),
        padding=getattr(draw, "padding", False),
    )


def _ref(origin: Origin, number: int) -> RecordRef:
    return RecordRef(find_source(origin), number)
