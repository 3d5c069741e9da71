"""Receipts come back in order, failures with them, and threads end."""

from __future__ import annotations

import threading

import pytest

from kvformat.write.finisher import Finisher
from kvformat.write.staging import Receipt


class LostError(Exception):
    pass


def receipt(ordinal):
    return Receipt(ordinal=ordinal, records=(), sha256="", size=0)


def ordinals(receipts):
    return [one.ordinal for one in receipts]


def test_order_is_that_of_submission():
    finisher, second_done = Finisher(keep=False), threading.Event()

    def first():
        assert second_done.wait(60)
        return receipt(0)

    def second():
        second_done.set()
        return receipt(1)

    finisher.submit(first)
    finisher.submit(second)
    assert ordinals(finisher.rest()) == [0, 1]
    assert ordinals(finisher.rest()) == []
    finisher.close()


def test_ready_waits_only_for_too_much():
    finisher, go = Finisher(keep=False), threading.Event()

    def wait(ordinal):
        assert go.wait(60)
        return receipt(ordinal)

    for ordinal in range(3):
        finisher.submit(lambda ordinal=ordinal: wait(ordinal))
    assert ordinals(finisher.ready()) == []
    finisher.submit(lambda: wait(3))
    oldest = finisher._waiting[0]
    result = oldest.result

    def asked():
        go.set()
        return result()

    oldest.result = asked
    assert ordinals(finisher.ready())[:1] == [0]
    finisher.close()


def test_a_failure_comes_in_its_turn():
    finisher = Finisher(keep=False)

    def fail():
        raise LostError

    for work in (lambda: receipt(0), fail, lambda: receipt(2)):
        finisher.submit(work)
    found = finisher.rest()
    assert next(found).ordinal == 0
    with pytest.raises(LostError):
        next(found)
    finisher.close()


@pytest.mark.parametrize("keep", [False, True])
def test_closing_ends_the_threads_and_maybe_what_waits(keep):
    before = threading.active_count()
    finisher, started, go, done = Finisher(keep=keep), threading.Barrier(3), threading.Event(), []

    def work(ordinal):
        if ordinal < 2:
            started.wait(60)
            assert go.wait(60)
        done.append(ordinal)
        return receipt(ordinal)

    for ordinal in range(4):
        finisher.submit(lambda ordinal=ordinal: work(ordinal))
    started.wait(60)
    cancelled = threading.Semaphore(0)
    if not keep:
        finisher._waiting[3].add_done_callback(lambda _: cancelled.release())
    closing = threading.Thread(target=finisher.close)
    closing.start()
    assert keep or cancelled.acquire(timeout=60)
    go.set()
    closing.join()
    assert sorted(done) == ([0, 1, 2, 3] if keep else [0, 1])
    assert threading.active_count() == before
    finisher.close()
