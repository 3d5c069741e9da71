"""Verification of object stores: the findings of the same dataset on disk, fetched once, values only where needed."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import DeniedFault, StoreFault, TransportFault, UnsupportedFault
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.memory_store import MemoryStore
from tests.conftest import REPOSITORY

VECTORS = REPOSITORY / "spec" / "vectors" / "v1"
CASES = sorted(path for path in VECTORS.glob("*/*") if (path / "dataset").is_dir())
URL = "memory://bucket/sets"


def stored(path: Path) -> MemoryStore | None:
    """A directory as objects; None where it holds what an object store cannot."""
    entries = [entry for entry in path.rglob("*") if entry.is_symlink() or not entry.is_dir()]
    if any(entry.is_symlink() or not entry.is_file() for entry in entries):
        return None
    return MemoryStore(URL, {entry.relative_to(path).as_posix(): entry.read_bytes() for entry in entries})


def remote(store: Any) -> Remote:
    return Remote(URL, connect=lambda *_args, **_options: store)


def found(report: kvformat.Report, base: str) -> list[tuple[object, ...]]:
    """Everything but messages, which name files and objects."""
    kept = []
    for one in (*report.findings, *report.warnings):
        assert one.path is None or one.path.startswith(base)
        kept.append((one.code, (one.path or base)[len(base) :].lstrip("/"), one.record, one.layer))
    return kept


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_findings_are_those_of_the_same_files(case: Path) -> None:
    path = case / "dataset"
    store = stored(path)
    if store is None:
        pytest.skip("an object store holds objects only")
    options = {}
    if (case / "open.json").exists():
        options = json.loads((case / "open.json").read_text(encoding="ascii"))
    for level in (1, 2, 3, 4):
        local = kvformat.verify(path, level=level, **options)
        away = kvformat.verify(remote(store), level=level, **options)
        assert found(away, URL) == found(local, str(path))
        assert (away.ok, away.id, away.level, away.records, away.nbytes) == (
            local.ok,
            local.id,
            local.level,
            local.records,
            local.nbytes,
        )


def test_many_faults_in_many_places(base, tmp_path: Path) -> None:
    files: DatasetFiles = base("several-shards")
    files.tensor(0, "k")[0] ^= 1
    files.tensor(1, "token_ids")[0] ^= 1
    files.tensor(3, "pad")[-1] ^= 1
    files.tensor(4, "sums")[0] ^= 1
    files.shards[2][300] ^= 1
    path = tmp_path / "dataset"
    files.save(path)
    (path / "stray").write_bytes(b"x")
    (path / ".staging").mkdir()
    (path / ".staging" / "left").write_bytes(b"x")
    store = stored(path)
    for level in (1, 2, 3, 4):
        for threads in (1, 3, None):
            report = kvformat.verify(remote(store), level=level, threads=threads)
            local = kvformat.verify(path, level=level)
            assert found(report, URL) == found(local, str(path))
            assert [one.message for one in report.findings] == [one.message for one in local.findings]
    assert len(report.findings) == 8
    assert [warning.code for warning in report.warnings] == ["W001", "W002"]


@pytest.mark.parametrize("level", [2, 3, 4])
def test_bytes_beyond_the_end_are_found(level: int, saved) -> None:
    store = stored(saved("model-context"))
    assert store is not None
    for name in [name for name in store.objects if name != "kvformat.json"]:
        whole = store.objects[name]
        store.objects[name] = whole + b"\0"
        report = kvformat.verify(remote(store), level=level)
        assert [(one.code, one.path) for one in report.findings] == [("E005", f"{URL}/{name}")]
        store.objects[name] = whole


class Watched(MemoryStore):
    """Counts what is asked for, flips a bit of the first answers for a name, and fails for others."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(URL, objects)
        self.nbytes: Counter[str] = Counter()
        self.flips: Counter[str] = Counter()
        self.faults: dict[str, StoreFault] = {}
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float):
        with self.lock:
            self.asked[name] += 1
            self.nbytes[name] += nbytes
            flip = self.flips[name] > 0
            self.flips[name] -= flip
        if name in self.faults:
            raise self.faults[name]
        data = bytearray(super().get(name, start, nbytes, timeout_s=timeout_s))
        data[-1] ^= flip
        return data

    def list(self, prefix: str = "", *, timeout_s: float):
        if "" in self.faults:
            raise self.faults[""]
        return super().list(prefix, timeout_s=timeout_s)


@pytest.fixture
def watched(saved) -> Watched:
    store = stored(saved("several-shards"))
    assert store is not None
    return Watched(store.objects)


def shards_of(store: MemoryStore) -> dict[str, int]:
    return {name: len(data) for name, data in store.objects.items() if name.startswith("shards/")}


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_values_are_fetched_once_or_not_at_all(level: int, watched: Watched) -> None:
    header = json.loads(next(data for name, data in watched.objects.items() if name.startswith("manifest/")))
    assert kvformat.verify(remote(watched), level=level).ok
    for name, size in shards_of(watched).items():
        assert watched.nbytes[name] == (0, header["header_size"], size, size)[level - 1]


@pytest.mark.parametrize("level", [3, 4])
def test_what_was_damaged_on_the_way_is_no_fault_of_the_store(level: int, watched: Watched) -> None:
    calls: list[tuple[int, int]] = []
    flipped = {name: 1 for name in watched.objects if not name.startswith(("manifest/", "kvformat"))}
    watched.flips.update(flipped)
    report = kvformat.verify(remote(watched), level=level, progress=lambda *call: calls.append(call))
    # Level 3 looks at sums, and at no padding.
    assert report.ok
    assert watched.flips.total() == 0
    done = [each for each, _ in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]
    if level == 4:
        for name, size in shards_of(watched).items():
            assert watched.nbytes[name] == 2 * size
            watched.flips[name] = 2
        report = kvformat.verify(remote(watched), level=level)
        assert {finding.code for finding in report.findings} >= {"E077"}
        assert {finding.path for finding in report.findings} == {f"{URL}/{name}" for name in shards_of(watched)}


@pytest.mark.parametrize("fault", [UnsupportedFault("no listing"), DeniedFault("not for you")])
def test_a_store_that_does_not_list_is_verified_all_the_same(fault: StoreFault, watched: Watched) -> None:
    watched.faults[""] = fault
    report = kvformat.verify(remote(watched))
    assert report.ok
    (warning,) = report.warnings
    assert (warning.code, warning.path) == ("W001", URL)
    assert warning.message.startswith("files the dataset does not name were not looked for: ")
    watched.objects.pop(next(name for name in watched.objects if name.startswith("shards/")))
    assert [finding.code for finding in kvformat.verify(remote(watched)).findings] == ["E002"]


def test_a_store_that_is_gone_is_not_waited_for_again_and_again(watched: Watched) -> None:
    now = [0.0]
    first, *others = sorted(shards_of(watched))
    watched.faults[first] = TransportFault("gone")
    gone = Remote(
        URL,
        connect=lambda *_args, **_options: watched,
        options=RemoteOptions(deadline_s=5.0, attempt_timeout_s=1.0),
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    report = kvformat.verify(gone, threads=1)
    assert [(finding.code, finding.path) for finding in report.findings] == [("E208", f"{URL}/{first}")]
    assert watched.asked[first] > 1
    assert [watched.asked[name] for name in others] == [0] * len(others)
    assert ("list", "") not in watched.calls
