"""Which records make up which batch on which rank, and where to go on after a stop."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from kvformat.errors import KVFormatWarning, make_error
from kvformat.loader.collection import CollectionLike, as_collection
from kvformat.loader.cursor import (
    MAX_EPOCHS,
    STATE_FORMAT,
    STATE_VERSION,
    Cursor,
    Draw,
    Options,
    State,
    decode_state,
)
from kvformat.loader.iteration import Iteration
from kvformat.loader.order import Over, Shuffle
from kvformat.loader.sequence import Sequence
from kvformat.loader.world import whole, world_of
from kvformat.spec import limits

__all__ = ["BatchSampler", "LastStep", "Oversize"]

LastStep = Literal["drop", "pad"]
Oversize = Literal["error", "own"]


class BatchSampler:
    """Micro-batches of record numbers, in an order that depends on datasets, seed and options alone.

    All ranks share one sequence of micro-batches; a step takes the next ``world_size`` of them, rank r the r-th.
    Usable as ``batch_sampler`` of ``torch.utils.data.DataLoader`` and of torchdata's ``StatefulDataLoader``, and as
    the sampler of ``KVLoader``. It imports no torch, makes no process group and touches no random state.

    One iteration is one epoch, or what a resumed state left of one; the next iteration is the next epoch. An iteration
    begins when its first batch is asked for; so to look at a batch before training is to begin the epoch, and
    breaking off leaves the rest of it (``set_epoch`` goes back).

    Parameters
    ----------
    source
        A dataset, a collection (see :func:`concat` and :func:`mix`), or a location.
    batch_size
        Records of a micro-batch. Give this or ``max_tokens``.
    max_tokens
        Most tokens of a micro-batch, padding not counted: blocks of 4,096 items are packed first-fit.
    max_records
        Most records of a micro-batch, beside ``max_tokens``.
    shuffle
        ``"global"``: one permutation of all items. ``"window"``: shards are permuted, and items within
        ``window_shards`` of them at a time, which keeps reads near each other. ``"none"``: as stored.
    window_shards
        Shards of a window.
    over
        ``"names"``: a record is drawn once for each of its names. ``"records"``: once.
    seed
        0 to 2^53 - 1. Another seed is another order.
    num_samples
        For a mix: items of an epoch. By default as many as its datasets have.
    drop_last
        With ``batch_size``: leave out the last batch of an epoch if it has fewer records.
    last_step
        The last step of an epoch may have fewer micro-batches than ranks. ``"drop"`` leaves it out; ``"pad"`` repeats
        its own micro-batches in turn, marked as ``padding``.
    oversize
        A record of more than ``max_tokens`` is an error, or a micro-batch of its ``"own"``.
    rank, world_size
        By default ``RANK`` and ``WORLD_SIZE`` of the environment, else 0 of 1. Leave the loader out of what divides
        batches among ranks by itself, as accelerate's ``prepare`` does: they would be divided twice.

    Raises
    ------
    KVFormatError
        E081 for arguments outside what is said here; what opening a location raises.

    Examples
    --------
    >>> sampler = BatchSampler(dataset, batch_size=4, seed=1)  # doctest: +SKIP
    >>> loader = DataLoader(KVDataset(dataset), batch_sampler=sampler, collate_fn=collate)  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     checkpoint = {"loader": sampler.state_dict(after=batch)}
    """

    def __init__(
        self,
        source: CollectionLike,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        max_records: int | None = None,
        shuffle: Shuffle = "global",
        window_shards: int = 16,
        over: Over = "names",
        seed: int = 0,
        num_samples: int | None = None,
        drop_last: bool = False,
        last_step: LastStep = "drop",
        oversize: Oversize = "error",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if (batch_size is None) == (max_tokens is None):
            raise make_error("E081", "give one of batch_size and max_tokens")
        if not isinstance(drop_last, bool):
            raise make_error("E081", f"drop_last is True or False; found {drop_last!r}")
        shuffle = _one_of("shuffle", shuffle, Shuffle)
        over = _one_of("over", over, Over)
        last_step = _one_of("last_step", last_step, LastStep)
        oversize = _one_of("oversize", oversize, Oversize)
        seed = _integer("seed", seed, 0, limits.MAX_INTEGER)
        window_shards = _integer("window_shards", window_shards, 1, limits.MAX_SHARDS)
        batch_size, max_tokens, max_records = (
            None if value is None else _integer(name, value, 1, limits.MAX_INTEGER)
            for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens), ("max_records", max_records))
        )
        if max_tokens is None and max_records is not None:
            raise make_error("E081", "max_records goes with max_tokens; with batch_size it says nothing")
        if max_tokens is not None and drop_last:
            raise make_error("E081", "drop_last goes with batch_size; a token budget has no short batch to drop")
        self.collection = as_collection(source)
        if num_samples is not None:
            if self.collection.weights is None:
                raise make_error("E081", "num_samples goes with a mix; any other epoch has all items once")
            num_samples = _integer("num_samples", num_samples, 1, limits.MAX_RECORDS)
        self.rank, self.world_size = world_of(rank, world_size)
        self.seed = seed
        self.options = Options(
            shuffle=shuffle,
            over=over,
            window_shards=window_shards if shuffle == "window" else None,
            weights=self.collection.weights,
            num_samples=num_samples,
            batch_size=batch_size,
            drop_last=drop_last,
            max_tokens=max_tokens,
            max_records=max_records,
        )
        self._last_step = last_step
        self._oversize = oversize
        self._sequence = self._make_sequence()
        if drop_last and not self._sequence.holds(Cursor.start_of(0)):
            raise make_error(
                "E081", f"an epoch has fewer than batch_size={batch_size} items, and drop_last drops them"
            )
        self.start = Cursor.start_of(0)
        """Where the next iteration begins."""
        self._running: Iteration | None = None
        self._loaded = False

    def __iter__(self) -> Iterator[Draw]:
        return Iteration(self)

    def __repr__(self) -> str:
        of = ", ".join(f"{name}={value}" for name, value in sorted(msgspec.to_builtins(self.options).items()))
        return f"<kvformat.loader.BatchSampler {of}, seed={self.seed}, rank {self.rank} of {self.world_size}>"

    def __len__(self) -> int:
        """Steps of the whole epoch, however much of it a resumed state leaves.

        With a token budget every block of the epoch is packed for it, about 10 ms each; their numbers are kept.
        """
        whole, left_over = divmod(self._sequence.count(self.epoch), self.world_size)
        return whole + (self._last_step == "pad" and left_over > 0)

    @property
    def collection_id(self) -> str:
        """Id of the collection it draws from."""
        return self.collection.id

    @property
    def epoch(self) -> int:
        """Epoch of the iteration in progress, else of the next one."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch: from a resumed state's cursor if that is in it, else from its start.

        A loop over epochs begins at :attr:`epoch`, which a resumed state sets; one that begins at 0 leaves the state,
        and is warned of it (W004).

        Raises
        ------
        UsageError
            E081 for anything but an integer from 0 to 2^32 - 1.
        """
        epoch = _integer("epoch", epoch, 0, MAX_EPOCHS - 1)
        self._running = None
        if epoch != self.start.epoch:
            if self._loaded:
                message = f"epoch {epoch} leaves the state that was loaded, in epoch {self.start.epoch}: begin there"
                warnings.warn(KVFormatWarning(message, code="W004"), stacklevel=2)
            self._loaded = False
            self.start = Cursor.start_of(epoch)

    def state_dict(self, after: object | None = None) -> dict[str, Any]:
        """What a checkpoint holds: a few hundred bytes that JSON can hold.

        Parameters
        ----------
        after
            The batch that was consumed last, or anything else with its ``cursor``. Without it, the state is that after
            the batch this sampler gave out last, which with workers or prefetching is ahead of what was consumed.
            It counts all batches drawn before that one as consumed, so a DataLoader must not have ``in_order=False``.

        Raises
        ------
        UsageError
            E081 if ``after`` has no cursor.
        """
        cursor = self._position if after is None else getattr(after, "cursor", None)
        if not isinstance(cursor, Cursor):
            raise make_error("E081", f"{type(after).__name__} has no cursor: give the batch that was consumed last")
        self.collection.expect(after)
        return self._state(cursor).plain()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken. World size, workers, prefetching and layout may be others.

        Raises
        ------
        IdentityError
            E084 naming what differs: dataset, seed, or an option of the order.
        UsageError
            E085 for what is no state, not whole, of an unknown version, or of a batch that is not there.
        """
        self.start = self.resumed(state)
        self._running = None
        self._loaded = True

    def __getstate__(self) -> dict[str, Any]:
        # Packed blocks stay behind; an iteration does not travel, only where it stands.
        return self.__dict__ | {"_sequence": None, "_running": None, "start": self._position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sequence = self._make_sequence()

    @property
    def running(self) -> Iteration | None:
        """The iteration begun last; None once the sampler was told to go on elsewhere."""
        return self._running

    @property
    def _position(self) -> Cursor:
        return self.start if self._running is None else self._running.cursor

    # -- for its iterations --------------------------------------------------------------------------------------

    def begun(self, iteration: Iteration, epoch: int) -> None:
        """Note an iteration that gives out an epoch: the next one does not begin there again."""
        self.start = Cursor.start_of(epoch + 1)
        self._running = iteration
        self._loaded = False

    def _make_sequence(self) -> Sequence:
        own_batch = self._oversize == "own"
        return Sequence(self.collection, seed=self.seed, options=self.options, own_batch=own_batch)

    def _state(self, cursor: Cursor) -> State:
        return State(
            format=STATE_FORMAT,
            version=STATE_VERSION,
            dataset=self.collection.id,
            seed=self.seed,
            order=self.options,
            cursor=cursor,
        )

    def resumed(self, state: object) -> Cursor:
        """Cursor of a state, if it is one of this order."""
        found = decode_state(state)
        differing = self._state(found.cursor).differences(found)
        if differing:
            raise make_error(
                "E084",
                f"the state is of another order: {'; '.join(differing)}: make the sampler as it was made then, "
                "or begin without the state",
            )
        cursor = found.cursor
        if not self._sequence.holds(cursor):
            raise make_error("E085", f"a damaged state: block {cursor.block} has no batch {cursor.batch}")
        return cursor

    def step(self, at: Cursor) -> Draw | None:
        """Micro-batch of this rank in the step that begins at a cursor; None where the epoch has no more steps."""
        world, seek = self.world_size, self._sequence.seek
        end = Cursor.start_of(at.epoch + 1)
        mine = seek(at, self.rank)
        if seek(at, world - 1) is not None:
            assert mine is not None
            after = seek(at, world)
            if self._last_step == "drop" and seek(at, 2 * world - 1) is None:
                after = None
            return self._sequence.draw(mine, cursor=after or end, padding=False)
        left = bisect_left(range(world), x=True, key=lambda number: seek(at, number) is None)
        if self._last_step == "pad" and left:
            place = mine or seek(at, self.rank % left)
            assert place is not None
            return self._sequence.draw(place, cursor=end, padding=mine is None)
        if at == Cursor.start_of(at.epoch):
            raise make_error(
                "E081",
                f"an epoch has {left} micro-batches for {world} ranks, so it would have no step at all: "
                'make batches smaller, use fewer ranks, or keep them with drop_last=False and last_step="pad"',
            )
        return None


def _one_of(name: str, value: object, kind: Any) -> Any:
    for option in get_args(kind):
        if isinstance(value, str) and value == option:
            return option  # itself: a string of another class may look the same, but is not encoded so
    raise make_error("E081", f"{name} is one of {', '.join(get_args(kind))}; found {value!r}")


def _integer(name: str, value: object, least: int, most: int) -> int:
    try:
        found = whole(value)
    except TypeError:
        found = None
    if found is None or not least <= found <= most:
        raise make_error("E081", f"{name} is an integer from {least:,} to {most:,}; found {value!r}")
    return found
