"""One rank's failure is every rank's: opening and loading in step.

A rank that fails alone leaves the others waiting in their next collective, until a connection closes or a timeout of
minutes or hours ends. So the ranks tell each other *before* that collective, through a function the caller gives.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from kvformat.errors import KVFormatError, make_error
from kvformat.loader.batch import Batch
from kvformat.read.dataset import Dataset
from kvformat.read.opening import open_dataset
from kvformat.read.ranks import AllGather, exchange, named, refuse_different

__all__ = ["lockstep", "open_across"]

T = TypeVar("T")

_MOST_TEXT = 2_000  # characters of an error that travel
_OK = ("ok", None, None, None)
_END = ("end", None, None, None)


def open_across(location: str | os.PathLike[str], all_gather_object: AllGather, **options: Any) -> Dataset:
    """Open a dataset on every rank of a job, or raise on every rank. A collective call, with one exchange.

    Parameters
    ----------
    location
        As for :func:`kvformat.open`; may differ between the ranks, as copies on local disks do.
    all_gather_object
        As for :meth:`kvformat.Dataset.assert_same_across`.
    options
        As for :func:`kvformat.open`.

    Returns
    -------
    Dataset
        With the same id on every rank.

    Raises
    ------
    IdentityError
        E087 where another rank failed, naming it and its error, and on every rank where the ids differ.
    KVFormatError
        On a rank that fails itself: the error of :func:`kvformat.open`.

    Examples
    --------
    A job of one rank:

    >>> open_across("/nowhere", lambda obj: [obj])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    kvformat.errors.DatasetNotFoundError: [E001] no dataset is published here: ... (path '/nowhere/kvformat.json')
    """
    path = os.fspath(location)
    opened: Dataset | Exception
    try:
        opened = open_dataset(location, **options)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the other ranks must not wait for this one
        opened = error
    own = _failure(opened) if isinstance(opened, Exception) else ("ok", opened.id, None, None)
    told = _exchange(all_gather_object, "open", own, error=opened if isinstance(opened, Exception) else None)
    if isinstance(opened, Exception):
        raise opened
    _refuse_failed(told, what="could not open the dataset", path=path)
    refuse_different([one[1] for one in told], path=path)
    return opened


def lockstep(loader: Iterable[T], all_gather_object: AllGather) -> Iterator[T]:
    """Iterate over a loader on every rank in step: each batch on all ranks, or an error on all ranks.

    Before a batch is handed out, the ranks tell each other whether they have one. Where a rank fails, say on a damaged
    record, its own error is raised there, and an error naming rank, code and record on all others: before the
    step in which they would have waited for it. Where a rank has fewer batches than the others, all ranks raise.

    Every rank must take the same number of batches: a ``break`` on one alone leaves the others waiting, as does an
    error in what it does with a batch.

    Without it, a rank that fails stops the others when their backend notices. With ``gloo`` that is at once if the
    process ends, or destroys its group: a ``RuntimeError`` in the middle of a step, of a connection closed by a peer,
    which names no record. Where the process lives on, or the backend does not watch connections, it is after the
    group's timeout.

    Parameters
    ----------
    loader
        Anything that is iterated over: a ``KVLoader``, a ``DataLoader``. A :class:`Batch` is packed here.
    all_gather_object
        As for :meth:`kvformat.Dataset.assert_same_across`; called once for each batch, and once at the end. Use a
        group of the ``gloo`` backend for it: others move the few bytes through the device, and wait for it.

    Yields
    ------
    object
        The loader's batches.

    Raises
    ------
    IdentityError
        E087 where another rank failed, with its record, and on every rank where some end before others.
    Exception
        On a rank that fails itself: what its loader raised.

    Examples
    --------
    A job of one rank:

    >>> list(lockstep([1, 2, 3], lambda obj: [obj]))
    [1, 2, 3]

    In training, on a CPU group beside that of the gradients::

        group = torch.distributed.new_group(backend="gloo")

        def all_gather_object(obj):
            found = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(found, obj, group=group)
            return found

        for batch in kvformat.loader.lockstep(loader, all_gather_object):
            ...
    """
    iterator: Iterator[T] | None = None
    batch: T | None = None
    step = 0
    try:
        while True:
            failed: Exception | None = None
            try:
                if iterator is None:
                    iterator = iter(loader)
                batch = next(iterator)
                if isinstance(batch, Batch):
                    batch.pack()  # out of a worker, it may hold an error until it is used: too late for the others
                own: tuple[Any, ...] = _OK
            except StopIteration:
                own = _END
            except Exception as error:  # noqa: BLE001 -- as above
                failed, own = error, _failure(error)
            told = _exchange(all_gather_object, f"step {step}", own, error=failed)
            if failed is not None:
                raise failed
            _refuse_failed(told, what=f"failed to load its batch {step}")
            ended = [rank for rank, one in enumerate(told) if one == _END]
            if len(ended) == len(told):
                return
            if ended:
                others = named(rank for rank, one in enumerate(told) if one != _END)
                raise make_error(
                    "E087",
                    f"{named(ended)} ended after {step} batches, {others} did not: give every rank the same order, "
                    "world size and state, and drop or pad the last step",
                )
            yield batch  # type: ignore[misc]  # a batch where this rank sent ok
            batch = None  # not held while the next one is made
            step += 1
    finally:
        if iterator is not None and iterator is not loader:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


def _failure(error: Exception) -> tuple[str, str, str | None, str | int | None]:
    """What travels of an error: text, code, record."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- an error that cannot say what it is must be told all the same
        text = "without a text"
    if isinstance(error, KVFormatError):
        return "error", text[:_MOST_TEXT], error.code, error.record
    return "error", f"{type(error).__name__}: {text}"[:_MOST_TEXT], None, None


def _exchange(
    all_gather_object: AllGather, call: str, own: tuple[Any, ...], *, error: Exception | None
) -> list[tuple[Any, ...]]:
    """As :func:`exchange`; where this rank failed, its own error goes before that of a group that breaks down."""
    try:
        return exchange(all_gather_object, call, own)
    except Exception as lost:
        if error is None:
            raise
        error.add_note(f"the other ranks could not be told: {type(lost).__name__}: {lost}")
        raise error from error.__cause__


def _refuse_failed(told: list[tuple[Any, ...]], *, what: str, path: str | None = None) -> None:
    """E087 on a rank that did not fail where others did."""
    failed = [rank for rank, one in enumerate(told) if one[0] == "error"]
    if not failed:
        return
    _, text, code, record = told[failed[0]]
    first = "" if len(failed) == 1 else f"; {named(failed[:1])} with"
    detail = text if code is not None else f"an error of its own, {text}"
    raise make_error("E087", f"{named(failed)} {what}{first}: {detail}", path=path, record=record)
