from __future__ import annotations

import threading

import pytest

from kvformat.extract.meter import Limit, PipelineMeter, PipelineTimes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_times_are_added_up(clock: Clock) -> None:
    meter = PipelineMeter(clock=clock)
    with meter.running():
        for step, seconds in (("model", 3.0), ("blocked", 1.0), ("model", 2.0)):
            with meter.during(step):
                clock.now += seconds
        clock.now += 4.0
    clock.now += 100.0
    assert meter.times() == PipelineTimes(elapsed_s=10.0, model_s=5.0, blocked_s=1.0)


def test_what_is_under_way_counts_up_to_now(clock: Clock) -> None:
    meter = PipelineMeter(clock=clock)
    with meter.running(), meter.during("hash"):
        clock.now += 2.0
        assert meter.times() == PipelineTimes(elapsed_s=2.0, hash_s=2.0)
        clock.now += 1.0
        assert meter.times() == PipelineTimes(elapsed_s=3.0, hash_s=3.0)
    assert meter.times() == PipelineTimes(elapsed_s=3.0, hash_s=3.0)


def test_threads_are_measured_beside_each_other(clock: Clock) -> None:
    meter = PipelineMeter(clock=clock)
    begun, passed = threading.Event(), threading.Event()

    def store() -> None:
        with meter.during("disk"):
            begun.set()
            assert passed.wait(60)

    thread = threading.Thread(target=store)
    with meter.during("model"):
        thread.start()
        assert begun.wait(60)
        clock.now += 5.0
        passed.set()
        thread.join()
    assert (meter.times().model_s, meter.times().disk_s) == (5.0, 5.0)


def test_a_failure_is_measured_up_to_it(clock: Clock) -> None:
    meter = PipelineMeter(clock=clock)
    with pytest.raises(ValueError), meter.running(), meter.during("model"):
        clock.now += 2.0
        raise ValueError
    assert meter.times() == PipelineTimes(elapsed_s=2.0, model_s=2.0)


def test_counts() -> None:
    meter = PipelineMeter(clock=lambda: 0.0)
    meter.count(tokens=7, nbytes=100)
    meter.count(tokens=1, nbytes=10)
    meter.skip()
    meter.add("copy", 0.5)
    meter.timed_by_device()
    wanted = PipelineTimes(records=2, skipped=1, tokens=8, nbytes=110, copy_s=0.5, device_timed=True)
    assert meter.times() == wanted


LIMITS = {
    "model": (PipelineTimes(elapsed_s=100, model_s=93, hash_s=4, disk_s=6), ("model",), 0.93),
    "disk": (PipelineTimes(elapsed_s=10, model_s=5, hash_s=1, disk_s=8), ("disk",), 0.8),
    "both of one thread": (PipelineTimes(elapsed_s=10, model_s=6, hash_s=5, disk_s=4.5), ("hash", "disk"), 0.95),
    "a copy that waits takes turns with the model": (
        PipelineTimes(elapsed_s=10, model_s=4, copy_s=5, disk_s=6),
        ("copy", "model"),
        0.9,
    ),
    "a copy of the device does not": (
        PipelineTimes(elapsed_s=10, model_s=4, copy_s=5, disk_s=6, device_timed=True),
        ("disk",),
        0.6,
    ),
    "the copy": (PipelineTimes(elapsed_s=10, model_s=4, copy_s=9, disk_s=6, device_timed=True), ("copy",), 0.9),
    "reading documents": (PipelineTimes(elapsed_s=10, documents_s=9, model_s=1), ("documents",), 0.9),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_line_that_is_busy_most_limits(case: str) -> None:
    times, steps, share = LIMITS[case]
    assert times.limit is not None
    assert times.limit.steps == steps
    assert times.limit.share == pytest.approx(share)


def test_nothing_limits_what_was_not_measured() -> None:
    assert PipelineTimes().limit is None
    assert str(PipelineTimes()) == "nothing measured yet"


def test_the_words() -> None:
    assert str(Limit(("model",), 0.934)) == "model (93 % of the time)"
    assert str(Limit(("hash", "disk"), 0.5)) == "hash and disk (50 % of the time)"
    times = PipelineTimes(elapsed_s=200, model_s=186, hash_s=8, disk_s=12)
    shares = "[documents 0 %, model 93 %, copy 0 %, hash 4 %, disk 6 %]"
    assert str(times) == f"limited by: model (93 % of the time) {shares}"


def test_the_last_while_by_itself() -> None:
    earlier = PipelineTimes(elapsed_s=10, model_s=9, disk_s=1, records=4, tokens=40, nbytes=400, device_timed=True)
    later = PipelineTimes(elapsed_s=20, model_s=10, disk_s=10, records=5, tokens=50, nbytes=500, device_timed=True)
    now = later.since(earlier)
    assert now == PipelineTimes(elapsed_s=10, model_s=1, disk_s=9, records=1, tokens=10, nbytes=100, device_timed=True)
    assert now.limit == (("disk",), 0.9)
