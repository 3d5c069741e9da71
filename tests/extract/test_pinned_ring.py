from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvformat.extract.pinned_ring import Piece, PinnedRing

PAGE = 4096


class Pinned:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


def address(piece: Piece) -> int:
    return piece.memory.data_ptr()


def test_nothing_is_locked_before_it_is_needed_and_the_ring_once() -> None:
    pinned = Pinned()
    ring = PinnedRing(4 * PAGE, pinned)
    assert pinned.sizes == []
    for _ in range(20):
        ring.give_back(ring.take(PAGE))
    assert pinned.sizes == [4 * PAGE]


def test_memory_goes_round() -> None:
    ring = PinnedRing(4 * PAGE, Pinned())
    first, second, third = (ring.take(PAGE) for _ in range(3))
    ring.give_back(first)
    ring.give_back(second)
    fourth, fifth = ring.take(PAGE), ring.take(2 * PAGE)
    assert address(fourth) == address(third) + PAGE
    assert address(fifth) == address(first)


def test_a_full_ring_is_full() -> None:
    pinned = Pinned()
    ring = PinnedRing(2 * PAGE, pinned)
    taken = [ring.take(PAGE) for _ in range(2)]
    ring.give_back(taken.pop(0))
    taken.append(ring.take(PAGE))  # round, up to the very piece that is still in use
    beside = ring.take(1)
    assert beside.extent is None
    assert pinned.sizes == [2 * PAGE, 1]


def test_the_beginning_is_not_used_again_before_it_is_free() -> None:
    ring = PinnedRing(4 * PAGE, Pinned())
    first, _ = ring.take(PAGE), ring.take(3 * PAGE)
    ring.give_back(first)
    assert ring.take(2 * PAGE).extent is None
    assert ring.take(PAGE).extent == (0, PAGE)


def test_what_finds_no_room_gets_memory_of_its_own() -> None:
    pinned = Pinned()
    ring = PinnedRing(2 * PAGE, pinned)
    large = ring.take(3 * PAGE)
    assert (large.extent, large.memory.nbytes, pinned.sizes) == (None, 3 * PAGE, [3 * PAGE])
    ring.give_back(large)
    assert ring.take(0).memory.nbytes == 0


@given(st.lists(st.tuples(st.integers(1, 3 * PAGE), st.booleans()), max_size=60))
def test_a_ring_of_the_bound_and_a_piece_more_always_has_room(steps: list[tuple[int, bool]]) -> None:
    bound = 8 * PAGE
    pinned = Pinned()
    ring = PinnedRing(bound + 3 * PAGE, pinned)
    live: deque[Piece] = deque()
    for mark, (nbytes, give) in enumerate(steps):
        least = len(live) - 1 if give else len(live)
        while len(live) > max(0, least) or sum(-(-p.memory.nbytes // PAGE) * PAGE for p in live) + 3 * PAGE > bound:
            piece = live.popleft()
            assert len(set(piece.memory.tolist())) == 1, "another piece wrote into it"
            ring.give_back(piece)
        piece = ring.take(nbytes)
        assert piece.extent is not None
        piece.memory.fill_(mark)
        live.append(piece)
    for piece in live:
        assert len(set(piece.memory.tolist())) == 1
