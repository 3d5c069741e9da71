from __future__ import annotations

import os

import pytest

from kvformat.cli.busy import Machine, hint
from kvformat.extract import PipelineTimes

MODEL = PipelineTimes(elapsed_s=10, model_s=9, hash_s=1)
DISK = PipelineTimes(elapsed_s=10, model_s=1, disk_s=9)


@pytest.mark.parametrize(
    ("machine", "threads", "spent", "tried"),
    [
        (Machine(32, 31.0), 32, MODEL, 1),
        (Machine(32, 45.2), 32, MODEL, 1),
        (Machine(32, 20.3), 32, MODEL, 11),
        (Machine(32, 20.3), 12, MODEL, 11),
        (Machine(32, 20.3), 11, MODEL, None),  # no more than are free
        (Machine(32, 15.9), 32, MODEL, None),  # hardly busy
        (Machine(2, 0.9), 2, MODEL, None),
        (Machine(2, 1.5), 2, MODEL, 1),
        (Machine(2, 9.0), 1, MODEL, None),  # cannot be fewer
        (Machine(32, 45.2), 32, DISK, None),
        (Machine(32, 45.2), 32, PipelineTimes(), None),
    ],
)
def test_the_hint_where_threads_were_more_than_free_cores(
    machine: Machine, threads: int, spent: PipelineTimes, tried: int | None
) -> None:
    found = hint(machine, threads=threads, spent=spent)
    assert (found is None) == (tried is None)
    if found is not None:
        assert found.startswith("hint: ")
        assert f"load {machine.load:.1f} on {machine.cores} cores" in found
        assert f"with {threads} threads" in found
        assert f"--threads {tried} may be" in found


def test_a_machine_that_tells_no_load_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    assert Machine.now() == (len(os.sched_getaffinity(0)), 3.5)

    def refuse() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert Machine.now().load == 0
