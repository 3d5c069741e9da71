"""The planner of requests: every byte once, nothing beyond the bound, no more requests than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.storage.ranges import plan_parts, plan_requests

MIB = 1 << 20


@st.composite
def ranges(draw) -> list[tuple[int, int]]:
    """Not overlapping, some empty, some touching, in any order."""
    position, found = draw(st.integers(0, 10_000)), []
    for _ in range(draw(st.integers(0, 12))):
        position += draw(st.sampled_from([0, 0, 1, 63, 64, 65, 5_000]) | st.integers(0, 2**40))
        nbytes = draw(st.sampled_from([0, 1, 100, 4096]) | st.integers(0, 60_000))
        found.append((position, nbytes))
        position += nbytes
    return draw(st.permutations(found))


@given(ranges(), st.integers(1, 20_000), st.sampled_from([0, 64, 1000]))
def test_every_byte_comes_once(wanted, request_nbytes, gap_nbytes) -> None:
    requests = plan_requests(wanted, request_nbytes=request_nbytes, gap_nbytes=gap_nbytes)
    assert requests == plan_requests(sorted(wanted), request_nbytes=request_nbytes, gap_nbytes=gap_nbytes)

    pieces = [piece for request in requests for piece in request.pieces]
    assert pieces == sorted(pieces)
    assert _joined(pieces) == _joined(sorted(wanted))

    end = 0
    for request in requests:
        assert 0 < request.nbytes <= request_nbytes
        assert request.start >= end, "requests overlap"
        end = request.start + request.nbytes
        assert request.pieces[0][0] == request.start
        assert sum(request.pieces[-1]) == end
        assert all(nbytes > 0 for _, nbytes in request.pieces)
        gaps = [after[0] - sum(before) for before, after in zip(request.pieces, request.pieces[1:], strict=False)]
        assert all(0 < gap <= gap_nbytes for gap in gaps)


@given(ranges(), st.integers(1, 20_000), st.sampled_from([0, 64, 1000]))
def test_no_more_requests_than_needed(wanted, request_nbytes, gap_nbytes) -> None:
    requests = plan_requests(wanted, request_nbytes=request_nbytes, gap_nbytes=gap_nbytes)
    runs = _joined(sorted(wanted), gap_nbytes)
    assert len(requests) <= sum(-(-nbytes // request_nbytes) for _, nbytes in runs)


def _joined(ranges, gap_nbytes=0) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, nbytes in ranges:
        if joined and nbytes and start - sum(joined[-1]) <= gap_nbytes:
            joined[-1] = (joined[-1][0], start + nbytes - joined[-1][0])
        elif nbytes:
            joined.append((start, nbytes))
    return joined


@pytest.mark.parametrize("nbytes", [1, 8 * MIB, 8 * MIB + 1, 44 * MIB, 155 * MIB + 4096, 36 * 8 * MIB])
def test_a_record_takes_as_many_requests_as_its_size_does(nbytes) -> None:
    requests = plan_requests([(12288, nbytes)], request_nbytes=8 * MIB, gap_nbytes=MIB)
    assert len(requests) == -(-nbytes // (8 * MIB))
    sizes = [request.nbytes for request in requests]
    assert max(sizes) - min(sizes) <= 4096 * len(sizes), "equal but for the alignment"
    assert all(request.start % 4096 == 0 for request in requests)


def test_slabs_that_touch_are_one_piece() -> None:
    (request,) = plan_requests([(100, 50), (0, 100)], request_nbytes=1000, gap_nbytes=0)
    assert request == (0, 150, ((0, 150),))


def test_what_lies_between_neighbours_is_no_piece() -> None:
    (request,) = plan_requests([(0, 10), (74, 6)], request_nbytes=1000, gap_nbytes=64)
    assert request == (0, 80, ((0, 10), (74, 6)))
    assert len(plan_requests([(0, 10), (75, 6)], request_nbytes=1000, gap_nbytes=64)) == 2


def test_offsets_beyond_four_gibibytes() -> None:
    (request,) = plan_requests([(2**33 + 5, 7)], request_nbytes=8 * MIB, gap_nbytes=MIB)
    assert request == (2**33 + 5, 7, ((2**33 + 5, 7),))


@pytest.mark.parametrize("wanted", [[(0, 10), (9, 1)], [(0, 10), (0, 10)], [(-1, 5)], [(3, -1)]])
def test_nonsense_is_refused(wanted) -> None:
    with pytest.raises(ValueError, match="range"):
        plan_requests(wanted, request_nbytes=8, gap_nbytes=0)


@given(st.integers(0, 10**7), st.integers(1, 5000), st.integers(1, 50))
def test_parts_tile_the_object(nbytes, part_nbytes, most_parts) -> None:
    parts = plan_parts(nbytes, part_nbytes=part_nbytes, most_parts=most_parts, align=16)
    assert len(parts) <= most_parts
    position = 0
    for start, size in parts:
        assert start == position
        assert size > 0
        position += size
    assert position == nbytes
    assert len({size for _, size in parts[:-1]}) <= 1
    if nbytes <= part_nbytes * most_parts:
        assert all(size <= part_nbytes for _, size in parts)
