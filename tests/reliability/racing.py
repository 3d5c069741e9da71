"""Processes let go at once to publish at one place, and what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["race", "run_race"]

REPOSITORY = Path(__file__).resolve().parents[2]
Result = dict[str, Any]


def race(processes: int, publish: Callable[[int, Callable[[], None]], Result]) -> list[Result]:
    """Results of ``publish(number, wait)`` in as many forks; ``wait`` returns when all of them have called it."""
    results_read, results_write = os.pipe()
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    pids = []
    for number in range(processes):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            os.close(go_write)

            def wait() -> None:
                os.write(ready_write, b".")
                os.read(go_read, 1)  # returns at the end of the pipe, when the parent lets all go at once

            result = publish(number, wait)
            os.write(results_write, (json.dumps(result) + "\n").encode())
            code = 0
        finally:
            os._exit(code)
    for _ in pids:
        os.read(ready_read, 1)
    os.close(go_write)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(results_write)
    with os.fdopen(results_read) as lines:
        results = [json.loads(line) for line in lines]
    if any(statuses):
        raise SystemExit(f"exit statuses {statuses}")
    return results


def run_race(module: str, location: str, options: dict[str, Any]) -> list[Result]:
    """What ``python -m MODULE race LOCATION OPTIONS`` prints: a result for each process."""
    done = subprocess.run(
        [sys.executable, "-m", module, "race", location, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stderr) == (0, "")
    results: list[Result] = json.loads(done.stdout)
    assert len(results) == options["processes"]
    return results
