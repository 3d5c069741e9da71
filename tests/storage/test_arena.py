"""Ranges of address space, taken and returned in any order."""

from __future__ import annotations

import mmap

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvformat.storage.arena import Arena, open_arena

PAGE = mmap.PAGESIZE


class ArenaMachine(RuleBasedStateMachine):
    """Ranges are taken and returned in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(16 * PAGE)
        self.live: dict[int, int] = {}

    @rule(pages=st.integers(1, 9))
    def take(self, pages: int) -> None:
        # What was returned and not taken back is no room yet.
        free = [page for page in range(16) if not any(start <= page * PAGE < end for start, end in self.taken())]
        fits = [page for page in free if set(range(page, page + pages)) <= set(free)]
        start = self.arena.take(pages * PAGE)
        assert start == (fits[0] * PAGE if fits else None), "the lowest that fits"
        if start is not None:
            self.live[start] = start + pages * PAGE

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.live)))
        self.arena.returned.append((start, self.live.pop(start)))

    @rule(keep=st.integers(0, 16))
    def take_back(self, keep: int) -> None:
        self.arena.take_back(keep * PAGE)
        assert not self.arena.returned

    def taken(self) -> list[tuple[int, int]]:
        return sorted([*self.live.items(), *self.arena.returned])

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        everything = sorted([*self.taken(), *self.arena._free])
        assert [start for start, _ in everything] == [0, *[end for _, end in everything[:-1]]]
        assert everything[-1][1] == 16 * PAGE
        assert self.arena.in_use == sum(end - start for start, end in self.taken())

    def teardown(self) -> None:
        for entry in self.live.items():
            self.arena.returned.append(entry)
        self.live = {}
        self.arena.take_back(0)
        assert self.arena._free == [(0, 16 * PAGE)], "all of it is one piece again"


TestArena = ArenaMachine.TestCase


def test_without_address_space_a_smaller_one_is_taken_and_without_any_none() -> None:
    whole = open_arena(PAGE, 1 << 62)
    assert whole is not None
    assert whole.nbytes == 4 * PAGE
    assert open_arena(1 << 60, 1 << 62) is None
