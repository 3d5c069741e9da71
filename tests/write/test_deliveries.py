"""Deliveries are done side by side, within a bound of bytes, and failures are told before more is begun."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from kvformat.write.deliveries import Deliveries
from kvformat.write.staging import Receipt


class LostError(Exception):
    pass


def receipt(ordinal):
    return Receipt(ordinal=ordinal, records=(), sha256="", size=0)


def waiting(go, ordinal):
    def work():
        assert go.wait(60)
        return receipt(ordinal)

    return work


def test_what_is_submitted_comes_back():
    deliveries = Deliveries(max_nbytes=100)
    futures = [deliveries.submit(lambda ordinal=ordinal: receipt(ordinal), 10) for ordinal in range(5)]
    deliveries.flush()
    assert [future.result(0).ordinal for future in futures] == list(range(5))
    deliveries.close(keep=True)
    deliveries.close(keep=False)


def test_no_more_bytes_wait_than_allowed():
    deliveries, go, submitted = Deliveries(max_nbytes=100), threading.Event(), threading.Event()
    for ordinal in range(2):
        deliveries.submit(waiting(go, ordinal), 50)
    entered = threading.Event()
    real = deliveries._has_room
    deliveries._has_room = lambda nbytes: (entered.set(), real(nbytes))[1]

    def third():
        deliveries.submit(waiting(go, 2), 1)
        submitted.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert entered.wait(60)
    assert not submitted.is_set()
    go.set()
    thread.join(60)
    assert submitted.is_set()
    deliveries.close(keep=True)


def test_one_that_is_larger_than_the_bound_goes_alone():
    deliveries = Deliveries(max_nbytes=100)
    assert deliveries.submit(lambda: receipt(0), 1000).result(60).ordinal == 0
    deliveries.flush()
    assert deliveries.submit(lambda: receipt(1), 1000).result(60).ordinal == 1
    deliveries.close(keep=True)


def test_a_failure_is_told_by_the_next_call():
    deliveries, go = Deliveries(max_nbytes=100), threading.Event()

    def fail():
        assert go.wait(60)
        raise LostError

    future = deliveries.submit(fail, 60)
    thread = threading.Timer(0, go.set)
    thread.start()
    with pytest.raises(LostError):
        deliveries.submit(lambda: receipt(1), 60)  # waits for room, which there is only then
    with pytest.raises(LostError):
        deliveries.flush()
    with pytest.raises(LostError):
        future.result(60)
    deliveries.close(keep=True)
    thread.join()


@pytest.mark.parametrize("keep", [True, False])
def test_closing_keeps_what_waits_or_drops_it(keep):
    deliveries, go, begun = Deliveries(max_nbytes=1000), threading.Event(), threading.Semaphore(0)

    def work():
        begun.release()
        assert go.wait(60)
        return receipt(0)

    futures = [deliveries.submit(work, 1) for _ in range(5)]
    for _ in range(2):
        assert begun.acquire(timeout=60)
    closing = threading.Thread(target=deliveries.close, kwargs={"keep": keep})
    closing.start()
    if not keep:
        with pytest.raises(CancelledError):
            futures[4].result(60)
    go.set()
    closing.join(60)
    assert [future.cancelled() for future in futures] == [False] * 2 + [not keep] * 3
