"""What an earlier run staged is held from before the model is loaded: ``status`` says so, and ``clean`` leaves it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvformat
from kvformat.cli.app import app
from kvformat.errors import IdentityError
from kvformat.extract import ray_job, run
from kvformat.extract.options import RayOptions
from kvformat.extract.progress import Silent
from kvformat.extract.reasoner import load_extractor
from kvformat.testing.memory_store import MemoryStore
from tests.models import save_tiny, tiny_model, write_documents

SHARDS = 6
TIMEOUT_S = 60


class Stopping(Silent):
    """Interrupts after some records."""

    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


class Loading:
    """A model that takes until :meth:`end` to load.

    Threads load it one after the other then, and wait for each other: transformers changes a global default meanwhile.
    """

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self._one = threading.Lock()
        self.together = threading.Barrier(1)
        self._begun = threading.Semaphore(0)
        self._end = threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._begun.release()
        assert self._end.wait(TIMEOUT_S)
        with self._one:
            found = self._real(*args, **options)
        self.together.wait(TIMEOUT_S)
        return found

    def begun(self) -> None:
        assert self._begun.acquire(timeout=TIMEOUT_S)

    def end(self) -> None:
        self._end.set()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    model = save_tiny(tmp_path / "model", "llama", max_position_embeddings=64)
    lines = [{"id": f"r{n}", "token_ids": [n + 1, n + 2, n + 3]} for n in range(SHARDS)]
    documents = write_documents(tmp_path / "d.jsonl", lines)
    return {"model": model, "documents": documents, "shard_nbytes": 1, "threads": 1}


@pytest.fixture(params=["local", "remote"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "local":
        return str(tmp_path / "ds")
    store = MemoryStore("s3://bucket/sets/ds")
    monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: store)
    return store.url


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    found = Loading(load_extractor)
    for module in ("model_job", "ray_job"):
        monkeypatch.setattr(f"kvformat.extract.{module}.load_extractor", found)
    yield found
    found.end()
    assert torch.get_default_dtype() is torch.float32


def interrupted(out: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stopped after some shards."""
    with monkeypatch.context() as patch:
        patch.setattr("kvformat.extract.model_job.load_extractor", load_extractor)
        with pytest.raises(KeyboardInterrupt):
            run(**options, out=out, progress=Stopping(4))


def command(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*args], prog_name="kvformat")
    return done.exit_code, done.output


def check_held(out: str, workers: int) -> None:
    _, shown = command("status", out)
    assert "staged work, live (running, loading the model): " in shown
    for rank in range(workers):
        assert f"worker {rank} of {workers}, live: " in shown
    assert shown.count(", loading its model, ") == workers
    code, told = command("clean", "--yes", out)
    assert code == 3
    assert "E117" in told
    assert "is loading its model: wait for it to end, or stop it, and clean again" in told
    assert "nothing removed" in told


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_staged_is_held_while_the_model_is_loaded(
    out: str, options: dict[str, Any], loading: Loading, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(out, options, monkeypatch)
    _, shown = command("status", out)
    if "://" not in out:
        assert "staged work, abandoned (no writer holds it): " in shown
        assert "next: the same `kvformat extract` command goes on with it; `kvformat clean " in shown
    loading.together = threading.Barrier(workers)
    runs = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for rank in range(workers):  # one after the other: looking at a model changes the global default as well
                runs.append(pool.submit(run, **options, out=out, rank=rank, world_size=workers))
                loading.begun()
            check_held(out, workers)
        finally:
            loading.end()
        datasets = [one.result(TIMEOUT_S) for one in runs]
    assert len({dataset.id for dataset in datasets}) == 1
    _, shown = command("status", out)
    assert "no staged work" in shown


def test_a_failed_load_lets_go(tmp_path: Path, options: dict[str, Any], loading: Loading, monkeypatch: Any) -> None:
    out = str(tmp_path / "ds")
    interrupted(out, options, monkeypatch)
    monkeypatch.setattr(loading, "_real", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
    loading.end()
    with pytest.raises(MemoryError):
        run(**options, out=out)
    assert "staged work, abandoned" in command("status", out)[1]
    assert command("clean", "--yes", out)[0] == 0


class Cluster:
    """In place of Ray: one worker in this process."""

    def __call__(self, ordinals: Any, prepare: Any, *, on_done: Any, **_: Any) -> None:
        work = prepare()
        try:
            for ordinal in ordinals:
                on_done(ordinal, work([ordinal]))
        finally:
            work._worker.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:.*of another run are staged")
def test_ray_workers_load_while_the_work_of_all_runs_of_the_plan_is_held(
    tmp_path: Path, options: dict[str, Any], loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs that are staged, nobody knows yet which one is meant."""
    out = str(tmp_path / "ds")
    interrupted(out, options, monkeypatch)
    other = tmp_path / "other"
    shutil.copytree(options["model"], other)
    tiny_model("llama", seed=5, max_position_embeddings=64).save_pretrained(other)
    interrupted(out, {**options, "model": other}, monkeypatch)
    before = sorted(Path(out).glob(".staging/*/0*"))
    monkeypatch.setattr(ray_job, "run_with_ray", Cluster())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run, **options, out=out, ray=RayOptions())
        try:
            loading.begun()
            _, shown = command("status", out)
            assert shown.count("staged work, live (running, loading the model): ") == 2
            assert command("clean", "--yes", out)[0] == 3
        finally:
            loading.end()
        with pytest.raises(IdentityError, match="other work of this plan is staged"):
            found.result(TIMEOUT_S)
    assert sorted(Path(out).glob(".staging/*/0*")) == before


def test_ray_workers_publish_although_the_work_was_held(
    tmp_path: Path, options: dict[str, Any], loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "ds")
    interrupted(out, options, monkeypatch)
    loading.end()
    monkeypatch.setattr(ray_job, "run_with_ray", Cluster())
    dataset = run(**options, out=out, ray=RayOptions())
    assert not (tmp_path / "ds" / ".staging").exists()
    assert kvformat.verify(dataset.location).ok
