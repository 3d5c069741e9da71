"""Two ranks in processes of their own: a damaged record on one of them stops both, and soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loader.damage import damaged_copy
from tests.write.make import ids, kv, writer

RECORDS, DAMAGED = 8, 3
SOON_S = 10


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> list[Path]:
    """A sound dataset, and a damaged copy of it."""
    directory = tmp_path_factory.mktemp("gloo")
    sound = directory / "sound"
    with writer(sound) as out:
        for number in range(RECORDS):
            out.add(f"sample-{number}", kv(seed=number), token_ids=ids(first=number))
    return [sound, damaged_copy(sound, directory / "damaged", record=DAMAGED)]


Found = list[tuple[int, list[dict[str, Any]], str]]
"""Exit status, reports and standard error of each rank."""


def run(mode: str, kind: str, locations: list[Path], store: Path, repository: Path) -> Found:
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    environment = {
        **os.environ,
        "PYTHONPATH": str(repository),
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "tests.loader.rank_program", mode, kind]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(len(locations)), str(store), str(location)],
            cwd=repository,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, location in enumerate(locations)
    ]
    found = []
    try:
        deadline = time.monotonic() + 100
        for process in ranks:
            out, err = process.communicate(timeout=deadline - time.monotonic())
            found.append((process.returncode, [json.loads(line) for line in out.splitlines() if line[:1] == "{"], err))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    return found


def last(found: Found) -> list[dict[str, Any]]:
    """The last report of each rank: all failed, soon after the first."""
    ends = [reports[-1] for _, reports, _ in found]
    assert all(reports[0]["state"] == "started" for _, reports, _ in found)
    assert [end["state"] for end in ends] == ["failed"] * len(ends)
    assert max(end["at"] for end in ends) - min(end["at"] for end in ends) < SOON_S
    assert [status for status, _, _ in found] == [1] * len(found), [err for _, _, err in found]
    return ends


@pytest.mark.parametrize("kind", ["records", "KVLoader"])
@pytest.mark.parametrize("mode", ["lockstep", "alone"])
def test_sound_ranks_finish(mode: str, kind: str, places: list[Path], tmp_path: Path, repository: Path) -> None:
    found = run(mode, kind, [places[0]] * 2, tmp_path / "store", repository)
    steps = RECORDS if kind == "records" else RECORDS // 2
    assert [(status, reports[-1]["state"], reports[-1]["steps"]) for status, reports, _ in found] == [
        (0, "finished", steps)
    ] * 2


# A loader that shares out the records gives rank 1 those with odd numbers: the damaged one is its second.
FAILING = [("records", 0, DAMAGED), ("records", 1, DAMAGED), ("KVLoader", 1, DAMAGED // 2)]


@pytest.mark.parametrize(("kind", "damaged", "steps"), [*FAILING, ("DataLoader", 1, DAMAGED // 2)])
def test_in_lockstep_both_name_the_record(
    kind: str, damaged: int, steps: int, places: list[Path], tmp_path: Path, repository: Path
) -> None:
    locations = places if damaged else places[::-1]
    ends = last(run("lockstep", kind, locations, tmp_path / "store", repository))
    own, other = ends[damaged], ends[1 - damaged]
    assert [end["steps"] for end in ends] == [steps, steps]
    assert [end["record"] for end in ends] == [DAMAGED, DAMAGED]
    assert (own["error"], other["error"], other["code"]) == ("DamageError", "IdentityError", "E087")
    assert f"rank {damaged} failed to load its batch {steps}: {own['text']}" in other["text"]


@pytest.mark.parametrize(("kind", "damaged", "steps"), FAILING)
def test_without_it_the_other_fails_as_the_connection_closes(
    kind: str, damaged: int, steps: int, places: list[Path], tmp_path: Path, repository: Path
) -> None:
    """The rank that fails names the record; the other knows only that its peer is gone, in the middle of a step."""
    locations = places if damaged else places[::-1]
    ends = last(run("alone", kind, locations, tmp_path / "store", repository))
    own, other = ends[damaged], ends[1 - damaged]
    assert [end["steps"] for end in ends] == [steps, steps]
    assert (own["error"], own["record"]) == ("DamageError", DAMAGED)
    assert (other["error"], other["record"], other["code"]) == ("RuntimeError", None, None)
