"""Commands on datasets in object stores: what they print of the same dataset on disk, in few requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.storage.store import DeniedFault
from kvformat.testing.memory_store import MemoryStore
from tests.cli.datasets import flip, write

URL = "s3://bucket/sets/dataset"


class Bucket:
    """Stores by URL, and the options they were asked for with."""

    def __init__(self) -> None:
        self.stores: dict[str, MemoryStore] = {}
        self.options: list[tuple[str, Any]] = []

    def connect(self, url: str, options: Any, _remote_options: Any) -> MemoryStore:
        self.options.append((url, options))
        return self.at(url)

    def at(self, url: str) -> MemoryStore:
        return self.stores.setdefault(url, MemoryStore(url))

    def hold(self, path: Path, url: str = URL) -> MemoryStore:
        store = self.at(url)
        store.objects = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        return store


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket()
    monkeypatch.setattr("kvformat.storage.connect.connect", made.connect)
    return made


def relocated(value: Any, old: str, new: str) -> Any:
    """JSON with one location in place of another."""
    if isinstance(value, dict):
        return {name: relocated(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [relocated(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value


@pytest.mark.parametrize(
    "args",
    [
        ["inspect"],
        ["inspect", "--record", "clip-1"],
        ["inspect", "--number", "3", "--values"],
        ["verify"],
        ["verify", "--level", "2"],
        ["verify", "--expected-id", "0" * 64],
    ],
    ids=" ".join,
)
def test_a_url_is_shown_as_the_directory(
    args: list[str], run: Callable[..., Any], bucket: Bucket, published: Path
) -> None:
    bucket.hold(published)
    name, *more = args
    local, away = run(name, published, *more, "--json"), run(name, URL, *more, "--json")
    assert (away.code, away.stderr) == (local.code, local.stderr)
    assert away.json == relocated(local.json, str(published), URL)
    assert run(name, URL, *more).stdout == run(name, published, *more).stdout.replace(str(published), URL)


def test_inspect_reads_what_it_shows_once_and_lists_nothing(run, bucket: Bucket, published: Path) -> None:
    store = bucket.hold(published)
    assert run("inspect", URL, "--json").code == 0
    assert {call for call, _ in store.calls} == {"get_all", "get", "stat"}
    manifest = kvformat.open(published).manifest
    parts = [part.sha256 for table in ("shards", "rows") for part in manifest.parts(table)]
    wanted = {"kvformat.json", *(n for n in store.objects if n.startswith("manifest/"))}
    wanted |= {f"index/{sha256}.safetensors" for sha256 in parts}
    assert Counter(name for call, name in store.calls if call != "stat") == dict.fromkeys(wanted, 1)


def test_verify_lists_once_and_moves_values_only_where_it_must(run, bucket: Bucket, published: Path) -> None:
    store = bucket.hold(published)
    dataset = kvformat.open(published)
    shards = {dataset.index.shard(number).path: dataset.index.shard(number).size for number in range(3)}
    read: Counter[str] = Counter()
    get = store.get

    def counting(name: str, start: int, nbytes: int, *, timeout_s: float):
        read[name] += nbytes
        return get(name, start, nbytes, timeout_s=timeout_s)

    store.get = counting  # type: ignore[method-assign]
    for level, calls, moved in (
        (1, {"get_all", "stat"}, 0),
        (2, {"get_all", "get", "stat", "list"}, dataset.manifest.header_size),
        (3, {"get_all", "get", "stat", "list"}, None),
        (4, {"get_all", "get", "stat", "list"}, None),
    ):
        store.calls.clear()
        read.clear()
        assert run("verify", URL, "--level", level).code == 0
        assert {call for call, _ in store.calls} == calls
        assert sum(call == "list" for call, _ in store.calls) == (level > 1)
        for name, size in shards.items():
            assert read[name] == (size if moved is None else moved)


def test_faults_of_a_url_are_found(run, bucket: Bucket, dataset: Path) -> None:
    flip(next((dataset / "shards").rglob("00000001-*")), 4096 + 100)
    bucket.hold(dataset).objects["stray"] = b"x"
    result = run("verify", URL, "--json")
    local = run("verify", dataset, "--json")
    assert result.code == 1
    assert result.json["findings"] == relocated(local.json["findings"], str(dataset), URL)
    assert [(w["code"], w["path"]) for w in result.json["warnings"]] == [("W001", f"{URL}/stray")]


def test_diff_compares_urls_and_directories(run, bucket: Bucket, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", values=50, files={"notes": b"1"})
    bucket.hold(other)
    local, away = run("diff", published, other, "--json"), run("diff", published, URL, "--json")
    assert (away.code, away.json) == (1, relocated(local.json, str(other), URL))
    assert run("diff", URL, URL).code == 0
    assert "list" not in {call for call, _ in bucket.at(URL).calls}


def test_copies_there_and_back(run, bucket: Bucket, published: Path, tmp_path: Path, snapshot, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    second = "s3://other/copy"
    options = ["--storage-option", "endpoint_url=http://h", "--storage-option", 'client_kwargs={"a": 1}']
    assert run("copy", published, URL, *options).code == 0
    result = run("copy", URL, second, *options, "--source-option", "key=1", "--target-option", "key=two", "--json")
    assert (result.code, result.json["location"]) == (0, second)
    assert run("copy", second, tmp_path / "back").code == 0
    assert snapshot(tmp_path / "back") == bucket.at(URL).objects == snapshot(published)
    both = {"endpoint_url": "http://h", "client_kwargs": {"a": 1}}
    assert bucket.options == [(URL, both), (URL, {**both, "key": 1}), (second, {**both, "key": "two"}), (second, {})]


@pytest.mark.parametrize("name", ["inspect", "verify", "diff"])
def test_storage_options_reach_the_store(name: str, run, bucket: Bucket, published: Path) -> None:
    bucket.hold(published)
    other = [published] if name == "diff" else []
    assert run(name, *other, URL, "--storage-option", "secret=hush", "--storage-option", "anon=false").code == 0
    assert bucket.options == [(URL, {"secret": "hush", "anon": False})]


@pytest.mark.parametrize("name", ["inspect", "verify", "diff", "copy"])
def test_nothing_at_a_url(name: str, run, bucket: Bucket, tmp_path: Path) -> None:
    more = [tmp_path / "copy"] if name == "copy" else [URL] if name == "diff" else []
    result = run(name, URL, *more, "--storage-option", "secret=hush", "--json")
    assert (result.code, result.json["error"]["code"]) == (3, "E001")
    assert result.json["error"]["path"] == f"{URL}/kvformat.json"
    assert "hush" not in result.stdout + result.stderr


@pytest.mark.parametrize("name", ["inspect", "verify", "diff", "copy"])
def test_a_location_of_no_kind(name: str, run, tmp_path: Path) -> None:
    more = [tmp_path / "copy"] if name in ("copy", "diff") else []
    result = run(name, "nonsense://bucket/dataset", *more)
    assert (result.code, result.stdout) == (2, "")
    assert "error [E206]: " in result.stderr


def test_a_store_in_the_way_is_no_fault_of_the_dataset(run, bucket: Bucket, published: Path) -> None:
    def deny(_name: str, **_options: Any) -> Any:
        raise DeniedFault("no")

    bucket.hold(published).get_all = deny  # type: ignore[method-assign]
    for name in ("inspect", "verify", "copy"):
        result = run(name, URL, *([published] if name == "copy" else []))
        assert result.code == 3
        assert "[E207]" in result.stdout + result.stderr
