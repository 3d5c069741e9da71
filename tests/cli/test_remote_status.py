"""``status`` and ``clean`` of a URL: what is published, kept for runs that resume, and spooled on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.storage.lease import DirectoryLease
from kvformat.storage.store import DeniedFault
from kvformat.testing.memory_store import MemoryStore
from tests.cli.datasets import SCHEMA, StopError, add, write

URL = "s3://bucket/sets/ds"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore(URL)
    monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: made)
    return made


@pytest.fixture
def spool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The default one, in a home of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvformat" / "spool"


def resumable(url: str = URL, **options: Any) -> kvformat.Writer:
    """One record a shard."""
    settings = {"shard_nbytes": 4096, "shard_slots": 4, "resume": True, "tag": "[bold]tag", **options}
    return kvformat.create(url, schema=SCHEMA, context=kvformat.Context.unknown(), **settings)


def interrupt(url: str = URL, *, records: int = 3, **options: Any) -> str:
    """A writer that stops after so many records; digest of its plan."""
    with pytest.raises(StopError), resumable(url, **options) as writer:
        for number in range(records):
            add(writer, f"clip-{number}", tokens=8, seed=number)
        raise StopError
    return writer._plan.digest


def one_shard(writer: kvformat.Writer) -> None:
    """A shard that has arrived, and one in work."""
    for number in range(2):
        add(writer, f"clip-{number}", tokens=8, seed=number)
    for one in list(writer._shards._finisher._waiting):
        one.result(60)


def left_behind(base: Path, plan: str, url: str = URL) -> Path:
    """A spool as a killed writer leaves it."""
    from kvformat.write.spool_places import url_digest

    path = base / f"{url_digest(url)}-{plan}-{'c' * 8}"
    path.mkdir(parents=True)
    (path / "00000003.shard").write_bytes(b"123")
    return path


@pytest.fixture
def live(spool: Path) -> Iterator[DirectoryLease]:
    """Somebody at work on this machine, of a plan nothing is kept of."""
    lease = DirectoryLease.take(left_behind(spool, "d" * 16))
    assert lease is not None
    yield lease
    lease.release()


# --------------------------------------------------------------------------------------------------------------- statu


def test_a_published_dataset(run, store: MemoryStore, spool: Path, tmp_path: Path) -> None:
    dataset = kvformat.open(write(tmp_path / "local"))
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file():
            store.objects[path.relative_to(tmp_path / "local").as_posix()] = path.read_bytes()
    before = dict(store.objects)
    found = run("status", URL + "/", "--json").json
    assert found["published"] == {
        "id": dataset.id,
        "records": 4,
        "nbytes": dataset.nbytes,
        "shards": dataset.manifest.totals.shards,
    }
    assert (found["ok"], found["location"], found["staging"], found["orphans"]) == (True, URL, [], [])
    assert (found["unknown_staging"], found["spools"], found["data_without_root"]) == ([], [], False)
    shown = run("status", URL)
    assert (shown.code, shown.stderr) == (0, "")
    assert f"id {dataset.id}" in shown.stdout
    store.objects["shards/00000/00000009-0123456789abcdef.safetensors"] = b"12345"
    store.objects["notes"] = b"1"
    assert [one["path"] for one in run("status", URL, "--json").json["orphans"]] == [
        "notes",
        "shards/00000/00000009-0123456789abcdef.safetensors",
    ]
    assert "2 files the dataset does not name, 6 bytes:" in run("status", URL).stdout
    assert {name: store.objects[name] for name in before} == before


def test_work_that_a_run_would_resume(run, store: MemoryStore, spool: Path) -> None:
    digest = interrupt()
    store.objects["shards/00000/00000007-0123456789abcdef.safetensors"] = b"12345"
    store.objects[".staging/notes"] = b""
    store.objects[f".staging/probe-{'0' * 32}"] = b""
    before = dict(store.objects)
    found = run("status", URL, "--json").json
    (work,) = found["staging"]
    assert (work["path"], work["state"]) == (f"{URL}/.staging/{digest}", "unknown")
    assert (work["shards"], work["records"]) == (2, 2)
    shards = [len(data) for name, data in before.items() if name.startswith("shards/") and "/00000007-" not in name]
    assert work["nbytes"] == sum(shards)
    assert work["total_nbytes"] == sum(shards) + sum(
        len(data) for name, data in before.items() if name.startswith(f".staging/{digest}/")
    )
    assert work["plan"]["tag"] == "[bold]tag"
    assert (found["published"], found["data_without_root"]) == (None, False)
    assert found["orphans"] == [{"path": "shards/00000/00000007-0123456789abcdef.safetensors", "nbytes": 5}]
    assert found["unknown_staging"] == [f"{URL}/.staging/probe-{'0' * 32}", f"{URL}/.staging/notes"]
    shown = run("status", URL)
    assert shown.code == 0
    assert f"staged work, unknown (no leases here): {URL}/.staging/{digest}\n" in shown.stdout
    assert "finished: 2 shards, 2 records" in shown.stdout
    assert "tag: [bold]tag\n" in shown.stdout
    assert store.objects == before


def test_a_damaged_receipt_counts_for_nothing(run, store: MemoryStore, spool: Path) -> None:
    digest = interrupt()
    store.objects[f".staging/{digest}/00000000.json"] = b"{"
    store.objects[f".staging/{digest}/plan.json"] = b"{"
    (work,) = run("status", URL, "--json").json["staging"]
    assert (work["plan"], work["shards"]) == (None, 1)
    assert "plan: not readable" in run("status", URL).stdout


def test_a_writer_of_this_machine_shows_by_its_spool(run, store: MemoryStore, spool: Path) -> None:
    with resumable() as writer:
        one_shard(writer)
        found = run("status", URL, "--json").json
        (work,) = found["staging"]
        (spooled,) = found["spools"]
        assert (work["state"], spooled["state"], spooled["plan"]) == ("live", "live", writer._plan.digest)
        assert spooled["path"] == str(writer._staging.path)
        assert (work["shards"], spooled["files"]) == (1, 1)
    assert run("status", URL, "--json").json["spools"] == []


def test_what_a_killed_writer_left_on_this_machine(run, store: MemoryStore, spool: Path, tmp_path: Path) -> None:
    path = left_behind(spool, "a" * 16)
    left_behind(spool, "a" * 16, "s3://bucket/other")
    found = run("status", URL, "--json").json
    assert found["spools"] == [
        {"path": str(path), "plan": "a" * 16, "files": 1, "nbytes": 3, "state": "abandoned"},
    ]
    shown = run("status", URL)
    assert f"spool, abandoned (no writer holds it): {path}, 1 file, 3 bytes\n" in shown.stdout
    elsewhere = left_behind(tmp_path / "elsewhere", "a" * 16)
    found = run("status", URL, "--json", "--spool", tmp_path / "elsewhere").json
    assert [one["path"] for one in found["spools"]] == [str(elsewhere)]
    assert path.exists()


def test_data_without_a_root(run, store: MemoryStore, spool: Path) -> None:
    store.objects["shards/00000/00000000-0123456789abcdef.safetensors"] = b"12345"
    store.objects["mine"] = b"1"
    found = run("status", URL, "--json").json
    assert found["data_without_root"]
    assert [one["path"] for one in found["orphans"]] == ["shards/00000/00000000-0123456789abcdef.safetensors"]
    assert "not published: data lie here without kvformat.json, " in run("status", URL).stdout


def test_a_root_that_cannot_be_read(run, store: MemoryStore, spool: Path) -> None:
    store.objects["kvformat.json"] = b"{"
    result = run("status", URL, "--json")
    assert (result.code, result.json["ok"], result.json["published"]) == (1, False, None)
    assert result.json["orphans"] is None


def test_nothing_at_all(run, store: MemoryStore, spool: Path) -> None:
    result = run("status", URL)
    assert (result.code, result.stdout) == (3, "")
    assert "E001" in result.stderr


# ---------------------------------------------------------------------------------------------------------------- clea


@pytest.mark.parametrize(("args", "answer"), [(["--yes"], None), ([], "y\n")])
def test_receipts_go_and_no_shard(run, store: MemoryStore, spool: Path, args: list[str], answer: str | None) -> None:
    interrupt()
    store.objects[f".staging/probe-{'0' * 32}"] = b"1"
    store.objects[".staging/notes"] = b"mine"
    before = dict(store.objects)
    removed = {name: data for name, data in before.items() if name.startswith(".staging/") and "notes" not in name}
    result = run("clean", URL, *args, input=answer)
    freed = sum(map(len, removed.values()))
    assert (result.code, result.stdout) == (0, f"removed 4 objects, {freed:,} bytes freed in the store\n")
    assert store.objects == {name: data for name, data in before.items() if name not in removed}
    assert result.stderr.splitlines()[-1] == f"not of a writer, left alone: {URL}/.staging/notes"
    assert ("make sure no writer is at work on any machine" in result.stderr) == (answer is not None)
    with resumable() as writer:
        assert writer._replay.num_shards == 0
        add(writer, "clip-0", tokens=8, seed=5)


def test_a_thousand_foreign_objects_are_not_a_thousand_lines(run, store: MemoryStore, spool: Path) -> None:
    store.objects.update({f".staging/notes-{number:04d}": b"mine" for number in range(1020)})
    result = run("clean", URL, "--yes")
    assert result.code == 0
    assert len(store.objects) == 1020
    lines = result.stderr.splitlines()
    assert (len(lines), lines[-1]) == (21, "and 1,000 more: `kvformat status` names them")


@pytest.mark.parametrize("answer", ["n\n", "", "yep\n"])
def test_any_other_answer_removes_nothing(run, store: MemoryStore, spool: Path, answer: str) -> None:
    plan = interrupt()
    path = left_behind(spool, plan)
    before = dict(store.objects)
    result = run("clean", URL, input=answer)
    assert result.code == (0 if answer else 2)
    assert result.stdout == ("nothing removed, 0 bytes freed\n" if answer else "")
    assert store.objects == before
    assert path.exists()
    lease = DirectoryLease.take(path)
    assert lease is not None  # given back
    lease.release()


def test_a_clean_that_is_cut_short_leaves_what_a_run_can_resume(run, monkeypatch, store: MemoryStore, spool) -> None:
    interrupt(records=4)
    delete = store.delete
    left = [2]

    def refuse(name: str, *, timeout_s: float) -> None:
        if not left[0]:
            raise DeniedFault(name)
        left[0] -= 1
        delete(name, timeout_s=timeout_s)

    monkeypatch.setattr(store, "delete", refuse)
    result = run("clean", URL, "--yes")
    assert (result.code, result.stdout) == (3, "")
    assert "E207" in result.stderr
    monkeypatch.setattr(store, "delete", delete)
    with resumable() as writer:
        assert writer._replay.num_shards == 1
        for number in range(4):
            add(writer, f"clip-{number}", tokens=8, seed=number)
    assert kvformat.verify(URL).ok


def test_spools_of_killed_writers_go(run, store: MemoryStore, spool: Path, tmp_path: Path) -> None:
    gone = left_behind(spool, "a" * 16)
    other = left_behind(spool, "a" * 16, "s3://bucket/other")
    result = run("clean", URL, "--yes")
    assert (result.code, result.stdout) == (0, "removed 1 spool directory, 3 bytes freed on this machine\n")
    assert not gone.exists()
    assert other.exists()
    assert run("clean", URL) == (0, "no staged work, 0 bytes freed\n", "")


@pytest.mark.usefixtures("live")
def test_a_live_writer_is_left_alone(run, store: MemoryStore, spool: Path) -> None:
    """Its own plan, that is: what other plans left goes."""
    alone = run("clean", URL, "--yes")
    assert (alone.code, alone.stdout) == (3, "nothing removed, 0 bytes freed\n")
    assert alone.stderr.startswith("error [E117]: ")
    interrupt(tag="another")
    with resumable() as writer:
        one_shard(writer)
        both = run("clean", URL, "--yes")
        assert (both.code, both.stdout.splitlines()[0].partition(",")[0]) == (3, "removed 3 objects")
        assert [name for name in store.objects if name.startswith(".staging/")] == [
            f".staging/{writer._plan.digest}/plan.json",
            f".staging/{writer._plan.digest}/00000000.json",
        ]
    assert kvformat.verify(URL).ok
