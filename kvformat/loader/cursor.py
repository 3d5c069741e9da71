"""Where training stands: a cursor, what a batch sampler yields with it, and the state that a checkpoint holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from kvformat.errors import make_error
from kvformat.spec import limits

__all__ = ["MAX_EPOCHS", "STATE_FORMAT", "STATE_VERSION", "Cursor", "Draw", "Options", "State", "decode_state"]

STATE_FORMAT = "kvformat.sampler"
STATE_VERSION = 1
MAX_EPOCHS = 1 << 32
_ADVICE = "give what its `state_dict` returned"


class Cursor(Struct, frozen=True, kw_only=True, order=True, forbid_unknown_fields=True):
    """The first micro-batch that was not consumed, in the sequence that all ranks share.

    Attributes
    ----------
    epoch
        Epoch, from 0. Where an epoch ends, the next begins: a cursor never stands behind the last batch of one.
    block
        Block of the epoch.
    batch
        Micro-batch of the block.
    """

    epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCHS)]
    block: Annotated[int, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=0)]

    @classmethod
    def start_of(cls, epoch: int) -> Self:
        """Cursor at the first micro-batch of an epoch."""
        return cls(epoch=epoch, block=0, batch=0)


class Draw(list[int]):
    """A micro-batch before it is read: record numbers of the collection.

    Attributes
    ----------
    cursor
        Where training stands once all ranks have consumed their batches of this step.
    slots
        Slots of the names that were drawn, beside their records; None where the order is over records.
    padding
        Whether it is a copy that fills the last step of an epoch.
    collection_id
        Id of the collection whose records these are.
    """

    __slots__ = ("collection_id", "cursor", "padding", "slots")

    cursor: Cursor
    padding: bool
    slots: list[int] | None
    collection_id: str

    def __init__(
        self,
        records: list[int],
        *,
        cursor: Cursor,
        collection_id: str,
        slots: list[int] | None = None,
        padding: bool = False,
    ) -> None:
        super().__init__(records)
        self.cursor = cursor
        self.slots = slots
        self.padding = padding
        self.collection_id = collection_id

    def __reduce__(self) -> tuple[Any, ...]:
        return _draw, (list(self), self.cursor, self.collection_id, self.slots, self.padding)


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the sequence of micro-batches depends on, besides datasets and seed."""

    shuffle: Literal["none", "global", "window"]
    over: Literal["names", "records"]
    window_shards: int | None = None
    weights: tuple[int, ...] | None = None
    num_samples: int | None = None
    batch_size: int | None = None
    drop_last: bool = False
    max_tokens: int | None = None
    max_records: int | None = None


class State(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds. Ranks, workers and prefetching are no part of it: they may change."""

    format: str
    version: int
    dataset: str
    seed: Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]
    order: Options
    cursor: Cursor

    def differences(self, other: State) -> list[str]:
        """Fields but the cursor in which another state differs, with both values."""
        ours, theirs = ({**state.plain(), **state.plain()["order"]} for state in (self, other))
        return [
            f"{name} is {ours.get(name, 'not given')} here and {theirs.get(name, 'not given')} there"
            for name in sorted(ours.keys() | theirs.keys())
            if name not in {"cursor", "order"} and ours.get(name) != theirs.get(name)
        ]

    def plain(self) -> dict[str, Any]:
        """As a dict that JSON can hold."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return found


def decode_state(state: object) -> State:
    """A state as a checkpoint held it.

    Raises
    ------
    UsageError
        E085 for what is no state, not whole, or of a version this one does not know.
    """
    if not isinstance(state, dict):
        raise make_error("E085", f"not the state of a batch sampler: {_ADVICE}")
    try:
        # Whatever was put into it, from here on it holds what JSON can hold, and can be compared and named.
        plain = msgspec.json.decode(msgspec.json.encode(state))
        if plain.get("format") != STATE_FORMAT:
            raise make_error("E085", f"not the state of a batch sampler: {_ADVICE}")
        version = plain.get("version")
        if version != STATE_VERSION:
            raise make_error("E085", f"a state of version {version!r:.100}; this release knows {STATE_VERSION}")
        return msgspec.convert(plain, State, strict=True)
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError, RecursionError) as error:
        raise make_error("E085", f"a damaged state: {error}: {_ADVICE}") from None


def _draw(
    records: list[int],
    cursor: Cursor,
    collection_id: str,
    slots: list[int] | None,
    padding: bool,  # noqa: FBT001 -- the state of a pickle
) -> Draw:
    return Draw(records, cursor=cursor, collection_id=collection_id, slots=slots, padding=padding)
