"""What the ranks of a job tell each other, through a function the caller gives. No process group is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from kvformat.errors import make_error

__all__ = ["AllGather", "ask_same", "exchange", "named", "refuse_different"]

_CONTRACT = (
    "takes an object and returns those of all ranks, in rank order, this rank's among them. For torch.distributed: "
    "found = [None] * get_world_size(); all_gather_object(found, obj); return found"
)
AllGather = Callable[[Any], Sequence[Any]]
"""Returns the object of every rank, in rank order, on every rank; a collective call."""


def ask_same(dataset_id: str, all_gather_object: AllGather, *, path: str) -> None:
    """Compare the dataset ids of all ranks; E087 on every rank where they differ."""
    ids = [one[0] for one in exchange(all_gather_object, "same", (dataset_id,), path=path)]
    refuse_different(ids, path=path)


def exchange(
    all_gather_object: AllGather, call: str, message: tuple[Any, ...], *, path: str | None = None
) -> list[tuple[Any, ...]]:
    """Give every rank a small message, and return those of all ranks, in rank order.

    Parameters
    ----------
    all_gather_object
        The caller's function.
    call
        What is exchanged, which must be the same on every rank.
    message
        Strings, numbers and None alone: any version of this library, and of Python, can unpickle them. For a call,
        always as many.

    Raises
    ------
    UsageError
        E081 where the function does not return what every rank gave.
    IdentityError
        E087 on every rank where some rank is at another call.
    """
    own = ("kvformat", call, *message)
    try:
        received: object = all_gather_object(own)
    except TypeError as error:  # torch's own function, say, which takes a list to fill first
        raise make_error("E081", f"all_gather_object failed ({error}): it {_CONTRACT}") from error
    if (
        not isinstance(received, Sequence)
        or isinstance(received, str | bytes)
        or own not in [one for one in received if _is_message(one)]
    ):
        raise make_error(
            "E081",
            f"all_gather_object {_CONTRACT}; found {received!r:.200}",
        )
    astray = [
        rank
        for rank, one in enumerate(received)
        if not (_is_message(one) and one[:2] == own[:2] and len(one) == len(own))
    ]
    if astray:
        others = f"{named(astray)} sent {received[astray[0]]!r:.200}"
        raise make_error(
            "E087",
            f"the ranks are not at the same call: this one is at {call!r}, {others}: make the same calls, with the "
            "same version of kvformat, on every rank",
            path=path,
        )
    return [one[2:] for one in received]


def _is_message(given: object) -> bool:
    """Whether it has the form of what is sent: only then may it be compared, as an array says no yes or no."""
    return isinstance(given, tuple) and all(part is None or isinstance(part, str | int) for part in given)


def refuse_different(ids: Sequence[str], *, path: str) -> None:
    """E087 where the dataset ids of the ranks differ."""
    if len(set(ids)) > 1:
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(ids):
            ranks_of.setdefault(one, []).append(rank)
        found = "; ".join(f"{one} on {named(ranks)}" for one, ranks in ranks_of.items())
        raise make_error("E087", f"the ranks opened different datasets: {found}: give all the same", path=path)


def named(ranks: Iterable[int]) -> str:
    """Ascending ranks in words, runs of them shortened: ``ranks 0-3, 6``."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda numbered: numbered[1] - numbered[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(runs) == 1 and len(runs[0]) == 1 else "ranks ") + ", ".join(parts)
