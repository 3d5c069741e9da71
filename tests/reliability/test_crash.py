"""A machine or process that dies after any operation: no dataset or a whole one, and the next run completes it."""

from __future__ import annotations

import json
import random
import shutil

import pytest

import kvformat
from kvformat.testing.recording import MODES, RecordingFiles, existing, replay, tear
from tests.reliability import small


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    """Id of the dataset where nothing goes wrong."""
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    with small.create(location) as writer:
        small.fill(writer)
    small.check_complete(location, writer.id)
    small.check_records(location)
    return writer.id


def recorded(base, *, history=(), resume=False):
    """Operations of a whole run below ``base``, and how many of them are the history."""
    files = RecordingFiles(base, history=history)
    with small.create(base / "sets" / "ds", files=files, resume=resume) as writer:
        small.fill(writer)
    return files.operations


def state(directory):
    return json.dumps(small.tree(directory))


def check_reader(location, identity):
    """No dataset, or a whole one; whether there is one."""
    if (location / "kvformat.json").exists():
        small.check_complete(location, identity)
        return True
    for read in (kvformat.open, kvformat.verify):
        with pytest.raises(kvformat.DatasetNotFoundError) as caught:
            read(location)
        assert caught.value.code == "E001"
    return False


def check_after_crash(location, identity):
    """What a reader sees, then what a writer makes of it; whether there was a dataset."""
    if check_reader(location, identity):
        return True
    with small.create(location, files=small.Unsynced(), resume=True) as writer:
        small.fill(writer)
    assert writer.id == identity
    small.check_complete(location, identity)
    return False


def check_every_prefix(operations, mode, tmp_path, identity, *, seed=0, start=0):
    """Crash after each operation from ``start`` on; equal disks are looked at once. Returns what was seen."""
    known = {}
    seen = []
    for count in range(start, len(operations) + 1):
        target = tmp_path / f"{mode}-{count}"
        replay(operations[:count], target, mode, seed=seed + count)
        left = state(target)
        if left not in known:
            try:
                known[left] = check_after_crash(target / "sets" / "ds", identity)
            except Exception as error:
                last = operations[count - 1]
                error.add_note(f"{mode} crash after {count}: {last.kind} {last.path}")
                raise
        seen.append(known[left])
        shutil.rmtree(target)
    return seen


def check_monotonous(seen):
    """First no dataset, then, from some operation on, always one."""
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (False, True)


@pytest.mark.parametrize("mode", MODES)
def test_crash_after_any_operation(tmp_path, identity, mode):
    (tmp_path / "base").mkdir()
    operations = recorded(tmp_path / "base")
    small.check_complete(tmp_path / "base" / "sets" / "ds", identity)
    seen = check_every_prefix(operations, mode, tmp_path, identity)
    if mode != "scattered":
        check_monotonous(seen)
    assert seen[-1]


def test_a_publication_reported_is_durable(tmp_path, identity):
    """When the `with` block is left, the least a file system may keep is the whole dataset."""
    (tmp_path / "base").mkdir()
    operations = recorded(tmp_path / "base")
    replay(operations, tmp_path / "left", "synced")
    small.check_complete(tmp_path / "left" / "sets" / "ds", identity)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(3))
@pytest.mark.parametrize("mode", MODES)
def test_crash_after_any_operation_of_other_runs(tmp_path, identity, mode, run):
    """Helper threads make the order of operations another one each time; writes are torn in two here."""
    (tmp_path / "base").mkdir()
    operations = tear(recorded(tmp_path / "base"))
    assert check_every_prefix(operations, mode, tmp_path, identity, seed=1000 * run)[-1]


def second_runs(tmp_path, counts, first):
    """For each count: a run killed after so many operations, and all operations once the next run is through."""
    for count in counts:
        base = tmp_path / f"killed-{count}"
        replay(first[:count], base, "killed")
        if not (base / "sets" / "ds" / "kvformat.json").exists():
            yield count, recorded(base, history=first[:count], resume=True)
        shutil.rmtree(base)


def test_a_publication_after_a_kill_is_durable(tmp_path, identity):
    """What a killed process left unsynced is in the machine's memory: the next one has to sync that too."""
    (tmp_path / "base").mkdir()
    first = recorded(tmp_path / "base")
    for count, operations in second_runs(tmp_path, range(1, len(first)), first):
        try:
            replay(operations, tmp_path / f"left-{count}", "synced")
            small.check_complete(tmp_path / f"left-{count}" / "sets" / "ds", identity)
        except Exception as error:
            error.add_note(f"the first run was killed after {count}: {first[count - 1].kind} {first[count - 1].path}")
            raise


@pytest.mark.parametrize("mode", ["synced", "scattered"])
@pytest.mark.parametrize("part", range(4))
def test_kill_then_power_loss(tmp_path, identity, mode, part):
    """A process dies, the next one takes over its work, and then the machine dies."""
    (tmp_path / "base").mkdir()
    first = recorded(tmp_path / "base")
    chance = random.Random(part)
    for count, operations in second_runs(tmp_path, chance.sample(range(1, len(first)), 4), first):
        start = chance.randrange(count, len(operations))
        try:
            check_every_prefix(operations, mode, tmp_path / f"{count}", identity, start=start, seed=part)
        except Exception as error:
            error.add_note(f"the first run was killed after {count}: {first[count - 1].kind} {first[count - 1].path}")
            raise


def test_a_new_receipt_never_meets_a_shard_of_a_killed_run(tmp_path, identity):
    """A name used again: the power loss must not bring the first run's half shard back beside the second's receipt."""
    (tmp_path / "base").mkdir()
    first = recorded(tmp_path / "base")
    halves = {op.path: at for at, op in enumerate(first, 1) if op.kind == "create" and op.path.endswith(".shard")}
    path, count = min(halves.items())
    [(_, operations)] = second_runs(tmp_path, [count], first)
    removed = [at for at, op in enumerate(operations) if op.kind == "unlink" and op.path == path]
    receipt = path.removesuffix("shard") + "json"
    linked = [at for at, op in enumerate(operations) if op.kind == "link" and op.path == receipt]
    assert removed[0] < linked[0]
    for seed in range(40):
        target = tmp_path / f"scattered-{seed}"
        replay(operations[: linked[0] + 1], target, "scattered", seed=seed)
        check_after_crash(target / "sets" / "ds", identity)


@pytest.mark.parametrize("seed", range(3))
def test_many_crashes_in_a_row(tmp_path, identity, seed):
    """Power is lost again and again, in any mode, until a run comes through."""
    chance = random.Random(seed)
    base = tmp_path / "0"
    base.mkdir()
    for attempt in range(1, 12):
        history = existing(base)
        operations = recorded(base, history=history, resume=True)
        base = tmp_path / f"{attempt}"
        count = chance.randrange(len(history), len(operations))
        replay(operations[:count], base, chance.choice(MODES), seed=chance.random())
        if check_reader(base / "sets" / "ds", identity):
            return
    check_after_crash(base / "sets" / "ds", identity)
