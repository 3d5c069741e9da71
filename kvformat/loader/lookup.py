"""A batch of records looked up by what the trainer knows them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvformat.errors import make_error
from kvformat.loader.batch import Batch
from kvformat.loader.collection import Collection
from kvformat.loader.layouts import BatchLayout, LayoutName, as_layout
from kvformat.loader.source import Source, source_of
from kvformat.read.dataset import Dataset
from kvformat.spec.document import document_digest

__all__ = ["gather", "numbers_of"]

_SHOWN = 10


def gather(
    source: Dataset | Collection | Any,
    names: Sequence[str] | None = None,
    *,
    documents: Sequence[bytes] | None = None,
    token_ids: Sequence[Any] | None = None,
    records: Sequence[int] | None = None,
    layout: LayoutName | BatchLayout = "packed",
    pin_memory: bool = False,
) -> Batch:
    """Look records up and pack them into one batch, in the order given, repeats included.

    For trainers whose own dataset drives: it says which samples make up a step, and this brings their K and V.

    Parameters
    ----------
    source
        An open dataset, a collection, or a :class:`KVDataset`.
    names, documents, token_ids, records
        One of them: names; document digests (32 bytes each); token ids of whole documents (an array of integers each,
        default positions, causal); or numbers. Of several datasets that have it, the first one's record is taken.
    layout
        As for :class:`KVLoader`.
    pin_memory
        Pack into page-locked memory, for copies to a CUDA device.

    Raises
    ------
    LookupFailedError
        E080 naming those that are missing.
    DamageError
        E053, E054, E070 to E074.
    UsageError
        E081 without exactly one of the four, or where it is empty.

    Example
    -------
    >>> batch = gather(ds, ["clip-0001", "clip-0007"])  # doctest: +SKIP
    >>> batch["k"].shape, batch.cu_seqlens  # doctest: +SKIP
    """
    given = {"names": names, "documents": documents, "token_ids": token_ids, "records": records}
    wanted = [(kind, keys) for kind, keys in given.items() if keys is not None]
    if len(wanted) != 1:
        raise make_error("E081", f"give one of {', '.join(given)}; found {[kind for kind, _ in wanted]}")
    ((kind, keys),) = wanted
    opened = as_source(source)
    if isinstance(keys, (str, bytes)) or not hasattr(keys, "__len__"):
        raise make_error("E081", f"{kind} is a sequence, found one {type(keys).__name__}")
    numbers = numbers_of(opened, kind, keys)
    return Batch(opened, numbers, as_layout(layout)).pack(pin_memory=pin_memory)


def as_source(source: Any) -> Source:
    """The source of a dataset, a collection or a :class:`KVDataset`; E081 for anything else, locations included."""
    found = getattr(source, "source", source)
    if not isinstance(found, (Source, Dataset, Collection)):
        raise make_error("E081", f"expected an open dataset, found {type(source).__name__}: open it once, and keep it")
    return source_of(found)


def numbers_of(source: Source, kind: str, keys: Sequence[Any]) -> list[int]:
    """Record numbers of keys of one kind; E080 naming all that are missing."""
    if kind == "records" and hasattr(keys, "tolist"):
        keys = keys.tolist()  # of an array or a tensor
    if not len(keys):
        raise make_error("E081", "a batch has at least one record")
    found = _FINDERS[kind](source.collection, keys)
    if None in found:
        missing = [key for key, number in zip(keys, found, strict=True) if number is None]
        shown = ", ".join(_shown(kind, key) for key in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise make_error(
            "E080",
            f"{len(missing)} of {len(keys)} {kind} are not in the dataset: {shown}{more}",
            path=source.collection.datasets[0].location,
            record=missing[0] if isinstance(missing[0], (str, int)) else None,
        )
    return [number for number in found if number is not None]


def _by_names(collection: Collection, keys: Sequence[Any]) -> list[int | None]:
    for name in keys:
        if type(name) is not str and not isinstance(name, str):
            raise make_error("E081", f"a name is a string, found {type(name).__name__}")
    return _first(collection, keys, lambda dataset, names: dataset.index.find_names(names))


def _by_documents(collection: Collection, keys: Sequence[Any]) -> list[int | None]:
    for digest in keys:
        if not isinstance(digest, bytes) or len(digest) != 32:
            raise make_error("E081", "a document digest is 32 bytes; see kvformat.document_digest")
    return _first(collection, keys, lambda dataset, digests: list(map(dataset.index.find_document, digests)))


def _by_token_ids(collection: Collection, keys: Sequence[Any]) -> list[int | None]:
    if any(np.ndim(ids) != 1 for ids in keys):
        raise make_error("E081", "token_ids is a list of documents, each a list of ids: for one document, [ids]")
    return _by_documents(collection, [document_digest(token_ids=ids) for ids in keys])


def _by_records(collection: Collection, keys: Sequence[Any]) -> list[int | None]:
    for number in keys:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise make_error("E081", f"a record number is an integer, found {type(number).__name__}")
    return [int(number) if 0 <= number < len(collection) else None for number in keys]


def _first(
    collection: Collection, keys: Sequence[Any], find: Callable[[Dataset, Sequence[Any]], list[int | None]]
) -> list[int | None]:
    """Of each key the record in the first dataset that has one."""
    datasets = collection.datasets
    if len(datasets) == 1:
        return find(datasets[0], keys)
    found: list[int | None] = [None] * len(keys)
    for dataset, start in zip(datasets, collection.starts, strict=False):
        left = [at for at, number in enumerate(found) if number is None]
        if not left:
            break
        for at, number in zip(left, find(dataset, [keys[at] for at in left]), strict=True):
            if number is not None:
                found[at] = start + number
    return found


_FINDERS: dict[str, Callable[[Collection, Sequence[Any]], list[int | None]]] = {
    "names": _by_names,
    "documents": _by_documents,
    "token_ids": _by_token_ids,
    "records": _by_records,
}


def _shown(kind: str, key: Any) -> str:
    if kind == "documents":
        return str(key.hex()[:16])
    if kind == "token_ids":
        return f"a document of {len(key)} tokens"
    return repr(key)
