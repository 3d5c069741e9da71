"""A machine that loses power, or a disk that is full, under a worker: the next one completes what it began."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil

import pytest

import kvformat
from kvformat.errors import KVFormatError
from kvformat.testing.faults import FaultyFiles
from kvformat.testing.memory_store import MemoryStore
from kvformat.testing.recording import MODES, RecordingFiles, existing, replay, tear
from kvformat.write.receipt_file import decode_receipt
from kvformat.write.sealing import seal
from kvformat.write.spool import SpoolFiles
from tests.reliability import small
from tests.reliability.working import finish
from tests.write.planning import SmallPlan, fill, make, opened, remote, run_of, simple

RECORDS = 7


@pytest.fixture(scope="module")
def plan():
    return SmallPlan(RECORDS)


@pytest.fixture(scope="module")
def identity(tmp_path_factory, plan):
    return simple(tmp_path_factory.mktemp("simple") / "ds", plan)


def recorded(base, plan, *, history=()):
    """Operations of a worker that does all of it."""
    base.mkdir(exist_ok=True)
    files = RecordingFiles(base, history=history)
    finish(base / "sets" / "ds", plan, files=files)
    return files.operations


def check_receipts(location, plan):
    """Of every receipt a shard is there that is what it says; how many there are."""
    run = run_of(plan)
    staging = location / ".staging" / f"{run.key}-workers"
    found = sorted(staging.glob("[0-9]" * 8 + ".json"))
    for path in found:
        receipt = decode_receipt(path.read_bytes(), key=run.key, ordinal=int(path.stem), path=path)
        shard = staging / f"{path.stem}{'.skipped' if receipt.is_empty else f'-{receipt.sha256[:16]}.shard'}"
        assert hashlib.sha256(shard.read_bytes()).hexdigest() == receipt.sha256
    return len(found)


def check_after_crash(location, plan, identity):
    """None or a whole one; and in the first case all of it in the next run. Any warning is an error here."""
    if (location / "kvformat.json").exists():
        assert kvformat.verify(location).id == identity
        return True
    finished = check_receipts(location, plan)
    result = finish(location, plan, files=small.Unsynced())
    assert (result["id"], len(result["earlier"])) == (identity, finished)
    report = kvformat.verify(location)
    assert (report.ok, report.id, report.findings) == (True, identity, ())
    return False


def check_every_prefix(operations, mode, tmp_path, plan, identity, *, start=0, seed=0):
    known, seen = {}, []
    for count in range(start, len(operations) + 1):
        target = tmp_path / f"{mode}-{count}"
        replay(operations[:count], target, mode, seed=seed + count)
        left = json.dumps(small.tree(target))
        if left not in known:
            try:
                known[left] = check_after_crash(target / "sets" / "ds", plan, identity)
            except Exception as error:
                last = operations[count - 1]
                error.add_note(f"{mode} crash after {count}: {last.kind} {last.path}")
                raise
        seen.append(known[left])
        shutil.rmtree(target)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_crash_after_any_operation(tmp_path, plan, identity, mode):
    operations = recorded(tmp_path / "base", plan)
    seen = check_every_prefix(operations, mode, tmp_path, plan, identity)
    assert (seen[0], seen[-1]) == (False, True)
    if mode != "scattered":
        assert seen == sorted(seen)


@pytest.mark.parametrize("mode", ["synced", "scattered", "journalled"])
def test_crash_after_some_operations(tmp_path, plan, identity, mode):
    operations = tear(recorded(tmp_path / "base", plan))
    chance = random.Random(mode)
    for count in sorted(chance.sample(range(1, len(operations)), 12)):
        replay(operations[:count], tmp_path / f"{count}", mode, seed=count)
        check_after_crash(tmp_path / f"{count}" / "sets" / "ds", plan, identity)


def test_a_receipt_is_durable_only_after_its_shard(tmp_path, plan):
    """Content and entry of the shard are synced before the receipt gets its name, and that before it counts."""
    operations = recorded(tmp_path / "base", plan)
    names = {operation.path: at for at, operation in enumerate(operations) if operation.kind == "link"}
    receipts = [path for path in names if path.endswith(".json") and path.rpartition("/")[2][:8].isdigit()]
    assert len(receipts) == plan.num_shards
    for path in receipts:
        folder, _, name = path.rpartition("/")
        [shard] = [other for other in names if other.startswith(f"{folder}/{name[:8]}-") and other.endswith(".shard")]
        part = operations[names[shard]].source
        made = next(at for at, one in enumerate(operations) if one.kind == "create" and one.path == part)
        number = operations[made].file
        synced = max(at for at, one in enumerate(operations) if one.kind == "sync" and one.file == number)
        written = max(at for at, one in enumerate(operations) if one.kind == "write" and one.file == number)
        entry = [at for at, one in enumerate(operations) if one.kind == "sync_dir" and one.path == folder]
        linked, counted = names[shard], names[path]
        assert made < written < synced < linked < next(at for at in entry if at > linked) < counted
    for mode in ("synced", "scattered", "journalled"):
        for count in range(0, len(operations), 7):
            target = tmp_path / f"{mode}-{count}"
            replay(operations[:count], target, mode, seed=count)
            if not (target / "sets" / "ds" / "kvformat.json").exists():
                check_receipts(target / "sets" / "ds", plan)
            shutil.rmtree(target)


@pytest.mark.parametrize("mode", MODES)
def test_crash_beside_a_shard_without_records(tmp_path, plan, identity, mode):
    """What is finished is finished, records or not; tried again, all of it is published. Any warning is an error."""
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)
    with opened(base / "sets" / "ds", plan, files=files) as workshop:
        make(workshop, plan, [1, 3, 0], skip=[2, 3, 5])
    operations, found = files.operations, []
    for count in range(0, len(operations) + 1, 3):
        target = tmp_path / f"{mode}-{count}"
        replay(operations[:count], target, mode, seed=count)
        location = target / "sets" / "ds"
        receipts = check_receipts(location, plan)
        with opened(location, plan, files=small.Unsynced()) as workshop:
            finished = workshop.finished()
            assert len(finished) == receipts
            assert all(workshop.check(ordinal) for ordinal in finished)
            assert {ordinal for ordinal, one in workshop.receipts() if one is not None} == finished
            again = {ordinal for ordinal in finished if not workshop.check(ordinal, allow_skips=False)}
            assert again == finished & {1}
            make(workshop, plan, set(range(plan.num_shards)) - workshop.finished())
            assert seal(workshop, plan) == identity
            workshop.remove()
        assert not (location / ".staging").exists()
        found.append(finished)
        shutil.rmtree(target)
    assert {frozenset(), frozenset({1})} <= set(found)


@pytest.mark.parametrize("seed", range(3))
def test_killed_then_power_lost(tmp_path, plan, identity, seed):
    """A process dies, the next one goes on, then the machine dies; again and again."""
    chance = random.Random(seed)
    base = tmp_path / "0"
    base.mkdir()
    for attempt in range(1, 8):
        history = existing(base)
        operations = recorded(base, plan, history=history)
        base = tmp_path / f"{attempt}"
        replay(operations[: chance.randrange(len(history), len(operations))], base, chance.choice(MODES), seed=attempt)
        if (base / "sets" / "ds" / "kvformat.json").exists():
            break
    check_after_crash(base / "sets" / "ds", plan, identity)


# ----------------------------------------------------------------------------------------------------------- disk full


def code_of_making(location, plan, files):
    """Code of what all shards failed with; None where they did not."""
    try:
        with opened(location, plan, files=files) as workshop:
            make(workshop, plan, range(plan.num_shards))
    except KVFormatError as error:
        return error.code
    return None


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("kind", ["write", "create", "link", "sync"])
def test_a_full_disk_leaves_no_stray_file(tmp_path, plan, identity, kind, lasting):
    """At every operation of its kind; what was finished before is kept, and the next run does the rest."""
    nth = 0
    while True:
        location = tmp_path / f"{nth}" / "ds"
        files = FaultyFiles(kind, nth=nth, error=errno.ENOSPC, lasting=lasting)
        code = code_of_making(location, plan, files)
        assert (code is not None) == bool(files.failed)
        if code is None:
            break
        assert code == ("E202" if kind == "sync" else "E200")
        staging = location / ".staging"
        left = [path.name for path in staging.rglob("*")] if staging.exists() else []
        assert not [name for name in left if ".part" in name or name.startswith("worker-")]
        shards = {name[:8] for name in left if name.endswith(".shard")}
        assert shards == {name[:8] for name in left if name[:8].isdigit() and name.endswith(".json")}
        result = finish(location, plan)
        assert (result["id"], result["earlier"]) == (identity, sorted(map(int, shards)))
        nth += 1 if nth < 6 or kind != "write" else 3
    assert nth > plan.num_shards


def test_a_full_spool_is_told(tmp_path, plan, identity):
    class Full(FaultyFiles, SpoolFiles):
        pass

    store, spool = MemoryStore(), tmp_path / "spool"
    files = Full("write", nth=5, error=errno.ENOSPC)
    options = {"spool": spool, "keep_open": False}
    with pytest.raises(KVFormatError) as caught, opened(remote(store), plan, files=files, **options) as workshop:
        make(workshop, plan, range(plan.num_shards))
    assert caught.value.code == "E200"
    assert list(spool.iterdir()) == []
    result = finish(remote(store), plan, **options)
    assert result["id"] == identity
    assert result["earlier"]


def test_a_full_disk_while_records_are_added(tmp_path, plan):
    """The shard in work goes; the worker can begin it again once there is space."""
    files = FaultyFiles("write", nth=1 << 30, error=errno.ENOSPC)
    with opened(tmp_path / "ds", plan, files=files) as workshop:
        shard = fill(workshop.begin(3), plan, stop=0)
        shard._writer._appender.append([bytes((4 << 20) - 8192)])  # the next record fills a piece, which is written
        files._nth = files.calls["write"]
        with pytest.raises(KVFormatError) as caught:
            fill(shard, plan)
        assert caught.value.code == "E200"
        assert not shard.path.exists()
        make(workshop, plan, [3])
        assert workshop.finished() == {3}
