"""Batches packed ahead by threads of the process that consumes them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from functools import partial
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvformat.errors import make_error
from kvformat.loader.batch import Batch
from kvformat.loader.cursor import Cursor, Draw
from kvformat.loader.dataset import batch_of
from kvformat.loader.foresight import Foresight, Sized
from kvformat.loader.iteration import Iteration
from kvformat.loader.layouts import BatchLayout, LayoutName, as_layout
from kvformat.loader.lookup import as_source, numbers_of
from kvformat.loader.packers import Packers
from kvformat.loader.sampler import BatchSampler
from kvformat.loader.stats import LoaderStats

__all__ = ["KVLoader"]

_MOST_BATCHES = 256
"""Ahead at most: of tiny batches, the first would else wait until a whole epoch is drawn."""


class _Stand(NamedTuple):
    """Where the last batch handed out left training; the batch itself would keep its memory.

    Attributes
    ----------
    iteration
        What it was drawn by. Once the sampler is told to go on elsewhere, where that stood is of no account.
    """

    cursor: Cursor | None
    iteration: Iteration | None


class _Sums:
    """What the consumer's thread counts."""

    def __init__(self) -> None:
        self.batches = self.records = self.tokens = self.nbytes = self.copied = 0
        self.wait_s = self.pack_s = self.elapsed_s = 0.0


class _Work(NamedTuple):
    future: Future[tuple[Batch, float]]
    nbytes: int


class KVLoader:
    """Threads fetch, verify and pack batches ahead, into memory that is used again.

    The quickest way to feed a training loop: bytes are copied once, from the mapped shard to the batch, and never pass
    between processes. Iterating it is one epoch of its sampler. Its threads begin with an iteration and end with it.

    A batch owns its memory until its last tensor is dropped, and is never overwritten before; so let go of each before
    the next but one, and memory is not taken anew.

    Parameters
    ----------
    source
        An open dataset, a collection, or a :class:`KVDataset`.
    sampler
        A :class:`BatchSampler`, or any iterable of lists of record numbers or names.
    layout
        ``"packed"``, ``"padded"``, ``"hf"``, or a :class:`Packed`, :class:`Padded` or :class:`HF` with options.
    pin_memory
        Pack into page-locked memory, for copies to a CUDA device.
    prefetch_nbytes
        Bytes of batches packed or in work beyond the one the consumer has; at least one batch is, and at most 256 are.
        Of a remote dataset, what the sampler draws after these is fetched ahead: as many bytes again where they are
        kept in memory, else up to half of the cache.
    num_threads
        Threads that pack.

    Raises
    ------
    KVFormatError
        E082, E088, E089 where the layout does not fit the dataset; E081.

    Example
    -------
    >>> sampler = BatchSampler(ds, max_tokens=16384, seed=7)  # doctest: +SKIP
    >>> loader = KVLoader(ds, sampler, layout="packed")  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     step(batch["k"], batch["v"], batch.cu_seqlens)
    ...     checkpoint["loader"] = loader.state_dict(after=batch)
    """

    def __init__(
        self,
        source: Any,
        sampler: Iterable[Any],
        *,
        layout: LayoutName | BatchLayout = "packed",
        pin_memory: bool = False,
        prefetch_nbytes: int = 1 << 30,
        num_threads: int = 2,
    ) -> None:
        given: tuple[object, object] = num_threads, prefetch_nbytes
        if not all(isinstance(number, SupportsIndex) for number in given):
            raise make_error(
                "E081", f"num_threads and prefetch_nbytes are integers, found {given[0]!r} and {given[1]!r}"
            )
        num_threads, prefetch_nbytes = index(num_threads), index(prefetch_nbytes)
        if num_threads < 1 or prefetch_nbytes < 0:
            raise make_error("E081", f"num_threads {num_threads} and prefetch_nbytes {prefetch_nbytes}: too small")
        self.source = as_source(source)
        self.source.collection.expect(sampler)
        self.sampler = sampler
        self.layout = as_layout(layout)
        self._plan = self.source.plan(self.layout)
        self._pin_memory = pin_memory
        self._prefetch_nbytes = prefetch_nbytes
        self._num_threads = num_threads
        self._stand: _Stand | None = None
        self._sums = _Sums()

    def __iter__(self) -> Iterator[Batch]:
        return self._epoch()

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # where the sampler has none, this says so

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """State from which training goes on behind ``after``, or else behind the last batch handed out.

        What was only packed ahead does not count. See :meth:`BatchSampler.state_dict`.

        Raises
        ------
        UsageError
            E081 where the sampler is another than :class:`BatchSampler`.
        """
        sampler = self._stateful()
        if after is not None:
            return sampler.state_dict(after=after)
        stand = self._stand
        if stand is None or stand.iteration is not sampler.running:
            return sampler.state_dict()
        return sampler.state_dict(after=stand)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch a state was taken after, at the next iteration.

        Raises
        ------
        KVFormatError
            E084, E085: see :meth:`BatchSampler.load_state_dict`.
        """
        self._stateful().load_state_dict(state)
        self._stand = None

    def stats(self) -> LoaderStats:
        """Sums since the loader was made."""
        sums = self._sums
        shards = [shard for dataset in self.source.collection.datasets for shard in dataset.shards.open_shards()]
        return LoaderStats(
            batches=sums.batches,
            records=sums.records,
            tokens=sums.tokens,
            nbytes=sums.nbytes,
            nbytes_copied=sums.copied,
            fresh_nbytes=self.source.pool(pin_memory=self._pin_memory).fresh_nbytes,
            wait_s=sums.wait_s,
            pack_s=sums.pack_s,
            verify_s=sum(dataset.verify_s for dataset in self.source.collection.datasets),
            elapsed_s=sums.elapsed_s,
            open_shards=len(shards),
            mapped_nbytes=sum(len(shard.memory) for shard in shards if shard.memory is not None),
        )

    def _stateful(self) -> BatchSampler:
        # Another sampler's state may be anything, and counts what was drawn, not what was handed out.
        if not isinstance(self.sampler, BatchSampler):
            raise make_error("E081", f"no state of a {type(self.sampler).__name__}: use a BatchSampler")
        return self.sampler

    # -- an epoch ------------------------------------------------------------------------------------------------

    def _epoch(self) -> Iterator[Batch]:
        draws = iter(self.sampler)
        iteration = draws if isinstance(draws, Iteration) else None
        # An iteration that was broken off is ahead of what it handed out; this one does not go on there.
        self._stand = None if iteration is None else _Stand(iteration.cursor, iteration)
        largest = 0
        sums = self._sums
        work = _Ahead(self._pack, self._prefetch_nbytes, self._num_threads)
        room = self.source.room_nbytes
        most = self._prefetch_nbytes if room is None else room
        foresight = Foresight(lambda: self._next(draws), self.source, self._plan.wanted, most)
        begun, before_s = time.perf_counter(), sums.elapsed_s
        try:
            asked = begun
            ahead = self._fill(work, foresight.next(), foresight)
            while work:
                batch, pack_s = work.take()
                ahead = self._fill(work, ahead, foresight)  # while the consumer is busy with this one
                now = time.perf_counter()
                sums.wait_s += now - asked
                sums.elapsed_s = before_s + now - begun
                sums.pack_s += pack_s
                sums.batches += 1
                sums.records += len(batch)
                sums.tokens += sum(batch.num_tokens)
                sums.nbytes += batch.nbytes
                sums.copied += batch.nbytes_copied
                largest = max(largest, batch.nbytes)
                self._stand = _Stand(batch.cursor, iteration)
                yield batch
                del batch  # else its memory would not come back while the next one is made
                asked = time.perf_counter()
            self._stand = None  # the sampler stands there too, and follows its `set_epoch`
        finally:
            foresight.close()
            work.close()
            # The next epoch needs as much again, and one batch while the consumer has another.
            self.source.pool(pin_memory=self._pin_memory).trim(self._prefetch_nbytes + 2 * largest)

    @staticmethod
    def _fill(work: _Ahead, ahead: Sized | None, foresight: Foresight) -> Sized | None:
        """Have as many batches packed as there is room for; the one for which there is none."""
        while ahead is not None and work.has_room(ahead.nbytes):
            work.submit(*ahead)
            ahead = foresight.next()
        return ahead

    def _next(self, draws: Iterator[Any]) -> Sized | None:
        """The next batch to pack, and its size."""
        draw = next(draws, None)
        if draw is None:
            return None
        if isinstance(draw, (str, bytes)) or not hasattr(draw, "__len__"):
            raise make_error("E081", f"a sampler gives lists of numbers or names, found {type(draw).__name__}")
        numbers = draw
        self.source.collection.expect(draw)
        if not len(draw) or not isinstance(draw, Draw):
            kind = "names" if len(draw) and isinstance(draw[0], str) else "records"
            numbers = numbers_of(self.source, kind, draw)
        tokens = self.source.collection.tokens(np.array(numbers, np.int64))
        return Sized(batch_of(self.source, numbers, self.layout, draw), self._plan.estimate(tokens))

    def _pack(self, batch: Batch) -> tuple[Batch, float]:
        begun = time.perf_counter()
        return batch.pack(pin_memory=self._pin_memory), time.perf_counter() - begun


class _Ahead:
    """Batches in work, in order, bounded in bytes. The first failure of any is raised at once."""

    def __init__(self, pack: Callable[[Batch], tuple[Batch, float]], most_nbytes: int, threads: int) -> None:
        self._pack = pack
        self._most = most_nbytes
        self._packers = Packers(threads)
        self._waiting: deque[_Work] = deque()
        self._nbytes = 0
        self._failed: Future[tuple[Batch, float]] = Future()
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._waiting)

    def has_room(self, nbytes: int) -> bool:
        """Whether a batch of this size may be begun."""
        waiting = len(self._waiting)
        return not waiting or (waiting < _MOST_BATCHES and self._nbytes + nbytes <= self._most)

    def submit(self, batch: Batch, nbytes: int) -> None:
        """Have a thread pack a batch."""
        self._waiting.append(_Work(self._packers.submit(partial(self._run, batch)), nbytes))
        self._nbytes += nbytes

    def take(self) -> tuple[Batch, float]:
        """The batch submitted first, once it is there; or the failure of whichever failed."""
        if self._process != os.getpid():  # threads do not survive a fork: it would wait for ever
            raise make_error("E081", "this iteration began before a fork: begin another one in this process")
        first = self._waiting[0]
        if not (first.future.done() or self._failed.done()):
            wait([first.future, self._failed], return_when=FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()
        self._waiting.popleft()
        self._nbytes -= first.nbytes
        return first.future.result()

    def close(self) -> None:
        """End the threads; what is not begun is not done any more.

        An iteration that nobody refers to is closed by whichever thread collects garbage then: perhaps one of its own,
        or one that holds what its threads wait for. So it does not wait for itself, nor for ever.
        """
        if self._process == os.getpid():
            self._packers.close()
        self._waiting.clear()

    def _run(self, batch: Batch) -> tuple[Batch, float]:
        try:
            return self._pack(batch)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # another one failed before
                self._failed.set_exception(error)
            raise
