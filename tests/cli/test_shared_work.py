"""``status`` and ``clean`` of what workers share: who is at work, what is done and missing, and who keeps it alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvformat.cli import shared_work
from kvformat.storage.remote import Remote
from kvformat.testing.memory_store import MemoryStore
from kvformat.write.holding import hold_staged
from kvformat.write.sealing import seal
from kvformat.write.worker_state import STALE_S, Worker
from kvformat.write.workshop import Workshop
from tests.cli.sharing import fill, make, opened, saved_plan

URL = "s3://bucket/sets/ds"


class Place:
    """A directory or a store, and how the command line names it."""

    def __init__(self, target: Path | Remote, store: MemoryStore | None) -> None:
        self.target = target
        self.store = store
        self.name = URL if store is not None else str(target)

    def snapshot(self) -> dict[str, bytes]:
        """Everything but what workers say, by name."""
        if self.store is not None:
            found = dict(self.store.objects)
        else:
            assert isinstance(self.target, Path)
            root = self.target
            found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        return {name: data for name, data in sorted(found.items()) if "/worker-" not in name}


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "local":
        yield Place(tmp_path / "ds", None)
        return
    store = MemoryStore(URL)
    monkeypatch.setattr("kvformat.storage.connect.connect", lambda *_: store)
    place = Place(Remote(URL), store)
    yield place
    assert isinstance(place.target, Remote)
    place.target.close()


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    return saved_plan(tmp_path / "plan")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Move the clock by which workers are judged."""
    import time

    real, ahead = time.time, [0.0]
    moved = SimpleNamespace(time=lambda: real() + ahead[0], monotonic=time.monotonic)
    for module in ("kvformat.write.local_workers", "kvformat.write.remote_workers", "kvformat.cli.shared_work"):
        monkeypatch.setattr(f"{module}.time", moved)

    def move(seconds: float) -> None:
        ahead[0] += seconds

    return move


def kill(workshop: Workshop) -> None:
    """Leave it as a kill does: its word stays, its locks go."""
    workshop._beats.stop()
    shared: Any = workshop._shared
    if isinstance(workshop.place, Path):
        os.close(shared._said._fd)
        shared._said._fd = -1
        shared._lease.release()
    else:
        shared._spool._lease.release()


# -------------------------------------------------------------------------------------------------------------- status


def test_who_is_at_work_and_what_is_left(run, place: Place, plan: Any, tmp_path: Path) -> None:
    with opened(place.target, plan, rank=1, world_size=3) as workshop:
        make(workshop, plan, 0, 2)
        shard = fill(workshop.begin(1), plan, stop=1)
        started = workshop.state.started
        workshop._clock = lambda: started + 10.0
        workshop.report(
            replace(
                workshop.state,
                phase="work",
                shard=1,
                shard_records=1,
                shard_total=2,
                num_shards=2,
                nbytes=30_000,
                num_tokens=100,
            )
        )
        before = place.snapshot()
        found = run("status", place.name, "--json").json
        (work,) = found["staging"]
        shared = work["shared"]
        assert (work["state"], work["shards"], work["records"], work["plan"]) == ("live", 2, None, None)
        assert (shared["num_shards"], shared["finished"], shared["running"], shared["missing"]) == (4, 2, [1], 1)
        assert (shared["first_missing"], shared["plan"], shared["num_records"]) == ([3], plan.digest, 7)
        kept = [data for name, data in before.items() if name.endswith((".shard", ".safetensors"))]
        assert work["nbytes"] == sum(map(len, kept))
        assert shared["needed_nbytes"] == plan.nbytes + 4 * plan.header_size - work["nbytes"]
        assert shared["rate_nbytes_s"] == 3000.0
        assert shared["left_s"] == pytest.approx(shared["needed_nbytes"] / 3000)
        assert (shared["free_nbytes"] is None) == (place.store is not None)
        (worker,) = shared["workers"]
        expected = {
            "rank": 1, "world_size": 3, "host": socket.gethostname(), "pid": os.getpid(), "liveness": "live",
            "phase": "work", "shard": 1, "shard_records": 1, "shard_total": 2, "num_shards": 2, "num_tokens": 100,
            "nbytes": 30_000,
        }  # fmt: skip
        assert worker == {**expected, "said_s_ago": worker["said_s_ago"]}
        assert found["orphans"] == []
        with_plan = run("status", place.name, "--plan", tmp_path / "plan", "--json").json
        assert with_plan["staging"][0]["records"] == 4
        shown = run("status", place.name)
        assert shown.code == 0
        for said in (
            "staged work, live (a writer is at work): ",
            "shards: 2 of 4 finished, 1 in work, 1 missing; ",
            "rate: 3 kB/s, ",
            f"worker 1 of 3, live: {socket.gethostname()}, pid {os.getpid()}, shard 1 (1 of 2 records), 2 shards and",
            f"plan {plan.digest[:16]}, schema ",
        ):
            assert said in shown.stdout, shown.stdout
        assert place.snapshot() == before
        shard.discard()
        make(workshop, plan, 1, 3)  # nobody was disturbed
        seal(workshop, plan)
        workshop.remove()
    assert run("status", place.name, "--json").json["staging"] == []


def test_work_that_nobody_is_at(run, place: Place, plan: Any, tmp_path: Path) -> None:
    with opened(place.target, plan, tag="[bold]tag") as workshop:
        make(workshop, plan, 1)
    (work,) = run("status", place.name, "--json").json["staging"]
    assert work["state"] == ("abandoned" if place.store is None else "unknown")
    assert (work["shared"]["workers"], work["shared"]["rate_nbytes_s"]) == ([], None)
    shown = run("status", place.name, "--plan", tmp_path / "plan").stdout
    assert "finished: 1 shard, 2 records, " in shown
    assert "missing: 0, 2, 3\n" in shown
    assert "tag: [bold]tag\n" in shown


def test_a_plan_before_its_first_worker(run, place: Place, plan: Any, tmp_path: Path) -> None:
    """Nothing is there: with a plan that is no fault, and leaves nothing."""
    assert run("status", place.name).code == 3
    given = ("status", place.name, "--plan", tmp_path / "plan")
    found = run(*given, "--json").json
    needed = plan.nbytes + 4 * plan.header_size
    assert (found["ok"], found["published"], found["staging"]) == (True, None, [])
    free = found["plan"].pop("free_nbytes")
    assert found["plan"] == {
        "digest": plan.digest, "published": None, "differs": None, "begun": False, "num_shards": 4, "num_records": 7,
        "finished": 0, "needed_nbytes": needed,
    }  # fmt: skip
    assert (free is None) == (place.store is not None)
    shown = run(*given)
    assert (shown.code, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[:2] == [place.name, "not published"]
    size = shared_work.output.size_text(needed)
    assert f"\nplan {plan.digest[:16]}: nothing begun, 0 of 4 shards, {size} needed" in shown.stdout
    assert (" free\n" in shown.stdout) == (place.store is None)
    assert place.snapshot() == {}
    assert place.store is not None or not Path(place.name).exists()


def test_a_plan_in_a_directory_of_its_own(run, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds").mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 10}))
    shown = run("status", tmp_path / "ds", "--plan", tmp_path / "plan").stdout
    assert "nothing begun, 0 of 4 shards, " in shown
    assert "    space is short by " in shown
    (tmp_path / "file").write_bytes(b"")
    refused = run("status", tmp_path / "file", "--plan", tmp_path / "plan")
    assert (refused.code, "E001" in refused.stderr) == (3, True)


def test_whether_what_is_published_is_the_plan(run, place: Place, plan: Any, tmp_path: Path) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, *range(4), skip=(2,))
        begun = run("status", place.name, "--plan", tmp_path / "plan", "--json").json["plan"]
        assert (begun["begun"], begun["finished"], begun["needed_nbytes"], begun["published"]) == (True, 4, 0, None)
        assert "\nplan " not in run("status", place.name, "--plan", tmp_path / "plan").stdout
        seal(workshop, plan, allow_skips=True)
        workshop.remove()
    found = run("status", place.name, "--plan", tmp_path / "plan", "--json").json["plan"]
    assert (found["published"], found["differs"], found["finished"], found["needed_nbytes"]) == (True, None, 4, 0)
    shown = run("status", place.name, "--plan", tmp_path / "plan").stdout
    assert f"plan {plan.digest[:16]}: this is what is published\n" in shown
    for name, options, differs in [
        ("other", {"first_id": 1}, "its record 'clip-0' is of another document"),
        ("longer", {"num_records": 8}, "it has 6 names, the plan 7"),
    ]:
        other = saved_plan(tmp_path / name, **options)
        found = run("status", place.name, "--plan", tmp_path / name, "--json").json["plan"]
        assert (found["published"], found["differs"], found["begun"]) == (False, differs, False)
        shown = run("status", place.name, "--plan", tmp_path / name)
        assert shown.code == 0
        said = f"plan {other.digest[:16]}: what is published is not this plan: {differs}\n"
        assert said in shown.stdout
    assert "plan" not in run("status", place.name, "--json").json


def test_staged_work_of_another_plan_is_told_apart(run, place: Place, plan: Any, tmp_path: Path) -> None:
    saved_plan(tmp_path / "other", first_id=1)
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0)
        given = ("status", place.name, "--plan")
        assert "staged work, live" in run("status", place.name).stdout
        assert "staged work, live" in run(*given, tmp_path / "plan").stdout
        shown = run(*given, tmp_path / "other").stdout
    assert "staged work of another plan, live" in shown
    assert "nothing begun, 0 of 4 shards" in shown
    for name, mine in [("plan", True), ("other", False)]:
        found = run(*given, tmp_path / name, "--json").json
        assert ([one["of_plan"] for one in found["staging"]], found["plan"]["begun"]) == ([mine], mine)
    assert run("status", place.name, "--json").json["staging"][0]["of_plan"] is None


def test_a_shard_without_records_is_finished(run, place: Place, plan: Any, tmp_path: Path) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0, 1, skip=(2, 3))
    (work,) = run("status", place.name, "--json").json["staging"]
    assert (work["shards"], work["shared"]["finished"], work["shared"]["missing"]) == (2, 2, 2)
    shards = [data for name, data in place.snapshot().items() if name.endswith((".shard", ".safetensors"))]
    assert work["nbytes"] == sum(map(len, shards))


def test_a_dead_worker_is_shown_as_such(run, place: Place, plan: Any, clock: Callable[[float], None]) -> None:
    """On this machine a lock tells, elsewhere only time."""
    here, there = opened(place.target, plan), opened(place.target, plan, rank=1, world_size=2)
    there.state = replace(there.state, host="elsewhere")
    there._shared.say(there.state)
    kill(here)
    kill(there)

    def seen() -> tuple[str, list[str]]:
        (work,) = run("status", place.name, "--json").json["staging"]
        return work["state"], [worker["liveness"] for worker in work["shared"]["workers"]]

    assert seen() == ("unknown", ["dead", "unknown"])
    clean = run("clean", place.name, "--yes")
    assert (clean.code, "E117" in clean.stderr) == (3, True)
    assert "300 s after its last word" in clean.stderr
    clock(STALE_S + 60)
    # With the spool of the dead one here, what it said in the store was cleaned.
    assert seen() == ("abandoned", ["dead", "stale"] if place.store is None else ["stale"])
    shown = run("status", place.name).stdout
    assert "worker 1 of 2, stale: elsewhere, " in shown
    assert "last heard of 6:0" in shown
    assert run("clean", place.name, "--yes").code == 0
    assert run("status", place.name).code in (0, 3)
    assert [name for name in place.snapshot() if name.startswith(".staging")] == []


def test_what_nobody_holds_comes_with_the_next_step(run, plan: Any, tmp_path: Path) -> None:
    out = tmp_path / "my ds"

    def step() -> str:
        (line,) = [line for line in run("status", out).stdout.splitlines() if line.startswith("    next: ")]
        return str(line.removeprefix("    next: "))

    drop = f"`kvformat clean '{out}'`"
    with opened(out, plan) as workshop:
        make(workshop, plan, 0, 1)
        assert "next: " not in run("status", out).stdout
    assert step() == f"the same `kvformat extract` command goes on with it; {drop} drops it"
    with opened(out, plan) as workshop:
        make(workshop, plan, 2, 3)
    assert step() == f"the same `kvformat extract` command, or `kvformat seal`, publishes it; {drop} drops it"
    with opened(out, plan) as workshop:
        seal(workshop, plan)
    assert step() == f"{drop} removes it, as something is published here"
    assert run("clean", out, "--yes").code == 0
    assert "next: " not in run("status", out).stdout


def test_who_loads_a_model_is_shown_and_left_alone(run, place: Place, plan: Any) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0)
    with hold_staged(place.target, plan.digest, rank=1, world_size=2):
        (work,) = run("status", place.name, "--json").json["staging"]
        assert (work["state"], work["shared"]["loading"]) == ("live", True)
        assert [worker["phase"] for worker in work["shared"]["workers"]] == ["load"]
        assert "staged work, live (running, loading the model): " in run("status", place.name).stdout
        clean = run("clean", place.name, "--yes")
        assert (clean.code, clean.stdout) == (3, "nothing removed, 0 bytes freed\n")
        assert f"worker 1 of 2 ({socket.gethostname()}, pid {os.getpid()}) is loading its model: wait" in clean.stderr
        with opened(place.target, plan):
            shown = run("status", place.name)
            assert "staged work, live (a writer is at work): " in shown.stdout
            assert not run("status", place.name, "--json").json["staging"][0]["shared"]["loading"]
    assert run("clean", place.name, "--yes").code == 0


def test_damaged_work_is_shown(run, place: Place, plan: Any) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0)
        path = workshop.place
    if place.store is None:
        (Path(path) / "run.json").write_bytes(b"{")
    else:
        place.store.objects[f"{str(path).removeprefix(URL + '/')}/run.json"] = b"{"
    (work,) = run("status", place.name, "--json").json["staging"]
    assert (work["shared"], work["shards"], work["state"]) == (None, 1, "unknown")
    assert "plan: not readable" in run("status", place.name).stdout


@pytest.mark.parametrize("place", ["remote"], indirect=True)
def test_late_twins_in_a_store_are_orphans(run, place: Place, plan: Any) -> None:
    assert place.store is not None
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0, 1)
        odd = "shards/00000/00000001-0123456789abcdef.safetensors"
        place.store.objects[odd] = b"late"
        odd_before = "shards/00000/00000000-0000000000000000.safetensors"
        place.store.objects[odd_before] = b"late"
        found = run("status", URL, "--json").json
    assert [one["path"] for one in found["orphans"]] == [odd_before, odd]
    assert found["staging"][0]["shards"] == 2


def test_ten_thousand_receipts_are_not_read(run, place: Place, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0, 1, 2)
        if place.store is not None:
            place.store.calls.clear()
            run("status", URL)
            assert [name for verb, name in place.store.calls if verb.startswith("get") and "/0000" in name] == []
        else:
            read = Path.read_bytes
            monkeypatch.setattr(
                Path, "read_bytes", lambda path: pytest.fail(f"{path}") if path.name[:4] == "0000" else read(path)
            )
            assert run("status", place.name).code == 0


def test_lines_of_a_large_run(plan: Any) -> None:
    """Only a few workers and ordinals are shown, and that space is short is said."""
    state = replace_many(plan)
    work = shared_work.describe(state[0], frozenset(), 0, state[1], place=None, now=1000.0)
    work = replace(work, free_nbytes=10, missing=1000, first_missing=tuple(range(20)), running=())
    lines = shared_work.lines(work, 0)
    assert f"    space is short by {shared_work.output.size_text(work.needed_nbytes - 10)}" in lines
    assert "    and 5 more workers; --json lists all" in lines
    assert any(line.startswith("    missing: 0, 1, 2,") and line.endswith("19, ...") for line in lines)
    assert sum(line.startswith("    worker ") for line in lines) == 20


def replace_many(plan: Any) -> tuple[Any, list[Worker]]:
    from kvformat.write.run import RunIdentity
    from kvformat.write.worker_state import WorkerState

    run = RunIdentity.of(
        plan, schema=plan.schema, context=plan_context(), text=plan.text, provenance={}, covered={}, num_tokens=1,
        nbytes=10_000, shard_nbytes=1, shard_slots=2,
    )  # fmt: skip
    states = [
        WorkerState(rank=n, world_size=25, host="h", pid=n, token="0" * 8, started=0.0, updated=900.0, phase="wait")
        for n in range(25)
    ]
    return run, [Worker(state, "unknown") for state in states]


def plan_context() -> Any:
    from kvformat.spec.context import Context

    return Context.unknown()


# --------------------------------------------------------------------------------------------------------------- clean


def test_what_workers_left_goes(run, place: Place, plan: Any) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0, 1)
    before = place.snapshot()
    staged = {name: data for name, data in before.items() if name.startswith(".staging")}
    result = run("clean", place.name, input="y\n")
    freed = sum(map(len, staged.values()))
    assert result.code == 0
    assert f"{freed:,} bytes freed" in result.stdout
    assert place.snapshot() == {name: data for name, data in before.items() if name not in staged}
    if place.store is None:
        assert not (Path(place.name) / ".staging").exists()


def test_live_workers_are_left_alone(run, place: Place, plan: Any) -> None:
    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0)
        before = place.snapshot()
        result = run("clean", place.name, "--yes")
        assert (result.code, result.stdout) == (3, "nothing removed, 0 bytes freed\n")
        assert result.stderr.startswith("error [E117]: ")
        assert place.snapshot() == before
        make(workshop, plan, 1, 2, 3)
        seal(workshop, plan)
        workshop.remove()
    assert run("clean", place.name) == (0, "no staged work, 0 bytes freed\n", "")


def test_a_worker_killed_on_this_machine_is_in_nobodys_way(run, place: Place, plan: Any) -> None:
    workshop = opened(place.target, plan)
    make(workshop, plan, 0)
    kill(workshop)
    result = run("clean", place.name, "--yes")
    assert (result.code, result.stderr) == (0, "")
    assert [name for name in place.snapshot() if name.startswith(".staging")] == []


@pytest.mark.parametrize("place", ["remote"], indirect=True)
def test_a_clean_that_is_cut_short_leaves_what_workers_go_on_from(run, place: Place, plan: Any, monkeypatch) -> None:
    assert place.store is not None
    from kvformat.storage.store import DeniedFault

    with opened(place.target, plan) as workshop:
        make(workshop, plan, 0, 1, 2)
    delete, left = place.store.delete, [2]

    def refuse(name: str, *, timeout_s: float) -> None:
        if not left[0]:
            raise DeniedFault(name)
        left[0] -= 1
        delete(name, timeout_s=timeout_s)

    monkeypatch.setattr(place.store, "delete", refuse)
    assert run("clean", URL, "--yes").code == 3
    monkeypatch.setattr(place.store, "delete", delete)
    with opened(place.target, plan) as workshop:
        assert workshop.finished() == {0}
