"""Extraction straight to an object store."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvformat
from kvformat.cli.app import app
from kvformat.errors import IdentityError, StorageError
from kvformat.extract import estimate, run
from kvformat.storage.store import DeniedFault
from kvformat.testing.memory_store import MemoryStore
from tests.models import save_tiny, write_documents

SHARD = 12 << 10
URL = "s3://bucket/sets/ds"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", max_position_embeddings=256)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    words = ["aa", "bb", "a longer text", "cc", "aa", "dd", "ee", "ff", "the longest text of them all", "gg", "bb"]
    return write_documents(tmp_path / "docs.jsonl", [{"id": f"d{i:02}", "text": word} for i, word in enumerate(words)])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore(URL)
    monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: made)
    return made


@pytest.fixture(autouse=True)
def spool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvformat" / "spool"


class Watcher:
    """Counts records, and interrupts after some computed ones."""

    def __init__(self, *, interrupt_after: int | None = None) -> None:
        self.computed: list[bool] = []
        self.phases: list[str] = []
        self._interrupt_after = interrupt_after

    def phase(self, name: str, *, tokens: int = 0, nbytes: int = 0) -> None:
        self.phases.append(name)

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        self.computed.append(computed)
        if sum(self.computed) == self._interrupt_after:
            raise KeyboardInterrupt

    def elsewhere(self, *, nbytes: int) -> None:
        raise AssertionError("there are no other workers")

    def times(self, times: Any) -> None:
        self.spent = times


def receipts(store: MemoryStore) -> list[str]:
    return [name for name in store.objects if re.fullmatch(r"\.staging/[0-9a-f]{16}/[0-9]{8}\.json", name)]


def test_the_dataset_is_that_of_a_local_run(model: Path, documents: Path, store, spool: Path, tmp_path: Path) -> None:
    local = run(model=model, documents=documents, out=tmp_path / "ds", shard_nbytes=SHARD)
    dataset = run(model=model, documents=documents, out=URL, shard_nbytes=SHARD)
    assert (dataset.id, dataset.location) == (local.id, URL)
    assert kvformat.verify(URL).ok
    assert [record.names for record in dataset] == [record.names for record in local]
    assert not [name for name in store.objects if name.startswith(".staging")]
    assert list(spool.iterdir()) == []


def test_a_finished_dataset_is_returned_and_another_refused(
    model: Path, documents: Path, store, tmp_path: Path
) -> None:
    first = run(model=model, documents=documents, out=URL)
    watcher = Watcher()
    before = dict(store.objects)
    assert run(model=model, documents=documents, out=URL, progress=watcher).id == first.id
    assert (watcher.phases, watcher.computed) == (["read", "load"], [])
    other = write_documents(tmp_path / "other.jsonl", [{"id": "x", "text": "x"}])
    with pytest.raises(IdentityError) as caught:
        run(model=model, documents=other, out=URL)
    assert (caught.value.code, caught.value.path) == ("E118", URL)
    assert store.objects == before


@pytest.mark.parametrize("after", [1, 5, 8])
def test_an_interrupted_run_resumes_with_another_spool(
    model: Path, documents: Path, store, spool: Path, tmp_path: Path, after: int
) -> None:
    arguments: dict[str, Any] = {"model": model, "documents": documents, "shard_nbytes": SHARD}
    expected = run(**arguments, out=tmp_path / "local").id
    with pytest.raises(KeyboardInterrupt):
        run(**arguments, out=URL, progress=Watcher(interrupt_after=after))
    kept = len(receipts(store))
    assert "kvformat.json" not in store.objects
    assert list(spool.iterdir()) == []
    watcher = Watcher()
    resumed = run(**arguments, out=URL, progress=watcher, spool=tmp_path / "another")
    assert resumed.id == expected
    assert watcher.computed.count(False) == kept  # told by the shard
    assert (watcher.computed.count(True) == 9) == (kept == 0)
    assert kvformat.verify(URL).ok
    assert not [name for name in store.objects if name.startswith(".staging")]


class ReadOnly(MemoryStore):
    def create(self, name: str, data: Any, *, timeout_s: float) -> None:
        raise DeniedFault(name)


class Replacing(MemoryStore):
    def create(self, name: str, data: Any, *, timeout_s: float) -> None:
        self.put(name, data, timeout_s=timeout_s)


@pytest.mark.parametrize(("kind", "code"), [(ReadOnly, "E207"), (Replacing, "E209")])
def test_a_store_that_will_not_do_is_refused_before_anything_is_read(monkeypatch, kind, code: str, tmp_path) -> None:
    monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: kind())
    with pytest.raises(StorageError) as caught:
        run(model=tmp_path / "no model", documents=tmp_path / "no documents", out=URL)
    assert caught.value.code == code


def test_an_estimate_is_of_the_spool_and_writes_nothing(model: Path, documents: Path, store, monkeypatch) -> None:
    found = estimate(model=model, documents=documents, out=URL, shard_nbytes=SHARD)
    assert found.shards > 4
    assert found.spool_nbytes == found.needed_nbytes
    assert found.needed_nbytes < found.nbytes
    assert store.objects == {}
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=found.needed_nbytes - 1))
    with pytest.raises(StorageError, match="another spool") as caught:
        run(model=model, documents=documents, out=URL, shard_nbytes=SHARD)
    assert caught.value.code == "E200"


def command(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="kvformat")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_on_the_command_line(model: Path, documents: Path, store, spool: Path, monkeypatch) -> None:
    arguments = ["extract", "--model", model, "--documents", documents, "--out", URL, "--shard-size", SHARD]
    real = kvformat.extract.run

    def interrupted(**options: Any) -> Any:
        return real(**{**options, "progress": Watcher(interrupt_after=8)})

    monkeypatch.setattr(kvformat.extract, "run", interrupted)
    code, _, errors = command(*arguments)
    assert code == 130
    assert f"shards wait for their upload in {spool}\n" in errors
    kept = "finished shards are kept" if receipts(store) else "no shard was finished"
    assert kept in errors
    monkeypatch.setattr(kvformat.extract, "run", real)
    code, output, _ = command(*arguments, "--spool", spool.parent / "named")
    assert code == 0
    assert f"published: {URL}\n" in output
    code, output, _ = command(*arguments)
    assert code == 0
    assert output.startswith(f"already finished, with equal plan and context: {URL}\n")
