"""What every way of drawing batches must do after a stop, whatever fetches them.

A *loader* is anything that iterates over batches with a ``cursor``, once an epoch. ``make`` builds one over a fresh
sampler from a state, or from the start; ``state`` takes the state after a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from kvformat.loader.cursor import Draw
from kvformat.loader.sampler import BatchSampler

__all__ = ["LOADERS", "Indices", "Run", "check_every_cut", "content"]


class Run(Protocol):
    """A loader under test, and how its state is taken and given back."""

    def batches(self) -> Iterable[Any]:
        """One epoch, or what is left of it."""
        ...

    def state(self, after: Any) -> dict[str, Any]:
        """State after a batch, the last one consumed."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


class Indices:
    """A map-style dataset that returns what it is asked for."""

    def __getitems__(self, draw: Draw) -> Draw:
        return draw


def as_it_is(draw: Draw) -> Draw:
    return draw


class Plain:
    """The sampler alone."""

    def __init__(self, sampler: BatchSampler, workers: int) -> None:
        self.sampler = sampler

    def batches(self) -> Iterable[Any]:
        return self.sampler

    def state(self, after: Any) -> dict[str, Any]:
        return self.sampler.state_dict(after=after)

    def load(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class WithDataLoader(Plain):
    """PyTorch's own loader: it fetches ahead, so the state is that after the batch consumed."""

    loader_class: Callable[..., Any] = DataLoader

    def __init__(self, sampler: BatchSampler, workers: int) -> None:
        super().__init__(sampler, workers)
        self.loader = self.loader_class(
            Indices(),
            batch_sampler=sampler,
            collate_fn=as_it_is,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def batches(self) -> Iterable[Any]:
        return self.loader


class WithStatefulDataLoader(WithDataLoader):
    """torchdata's loader, which takes the state by itself."""

    loader_class = StatefulDataLoader

    def state(self, after: Any) -> dict[str, Any]:
        return self.loader.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


LOADERS: dict[str, Callable[[BatchSampler, int], Run]] = {
    "sampler": Plain,
    "DataLoader": WithDataLoader,
    "StatefulDataLoader": WithStatefulDataLoader,
}


def content(batch: Any) -> tuple[list[int], list[int] | None, bool]:
    """What is compared of a batch of record numbers."""
    return list(batch), batch.slots, batch.padding


def check_every_cut(
    make: Callable[[], Run], *, content: Callable[[Any], Any] = content, rest_of_a_whole_epoch: bool
) -> None:
    """First k batches of an epoch and the resumed rest are the uninterrupted epoch; two more epochs are full.

    ``rest_of_a_whole_epoch``: after the last batch a loader that saves itself has an empty rest, one that resumes from
    a cursor goes on with the next epoch.
    """
    run = make()
    states, epoch = [], []
    for batch in run.batches():
        epoch.append(content(batch))
        states.append(run.state(batch))
    following = [[content(batch) for batch in run.batches()] for _ in range(2)]
    assert len(epoch) > 1
    assert following[0] != epoch
    for k, state in enumerate(states, start=1):
        resumed = make()
        resumed.load(state)
        if k < len(epoch) or rest_of_a_whole_epoch:
            assert epoch[:k] + [content(batch) for batch in resumed.batches()] == epoch
        assert [[content(batch) for batch in resumed.batches()] for _ in range(2)] == following
