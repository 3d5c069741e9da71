"""The one sequence of micro-batches that all ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.loader.blocks import Blocks, FixedCount, TokenBudget
from kvformat.loader.cursor import Cursor, Draw, Options
from kvformat.loader.order import Order, order_key

if TYPE_CHECKING:
    from kvformat.loader.collection import Collection

__all__ = ["Sequence"]

Numbers = NDArray[np.int64]


class Sequence:
    """Micro-batches of every epoch, found by their cursors.

    Parameters
    ----------
    collection
        Where records, names and numbers of tokens are.
    seed, options
        What the sequence depends on, besides the collection.
    own_batch
        Whether a record above the token budget becomes a micro-batch of its own, rather than an error.
    """

    def __init__(self, collection: Collection, *, seed: int, options: Options, own_batch: bool) -> None:
        self._collection = collection
        self._options = options
        self._own_batch = own_batch
        self._names = options.over == "names"
        self._blocks = self._make_blocks(self._make_order(seed))

    def count(self, epoch: int) -> int:
        """Micro-batches of an epoch. A token budget packs every block for it, once."""
        return sum(self._blocks.count(epoch, block) for block in range(self._blocks.num_blocks))

    def holds(self, cursor: Cursor) -> bool:
        """Whether a micro-batch stands at a cursor."""
        blocks = self._blocks
        return cursor.block < blocks.num_blocks and cursor.batch < blocks.count(cursor.epoch, cursor.block)

    def seek(self, at: Cursor, offset: int) -> Cursor | None:
        """The micro-batch so many after another; None beyond the epoch."""
        block, batch = at.block, at.batch + offset
        while block < self._blocks.num_blocks:
            count = self._blocks.count(at.epoch, block)
            if batch < count:
                return Cursor(epoch=at.epoch, block=block, batch=batch)
            block, batch = block + 1, batch - count
        return None

    def draw(self, place: Cursor, *, cursor: Cursor, padding: bool) -> Draw:
        """The micro-batch at a place, as what is given out with a cursor.

        Raises
        ------
        KVFormatError
            E086 for a record above the token budget, where that is an error; what reading the index raises.
        """
        items = self._blocks.batch(place.epoch, place.block, place.batch)
        if not self._names:
            return Draw(items.tolist(), cursor=cursor, collection_id=self._collection.id, padding=padding)
        records = self._collection.records_of(items)
        return Draw(
            records.tolist(),
            cursor=cursor,
            collection_id=self._collection.id,
            slots=items.tolist(),
            padding=padding,
        )

    def _make_order(self, seed: int) -> Order:
        collection, options = self._collection, self._options
        key: dict[str, Any] = {
            "dataset": collection.id,
            "over": options.over,
            "seed": seed,
            "shuffle": options.shuffle,
        }
        if options.window_shards is not None:
            key["window_shards"] = options.window_shards
        if options.weights is not None:
            key["weights"] = options.weights
        return Order(
            order_key(key),
            shuffle=options.shuffle,
            lengths=[d.num_names if self._names else len(d) for d in collection.datasets],
            ends=self._shard_ends,
            window=options.window_shards or 1,
            weights=options.weights,
            num_samples=options.num_samples,
        )

    def _make_blocks(self, order: Order) -> Blocks:
        options = self._options
        if options.batch_size is not None:
            return FixedCount(
                order.items, length=order.length, batch_size=options.batch_size, drop_last=options.drop_last
            )
        assert options.max_tokens is not None
        return TokenBudget(
            order.items,
            self._tokens,
            length=order.length,
            max_tokens=options.max_tokens,
            max_records=options.max_records,
        )

    def _shard_ends(self, dataset: int) -> Numbers:
        return self._collection.shard_ends(dataset, names=self._names)

    def _tokens(self, items: Numbers) -> Numbers:
        records = self._collection.records_of(items) if self._names else items
        tokens = self._collection.tokens(records)
        budget = self._options.max_tokens
        if budget is None or self._own_batch or tokens.max() <= budget:
            return tokens
        largest = int(tokens.argmax())
        dataset, number = self._collection.resolve(int(records[largest]))
        raise make_error(
            "E086",
            f"a record of {tokens[largest]} tokens, above max_tokens={budget}: "
            'raise it, or give such records batches of their own with oversize="own"',
            path=dataset.location,
            record=dataset.index.names_of(number)[0],
        )
