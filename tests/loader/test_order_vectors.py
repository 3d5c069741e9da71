"""The library's order against the vectors, which an independent implementation made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvformat.loader.collection import collection_id
from kvformat.loader.cursor import Cursor
from kvformat.loader.sampler import BatchSampler
from kvformat.loader.sequence import Sequence
from tests.loader.check_order import PATH, check_case, check_permutation, sequence
from tests.spec.reference import SPEC, script

VECTORS = json.loads(PATH.read_text(encoding="ascii"))
NEWEST = "numpy"
# The oldest release the package allows, or the oldest with a wheel for this interpreter.
OLDEST = "numpy==1.26.*" if sys.version_info < (3, 13) else "numpy==2.1.*"


def test_vectors_are_those_the_reference_makes(tmp_path: Path) -> None:
    """``make vectors`` does the same."""
    out = tmp_path / "v1.json"
    subprocess.run([sys.executable, str(SPEC / "make_order_vectors.py"), str(out)], check=True, timeout=120)
    assert out.read_bytes() == PATH.read_bytes()


@pytest.mark.parametrize("vector", VECTORS["permutations"], ids=lambda v: f"{v['n']}-{v['seed']}")
def test_permutations(vector):
    check_permutation(vector)


@pytest.mark.parametrize("number", range(len(VECTORS["cases"])))
def test_cases(number):
    case = VECTORS["cases"][number]
    assert collection_id([one["id"] for one in VECTORS["datasets"][case["datasets"]]]) == case["collection"]
    check_case(case, VECTORS["datasets"])


def test_a_changed_case_is_noticed():
    case = json.loads(json.dumps(VECTORS["cases"][-1]))
    case["options"]["seed"] += 1
    with pytest.raises(ValueError, match="epoch 0"):
        check_case(case, VECTORS["datasets"])
    vector = {**VECTORS["permutations"][5], "seed": "01"}
    with pytest.raises(ValueError, match="01"):
        check_permutation(vector)


def sampler_over(found: Sequence, vector: dict[str, Any], rank: int) -> BatchSampler:
    """A sampler whose datasets are numbers of the vectors."""
    sampler = BatchSampler.__new__(BatchSampler)
    vars(sampler).update(
        rank=rank,
        world_size=vector["world"],
        start=Cursor.start_of(vector["epoch"]),
        _last_step=vector["options"]["last_step"],
        _running=None,
        _sequence=found,
    )
    return sampler


@pytest.mark.parametrize("number", range(len(VECTORS["steps"])))
def test_steps(number):
    vector = VECTORS["steps"][number]
    found = sequence(vector, VECTORS["datasets"])
    for rank in range(vector["world"]):
        drawn = list(sampler_over(found, vector, rank))
        cursors = [draw.cursor for draw in drawn]
        assert [[cursor.epoch, cursor.block, cursor.batch] for cursor in cursors] == vector["cursors"]
        for draw, step in zip(drawn, vector["ranks"], strict=True):
            block, batch, copy = step[rank]
            place = Cursor(epoch=vector["epoch"], block=block, batch=batch)
            expected = found.draw(place, cursor=draw.cursor, padding=False)
            assert (draw, draw.slots, draw.padding) == (expected, expected.slots, copy)


def test_reference_runs_as_a_script(tmp_path: Path) -> None:
    case = next(case for case in VECTORS["cases"] if case["datasets"] == "small")
    datasets = VECTORS["datasets"]["small"]
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"datasets": datasets, "options": case["options"], "epoch": 1}), encoding="ascii")
    done = subprocess.run(
        [sys.executable, str(SPEC / "reference_order.py"), str(path)], capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [items for _, _, items, _ in case["epochs"]["1"]]


def test_reference_refuses_what_the_annex_says():
    reference = script("reference_order")
    datasets = [reference.Dataset(**one) for one in VECTORS["datasets"]["small"]]
    options = {"over": "records", "seed": 0, "shuffle": "global"}
    with pytest.raises(reference.Refused, match="E086"):
        reference.batches(datasets, {**options, "max_tokens": 3}, 0)
    with pytest.raises(reference.Refused, match="E081"):
        reference.steps(datasets, {**options, "batch_size": 23}, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_vectors_under_other_releases_of_numpy(release, repository, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--target", str(tmp_path), release],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        # Where the whole suite is wanted, what could not be installed was not tested.
        refuse = pytest.fail if "CI" in os.environ or "KVFORMAT_TEST_MODEL" in os.environ else pytest.skip
        refuse(f"cannot install {release}: {done.stderr}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(repository)])}
    command = [sys.executable, str(repository / "tests" / "loader" / "check_order.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    version, permutations, cases = ran.stdout.split()
    assert (int(permutations), int(cases)) == (len(VECTORS["permutations"]), len(VECTORS["cases"]))
    assert (tmp_path / f"numpy-{version}.dist-info").is_dir()  # that release, and not the environment's
