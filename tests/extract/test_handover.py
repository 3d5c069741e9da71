from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvformat.extract.handover import Handover

WAIT_S = 60


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_items_come_in_order_and_end() -> None:
    way: Handover[str] = Handover(100)
    way.reserve(10)
    way.put(["a", "b"], reserved=10, nbytes=10)
    way.end()
    assert [way.take(), way.take(), way.take(), way.take()] == ["a", "b", None, None]


def test_there_is_room_up_to_the_bound(pool) -> None:
    way: Handover[str] = Handover(100)
    way.reserve(60)
    way.reserve(40)
    waiting = pool.submit(way.reserve, 1)
    assert not waiting.done()
    way.release(60)
    waiting.result(WAIT_S)


def test_who_waits_for_room_is_woken_when_half_of_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    way: Handover[str] = Handover(100)
    woken = []
    monkeypatch.setattr(way._changed, "notify_all", lambda: woken.append(way._nbytes))
    way.reserve(90)
    for _ in range(6):
        way.release(15)
    assert woken == [45, 30, 15, 0]


def test_what_is_larger_than_the_bound_passes_alone(pool) -> None:
    way: Handover[str] = Handover(100)
    way.reserve(1)
    waiting = pool.submit(way.reserve, 500)
    way.release(1)
    waiting.result(WAIT_S)
    following = pool.submit(way.reserve, 1)
    assert not following.done()
    way.release(500)
    following.result(WAIT_S)


def test_what_was_reserved_is_corrected(pool) -> None:
    way: Handover[str] = Handover(100)
    way.reserve(0)
    way.put(["a"], reserved=0, nbytes=90)
    waiting = pool.submit(way.reserve, 20)
    assert not waiting.done()
    way.release(90)
    waiting.result(WAIT_S)


def test_who_waits_for_room_hears_of_a_failure(pool) -> None:
    way: Handover[str] = Handover(1)
    way.reserve(1)
    waiting = pool.submit(way.reserve, 1)
    failure = KeyError("disk")
    way.fail(failure)
    with pytest.raises(KeyError) as caught:
        waiting.result(WAIT_S)
    assert caught.value is failure
    for call in (way.check, lambda: way.reserve(0), lambda: way.put(["a"], reserved=0, nbytes=0)):
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize("how", ["end", "stop"])
def test_who_waits_for_an_item_hears_of_the_end(pool, how: str) -> None:
    way: Handover[str] = Handover(1)
    waiting = pool.submit(way.take)
    getattr(way, how)()
    assert waiting.result(WAIT_S) is None


def test_what_waits_is_dropped_by_a_stop_and_kept_by_an_end() -> None:
    for how, left in (("end", "a"), ("stop", None)):
        way: Handover[str] = Handover(1)
        way.put(["a"], reserved=0, nbytes=1)
        getattr(way, how)()
        assert way.take() == left
        way.check()


def test_many_items_through_a_narrow_way(pool) -> None:
    way: Handover[int] = Handover(3)
    lock = threading.Lock()
    inside = peak = 0

    def give() -> None:
        nonlocal inside, peak
        for number in range(500):
            way.reserve(1)
            with lock:
                inside += 1
                peak = max(peak, inside)
            way.put([number], reserved=1, nbytes=1)
        way.end()

    def take() -> list[int]:
        nonlocal inside
        found = []
        while (number := way.take()) is not None:
            found.append(number)
            with lock:
                inside -= 1
            way.release(1)
        return found

    given, taken = pool.submit(give), pool.submit(take)
    given.result(WAIT_S)
    assert taken.result(WAIT_S) == list(range(500))
    assert peak <= 3
