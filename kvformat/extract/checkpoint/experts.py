"""Experts that a checkpoint keeps one by one and the model keeps in one tensor.

transformers 5 keeps the experts of a layer as ``gate_up_proj`` ``[experts, 2 * width, hidden]`` (all gates before all
ups) and ``down_proj`` ``[experts, hidden, width]``; before, and in the files it saves, each was a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """Rows ``first`` to ``last`` of one expert in a tensor of all of them."""

    name: str
    whole: str
    expert: int
    first: int
    last: int


def pieces_of(name: str, shape: Sequence[int]) -> Iterator[Piece]:
    """Names that the parts of a tensor have where experts are kept one by one; none for any other tensor."""
    head, dot, last = name.rpartition(".")
    if len(shape) != 3 or not dot or head.rpartition(".")[2] != "experts":
        return
    experts, rows, _ = shape
    if last == "gate_up_proj" and rows % 2 == 0:
        parts = [("gate_proj", 0, rows // 2), ("up_proj", rows // 2, rows)]
    elif last == "down_proj":
        parts = [("down_proj", 0, rows)]
    else:
        return
    for expert in range(experts):
        for part, start, end in parts:
            yield Piece(name=f"{head}.{expert}.{part}.weight", whole=name, expert=expert, first=start, last=end)
