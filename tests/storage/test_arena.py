"""Ranges of address space, taken and returned in any order."""

from __future__ import annotations

import gc
import mmap
import resource

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvformat.storage.arena import Arena, ArenaState, open_arena

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
        taken = self.arena.take(pages * PAGE)
        start = None if taken is None else taken.start
        assert start == (fits[0] * PAGE if fits else None), "the lowest that fits"
        if taken is not None:
            end = self.live[taken.start] = taken.start + pages * PAGE
            zeros = [not any(self.arena.memory[at : at + PAGE]) for at in range(taken.start, end, PAGE)]
            assert PAGE * sum(zeros) == taken.fresh, "zeros are fresh, the rest is as it was"
            self.arena.memory[taken.start : end] = bytes([1 + taken.start // PAGE]) * (end - taken.start)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.live)))
        self.arena.returned.append((start, self.live.pop(start)))

    @rule(keep=st.integers(0, 16), beside=st.booleans())
    def take_back(self, keep: int, beside: bool) -> None:
        something = bool(self.arena.returned)
        self.arena.take_back(keep * PAGE, beside=beside)
        assert not self.arena.returned
        if beside and something:
            assert self.arena.resident <= self.arena.in_use + keep * PAGE

    @rule(keep=st.integers(0, 16))
    def trim(self, keep: int) -> None:
        self.arena.asked = keep * PAGE
        self.arena.take_back(0)
        assert self.arena.resident <= max(keep * PAGE, self.arena.in_use), "whatever lies above it"

    def taken(self) -> list[tuple[int, int]]:
        return sorted([*self.live.items(), *self.arena.returned])

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        everything = sorted([*self.taken(), *self.arena._free.all()])
        assert [start for start, _ in everything] == [0, *[end for _, end in everything[:-1]]]
        assert everything[-1][1] == 16 * PAGE
        assert self.arena.in_use == sum(end - start for start, end in self.taken())
        assert self.arena.resident == 16 * PAGE - sum(end - start for start, end in self.arena._cold.all())

    @invariant()
    def what_is_in_use_keeps_its_content(self) -> None:
        for start, end in self.live.items():
            assert self.arena.memory[start:end] == bytes([1 + start // PAGE]) * (end - start)

    def teardown(self) -> None:
        for entry in self.live.items():
            self.arena.returned.append(entry)
        self.live = {}
        self.arena.take_back(0)
        assert self.arena._free.all() == [(0, 16 * PAGE)], "all of it is one piece again"


TestArena = ArenaMachine.TestCase


def test_without_address_space_a_smaller_one_is_taken_and_without_any_none() -> None:
    whole = open_arena(PAGE, 1 << 62)
    assert whole is not None
    assert whole.nbytes == 4 * PAGE
    assert open_arena(1 << 60, 1 << 62) is None
    assert open_arena(0) is None


def test_of_address_space_that_is_limited_a_part_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 45, 1 << 45))
    space = open_arena(PAGE, 1 << 44)
    assert space is not None
    assert (1 << 45) // 9 < space.nbytes <= (1 << 45) // 8
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))  # less than there is in use
    assert open_arena(PAGE) is None


class Holder:
    """Something that can be watched."""


def held(state: ArenaState, nbytes: int) -> tuple[Holder, int]:
    taken = state.arena.take(nbytes)
    end = taken.start + nbytes
    state.arena.memory[taken.start : end] = b"\x07" * nbytes
    holder = Holder()
    state.give_back(holder, (taken.start, end))
    return holder, taken.start


def test_without_its_owner_nothing_is_kept_but_what_is_held() -> None:
    nbytes = 4 << 20
    state = ArenaState(64 << 20)
    arena = state.arena
    first, second, third = (held(state, nbytes) for _ in range(3))
    del first
    del state
    gc.collect()
    assert arena.memory[:nbytes] == bytes(nbytes), "it went back to the system, which gives zeros"
    for start in (second[1], third[1]):
        assert arena.memory[start : start + nbytes] == b"\x07" * nbytes
    at = third[1]
    del third
    assert arena.memory[at : at + nbytes] == bytes(nbytes)
    assert arena.memory[second[1] : second[1] + nbytes] == b"\x07" * nbytes
