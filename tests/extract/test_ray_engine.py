"""A small Ray cluster on this machine; its workers do what the functions here say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import pytest

from kvformat.errors import ConflictError, DependencyError, InputError, UsageError, make_error
from kvformat.extract.ray_engine import run_with_ray

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs, no dashboard, nothing reported; Ray's own warnings are its own affair."""
    with (
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="kvr-", ignore_cleanup_errors=True) as folder,  # sockets want short paths
    ):
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray = pytest.importorskip("ray")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            object_store_memory=80 * MIB,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


# ------------------------------------------------------------------------------------------------- what the workers do


def note(folder: Path, text: str, line: str) -> None:
    with (folder / text).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def lines(folder: Path, text: str) -> list[str]:
    path = folder / text
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def prepare(folder: Path):
    note(folder, "prepared", str(os.getpid()))
    return partial(extract, folder)


def extract(folder: Path, ordinals) -> None:
    for ordinal in ordinals:
        note(folder, "extracted", f"{ordinal} {os.getpid()}")
        if ordinal == 3:
            raise make_error("E104", "'k' holds NaN", record="doc-7", layer=2)
        if ordinal == 5:
            raise LookupError("no such thing")
        if ordinal == 7:
            os._exit(9)


def prepare_in_vain(folder: Path):
    raise make_error("E304", "the model does not load", path=folder)


def done(folder: Path) -> list[int]:
    return sorted(int(line.split()[0]) for line in lines(folder, "extracted"))


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("cluster")
class TestOnACluster:
    def test_all_shards_are_extracted_and_a_worker_prepares_once(self, tmp_path: Path) -> None:
        told: list[int] = []
        run_with_ray([0, 1, 2, 4, 6, 8, 9], partial(prepare, tmp_path), on_done=told.append)
        assert done(tmp_path) == sorted(told) == [0, 1, 2, 4, 6, 8, 9]
        prepared = lines(tmp_path, "prepared")
        assert len(prepared) == len(set(prepared)) <= 2
        assert {line.split()[1] for line in lines(tmp_path, "extracted")} == set(prepared)
        assert str(os.getpid()) not in prepared

    def test_no_more_workers_than_asked_for(self, tmp_path: Path) -> None:
        run_with_ray([0, 1, 2, 4], partial(prepare, tmp_path), num_workers=1, num_cpus=0.5)
        assert len(lines(tmp_path, "prepared")) == 1
        assert [line.split()[0] for line in lines(tmp_path, "extracted")] == ["0", "1", "2", "4"]

    def test_a_failure_is_that_of_its_shard_and_the_others_are_extracted(self, tmp_path: Path) -> None:
        with pytest.raises(InputError) as caught:
            run_with_ray([3, 5, 0, 1, 2, 4], partial(prepare, tmp_path))
        error = caught.value
        assert (error.code, error.record, error.layer) == ("E104", "doc-7", 2)
        assert error.message == "shard 3: 'k' holds NaN; failed too: 5"
        assert done(tmp_path) == [0, 1, 2, 3, 4, 5]

    def test_a_foreign_failure_is_raised_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(LookupError, match="no such thing") as caught:
            run_with_ray([0, 5, 1], partial(prepare, tmp_path))
        assert caught.value.__notes__ == ["shard 5 on a Ray cluster"]
        assert done(tmp_path) == [0, 1, 5]

    def test_a_worker_that_dies_fails_its_shard_alone(self, tmp_path: Path) -> None:
        with pytest.raises(ConflictError, match="shard 7: the Ray worker died") as caught:
            run_with_ray([7, 0, 1, 2], partial(prepare, tmp_path), num_workers=1)
        assert caught.value.code == "E119"
        assert done(tmp_path) == [0, 1, 2, 7]
        assert len(lines(tmp_path, "prepared")) == 2

    def test_too_many_failures_begin_nothing_more(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"shard 3: .+; not begun: 2 shards"):
            run_with_ray([3, 0, 1], partial(prepare, tmp_path), num_workers=1, most_failures=1)
        assert done(tmp_path) == [3]

    def test_a_model_that_does_not_load_is_what_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="the model does not load") as caught:
            run_with_ray(range(100), partial(prepare_in_vain, tmp_path))
        assert caught.value.code == "E304"

    def test_an_interrupt_ends_the_workers(self, tmp_path: Path, cluster) -> None:
        def interrupt(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_with_ray([0, 1, 2, 4], partial(prepare, tmp_path), on_done=interrupt)
        # Their resources are free again: others can start.
        run_with_ray([8, 9], partial(prepare, tmp_path))
        assert {8, 9} <= set(done(tmp_path))

    def test_a_worker_that_fits_nowhere_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="it has 2 CPU, 0 GPU"):
            run_with_ray([0], partial(prepare, tmp_path), num_gpus=1)

    def test_no_shards_are_no_work(self, tmp_path: Path) -> None:
        run_with_ray([], partial(prepare, tmp_path))
        assert lines(tmp_path, "prepared") == []


def test_ray_is_loaded_only_when_it_is_used() -> None:
    code = "import sys, kvformat.extract.ray_engine; print({'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n"


def test_without_ray_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"pip install 'kvformat\[ray\]'") as caught:
        run_with_ray([0], lambda: print)
    assert caught.value.code == "E205"


@pytest.mark.parametrize("needs", [{"num_cpus": 0}, {"num_cpus": -1}])
def test_a_worker_needs_something(needs: dict[str, float]) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="some of num_cpus and num_gpus"):
        run_with_ray([0], lambda: print, **needs)
