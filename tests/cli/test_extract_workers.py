"""Several workers of ``kvformat extract``: each says what it did, and all of it together is all there is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import command, environment
from tests.models import save_tiny, write_documents

WORKERS = 3
RECORDS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=64)


def started(arguments: list[Any], rank: int, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command([*arguments, "--rank", rank, "--world-size", WORKERS, *more]),
        env=environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_each_of_several_workers_tells_its_share(run, model: Path, tmp_path: Path, as_json: bool) -> None:
    lines = [{"id": str(n), "token_ids": [n + 1] * (1 + n % 7)} for n in range(RECORDS)]
    documents = write_documents(tmp_path / "d.jsonl", lines)
    out = tmp_path / "out"
    arguments = ["extract", "--model", model, "--documents", documents, "--out", out, "--shard-size", "1"]
    processes = [started(arguments, rank, *(["--json"] if as_json else [])) for rank in range(WORKERS)]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * WORKERS, ended
    if not as_json:
        for rank, (printed, _) in enumerate(ended):
            assert printed.splitlines()[-1].startswith(f"worker {rank} of {WORKERS}: made ")
        assert [len(printed.splitlines()) for printed, _ in ended[1:]] == [1, 1]
        return
    found = [json.loads(printed) for printed, _ in ended]
    assert [(one["rank"], one["world_size"]) for one in found] == [(rank, WORKERS) for rank in range(WORKERS)]
    assert len({one["id"] for one in found}) == 1
    totals = {one["computed_nbytes"] + one["resumed_nbytes"] + one["elsewhere_nbytes"] for one in found}
    assert len(totals) == 1
    assert sum(one["computed_nbytes"] for one in found) <= totals.pop()
    assert sum(one["computed_records"] for one in found) == RECORDS == sum(one["computed_shards"] for one in found)
