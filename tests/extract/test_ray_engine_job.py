"""What the calling process does with the shards of a plan and Ray's workers; here the workers are this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.errors import IdentityError, KVFormatError, KVFormatWarning
from kvformat.extract import PipelineTimes, ray_job, run
from kvformat.extract.options import RayOptions
from kvformat.extract.progress import Share, Silent
from kvformat.extract.ray_job import added
from tests.models import save_tiny, write_documents

SHARDS = 5


class Cluster:
    """In place of Ray: one worker, which fails when it is given a shard of these."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.fails_at = -1

    def __call__(self, ordinals: Any, prepare: Any, *, on_done: Any, **_: Any) -> None:
        work = None
        for ordinal in ordinals:
            self.begun.append(ordinal)
            work = work or prepare()
            if ordinal == self.fails_at:
                work._worker.__exit__(None, None, None)
                raise InterruptedError
            on_done(ordinal, work([ordinal]))
        if work is not None:
            work._worker.__exit__(None, None, None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(ray_job, "run_with_ray", found)
    return found


class Told(Silent):
    def __init__(self) -> None:
        self.computed = self.resumed = 0
        self.last = PipelineTimes()
        self.counted = Share()

    def share(self, share: Share) -> None:
        self.counted = share

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        assert nbytes > 0
        if computed:
            self.computed += tokens
        else:
            self.resumed += tokens

    def times(self, times: PipelineTimes) -> None:
        self.last = times


class Job:
    def __init__(self, tmp_path: Path) -> None:
        self.model = save_tiny(tmp_path / "model", "llama", max_position_embeddings=64)
        lines = [{"id": f"r{n}", "token_ids": [n + 1, n + 2, n + 3]} for n in range(SHARDS)]
        described = {"documents": write_documents(tmp_path / "d.jsonl", lines), "shard_nbytes": 1}
        self._described = described
        self.out = tmp_path / "ds"

    def run(self, **options: Any) -> tuple[kvformat.Dataset, Told]:
        told = Told()
        options = {"model": self.model, "ray": RayOptions(), "out": self.out, **self._described, **options}
        return run(progress=told, **options), told


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_times_of_the_workers_are_told_as_one_sum(job: Job, cluster: Cluster, tmp_path: Path) -> None:
    dataset, told = job.run()
    assert cluster.begun == list(range(SHARDS))
    assert (told.computed, told.resumed) == (3 * SHARDS, 0)
    assert (told.last.records, told.last.tokens) == (SHARDS, 3 * SHARDS)
    assert told.last.model_s > 0
    assert told.last.limit is not None
    assert (told.counted.shards, told.counted.records, told.counted.kept_nbytes) == (SHARDS, SHARDS, 0)
    assert dataset.id == job.run(ray=None, out=tmp_path / "alone")[0].id


def test_what_was_there_is_not_counted_as_computed_nor_begun(job: Job, cluster: Cluster) -> None:
    cluster.fails_at = 3
    with pytest.raises(InterruptedError):
        job.run()
    cluster.fails_at, cluster.begun = -1, []
    _, told = job.run()
    assert cluster.begun == [3, 4]
    assert (told.computed, told.resumed) == (6, 9)
    assert told.last.tokens == 6


def test_a_damaged_shard_of_an_earlier_run_is_made_anew(job: Job, cluster: Cluster, tmp_path: Path) -> None:
    expected = job.run(ray=None, out=tmp_path / "alone")[0].id
    cluster.fails_at = 4
    with pytest.raises(InterruptedError):
        job.run()
    for ordinal in (1, 2):
        [shard] = job.out.glob(f".staging/*/{ordinal:08}-*.shard")
        shard.chmod(0o600)
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    cluster.fails_at, cluster.begun = -1, []
    with pytest.warns(KVFormatWarning, match="W006"):
        dataset, told = job.run()
    assert cluster.begun == [4, 1, 2]
    assert (told.computed, told.resumed) == (9, 12)
    counted = told.counted
    assert (counted.shards, counted.records, counted.tokens) == (3, 3, 9), "what was damaged counts as made, once"
    assert counted.elsewhere_nbytes == 0
    assert 3 * counted.kept_nbytes == 2 * counted.nbytes
    assert dataset.id == expected
    assert kvformat.verify(job.out).ok


def test_all_of_another_model_is_not_published(
    job: Job, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker begins even where every shard is there: it alone knows its weights."""
    with monkeypatch.context() as patch:
        patch.setattr(ray_job, "seal", interrupted)
        with pytest.raises(InterruptedError):
            job.run()
    cluster.begun = []
    other = save_tiny(tmp_path / "other", "llama", max_position_embeddings=64, seed=1)
    with pytest.raises(IdentityError) as refused:
        job.run(model=other)
    assert refused.value.code == "E120"
    cluster.begun = []
    _, told = job.run()
    assert cluster.begun == [SHARDS - 1]
    assert (told.computed, told.resumed, told.last.records) == (0, 3 * SHARDS, 0)


def interrupted(*_: object, **__: object) -> None:
    raise InterruptedError


def test_seconds_and_counts_add_up() -> None:
    first = PipelineTimes(elapsed_s=2, model_s=1, records=1, tokens=3, nbytes=5, device_timed=True)
    second = PipelineTimes(elapsed_s=4, model_s=3, disk_s=1, records=2, tokens=4, nbytes=6, skipped=1)
    total = PipelineTimes(
        elapsed_s=6, model_s=4, disk_s=1, records=3, tokens=7, nbytes=11, skipped=1, device_timed=True
    )
    assert added(first, second) == added(second, first) == total
    assert added(PipelineTimes(), second) == second


def test_one_of_several_processes_is_refused(job: Job, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would have the cluster make all shards."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for options in ({}, {"rank": 0, "world_size": 3}):
        with pytest.raises(KVFormatError, match="needs one alone") as told:
            job.run(**options)
        assert told.value.code == "E081"
    assert cluster.begun == []
