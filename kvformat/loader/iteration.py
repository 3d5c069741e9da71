"""One iteration over a sampler, which torchdata saves and loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from kvformat.errors import make_error
from kvformat.loader.cursor import Cursor, Draw

if TYPE_CHECKING:
    from kvformat.loader.sampler import BatchSampler

__all__ = ["Iteration"]


class Iteration:
    """One iteration over a sampler: an epoch, or what is left of it. torchdata saves and loads where it stands."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler
        self._epoch = -1
        self._cursor: Cursor | None = None

    @property
    def cursor(self) -> Cursor:
        """Where training stands once what was given out is consumed."""
        return self._sampler.start if self._cursor is None else self._cursor

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Draw:
        if self._cursor is None:
            # Not before: a DataLoader with workers makes two iterators for one epoch, and uses the second.
            self._go_on(self._sampler.start, self._sampler.start.epoch)
        at = self.cursor
        if at.epoch == self._epoch:
            draw = self._sampler.step(at)
            if draw is not None:
                self._cursor = draw.cursor
                return draw
            self._cursor = Cursor.start_of(self._epoch + 1)
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler after the batch given out last, and the epoch that this iteration is of."""
        at = self.cursor
        epoch = at.epoch if self._cursor is None else self._epoch
        return {**self._sampler.state_dict(after=self), "iterating": epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give out the rest of the epoch that the state's iteration was of: nothing, if it had come to its end."""
        given: object = state
        own = dict(given) if isinstance(given, dict) else {}
        epoch = own.pop("iterating", None)
        cursor = self._sampler.resumed(own)
        if type(epoch) is not int:
            raise make_error("E085", "a state of no iteration: give what the loader's own `state_dict` returned")
        if cursor.epoch != epoch and cursor != Cursor.start_of(epoch + 1):
            raise make_error("E085", f"a damaged state: {cursor} in an iteration of epoch {epoch}")
        self._go_on(cursor, epoch)

    def _go_on(self, cursor: Cursor, epoch: int) -> None:
        self._cursor, self._epoch = cursor, epoch
        self._sampler.begun(self, epoch)
