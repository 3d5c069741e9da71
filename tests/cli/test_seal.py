"""``kvformat seal``: publishes what workers of a plan finished, without their model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kvformat
from kvformat.cli.group import EXIT_CODES, Commands
from kvformat.cli.seal import seal
from kvformat.storage.remote import Remote
from kvformat.testing.memory_store import MemoryStore
from kvformat.write.attach import attach_workshop
from kvformat.write.opening import find_runs
from kvformat.write.sealing import seal as publish
from tests.cli.datasets import Result
from tests.cli.sharing import make, opened, saved_plan

URL = "s3://bucket/sets/ds"


@pytest.fixture
def run() -> Any:
    """The command within a command line of its own."""
    app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(epilog=EXIT_CODES)(seal)
    app.callback()(lambda: None)

    def invoke(*args: object) -> Result:
        done = CliRunner().invoke(app, ["seal", *(str(arg) for arg in args)], prog_name="kvformat")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    return invoke


@pytest.fixture(params=["local", "remote"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path | Remote]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "local":
        yield tmp_path / "ds"
        return
    store = MemoryStore(URL)
    monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: store)
    remote = Remote(URL)
    yield remote
    remote.close()


def name_of(target: Path | Remote) -> str:
    return target.url if isinstance(target, Remote) else str(target)


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    return saved_plan(tmp_path / "plan")


def test_it_publishes_and_cleans_up(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4))
    result = run(name_of(target), "--plan", tmp_path / "plan", "--json")
    dataset = kvformat.open(name_of(target))
    assert (result.code, result.stderr) == (0, "")
    assert result.json == {
        "ok": True,
        "location": name_of(target),
        "id": dataset.id,
        "records": 7,
        "names": 7,
        "tokens": sum(range(5, 12)),
        "shards": 4,
        "nbytes": dataset.nbytes,
        "skipped": 0,
    }
    report = kvformat.verify(name_of(target))
    assert (report.ok, report.findings, report.warnings) == (True, (), ())
    assert run(name_of(target), "--plan", tmp_path / "plan", "--json") == result
    saved_plan(tmp_path / "other", first_id=1)
    saved_plan(tmp_path / "longer", num_records=8)
    for other in ("other", "longer"):
        refused = run(name_of(target), "--plan", tmp_path / other)
        assert (refused.code, refused.stdout) == (3, "")
        assert refused.stderr.startswith("error [E118]: ")


def test_a_damaged_shard_is_not_published(run: Any, plan: Any, tmp_path: Path) -> None:
    with opened(tmp_path / "ds", plan) as workshop:
        make(workshop, plan, *range(4))
    shard = next((tmp_path / "ds").glob(".staging/*/00000002-*.shard"))
    data = bytearray(shard.read_bytes())
    data[-4100] ^= 1
    shard.write_bytes(data)
    refused = run(tmp_path / "ds", "--plan", tmp_path / "plan")
    assert (refused.code, refused.stdout) == (3, "")
    assert "W006" in refused.stderr
    assert "E119" in refused.stderr
    with opened(tmp_path / "ds", plan) as workshop:
        assert workshop.finished() == {0, 1, 3}
        make(workshop, plan, 2)
    assert run(tmp_path / "ds", "--plan", tmp_path / "plan").code == 0
    assert kvformat.verify(tmp_path / "ds").ok


def test_work_that_its_publisher_left_is_removed_by_the_next(
    run: Any, target: Path | Remote, plan: Any, tmp_path: Path
) -> None:
    """Just that which is published: of another run it is nobody's but `kvformat clean`'s."""
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4))
        publish(workshop, plan)
    assert len(find_runs(target)) == 1
    first = run(name_of(target), "--plan", tmp_path / "plan", "--json")
    assert (first.code, find_runs(target)) == (0, [])
    with opened(target, plan, tag="other", published=True) as workshop:
        make(workshop, plan, 1, 2)
    assert run(name_of(target), "--plan", tmp_path / "plan", "--json") == first
    with opened(target, plan, tag="other", published=True) as workshop:
        assert workshop.finished() == {1, 2}


def test_published_by_its_workers_meanwhile(
    run: Any, target: Path | Remote, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took what was staged away between one look and the next."""
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4))

        def attach(*_: Any, **__: Any) -> Any:
            publish(workshop, plan)
            workshop.remove()
            monkeypatch.undo()
            if isinstance(target, Remote):
                monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: target.store)
            return attach_workshop(target, plan, spool=tmp_path / "spool")

        monkeypatch.setattr("kvformat.write.attach.attach_workshop", attach)
        result = run(name_of(target), "--plan", tmp_path / "plan", "--json")
    assert (result.code, result.json["id"]) == (0, kvformat.open(name_of(target)).id)


def test_a_shard_without_records(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4), skip=(2, 3))
    for options in ((), ("--allow-skips",)):
        refused = run(name_of(target), "--plan", tmp_path / "plan", *options)
        assert (refused.code, refused.stdout) == (3, "")
        assert refused.stderr.startswith("error [E119]: 1 shard holds no record, as all of their documents were")
        assert "1, with 'clip-2' ([red]odd); 'clip-3' ([red]odd); " in refused.stderr


def test_workers_are_at_work(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    with opened(target, plan) as workshop:
        make(workshop, plan, 0)
        refused = run(name_of(target), "--plan", tmp_path / "plan")
        assert "missing, with 5 records: 1, 2, 3; 1 worker is at work on them: wait" in refused.stderr
        assert workshop.finished() == {0}


def test_people_read_it_too(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4), skip=(2,))
    refused = run(name_of(target), "--plan", tmp_path / "plan")
    assert (refused.code, refused.stdout) == (3, "")
    assert refused.stderr.startswith("error [E119]: 1 names are of documents that were skipped: 'clip-2' ([red]odd)")
    result = run(name_of(target), "--plan", tmp_path / "plan", "--allow-skips")
    dataset = kvformat.open(name_of(target))
    assert result.code == 0
    assert result.stdout.splitlines()[:2] == [f"published: {name_of(target)}", f"    id {dataset.id}"]
    assert result.stdout.splitlines()[2].startswith("    6 records in 4 shards, ")
    assert result.stdout.splitlines()[3] == "    1 input skipped; the manifest lists them"


def test_what_is_missing_is_said(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    with opened(target, plan) as workshop:
        make(workshop, plan, 0, 3)
    result = run(name_of(target), "--plan", tmp_path / "plan", "--json")
    assert (result.code, result.json["error"]["code"]) == (3, "E119")
    assert "2 of 4 shards are missing, with 4 records: 1, 2" in result.json["error"]["message"]
    with opened(target, plan) as workshop:
        assert workshop.finished() == {0, 3}


def test_another_plan(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4))
    saved_plan(tmp_path / "other", first_id=1)
    result = run(name_of(target), "--plan", tmp_path / "other")
    assert (result.code, "E119" in result.stderr) == (3, True)


def test_beside_live_workers(run: Any, target: Path | Remote, plan: Any, tmp_path: Path) -> None:
    """They find it published, and the last of them takes the staging away."""
    with opened(target, plan) as workshop:
        make(workshop, plan, *range(4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = run(name_of(target), "--plan", tmp_path / "plan", "--json")
        assert workshop.root() is not None
        assert kvformat.open(name_of(target)).id == result.json["id"]
        workshop.remove()
    assert kvformat.verify(name_of(target)).warnings == ()
