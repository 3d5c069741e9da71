"""A process that writes to an object store, killed anywhere: no dataset or a whole one, and the next run completes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvformat
from kvformat.storage.remote import Remote
from tests.reliability import small
from tests.reliability.remote_writing import fill_large, large

REPOSITORY = Path(__file__).resolve().parents[2]
SHARDS = -(-small.NUM_RECORDS // 2)


def program(*args, **options):
    arguments = [sys.executable, "-m", "tests.reliability.remote_writing", *map(str, args)]
    return subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    location = tmp_path_factory.mktemp("undisturbed") / "ds"
    with small.create(location) as writer:
        small.fill(writer)
    return writer.id


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_operation(tmp_path, identity, after, resume):
    process = program("kills", tmp_path, json.dumps({"after": after, "resume": resume}))
    output, errors = process.communicate(timeout=250)
    assert (process.returncode, errors) == (0, b"")
    results = json.loads(output)
    assert [result["count"] for result in results] == list(range(1, len(results) + 1))
    assert len(results) > 20
    for result in results:
        location = tmp_path / f"{result['count']}" / "ds"
        assert ("id" in result) != ("code" in result), result
        if "code" in result:
            assert result["code"] == "E100"  # the first one had published
        else:
            assert result["id"] == identity
        assert result["spools_then"] == (result["spools"] if "code" in result else 0), result
        report = kvformat.verify(location)
        assert (report.ok, report.id, report.findings) == (True, identity, ())
        small.check_records(location)
    resumed = [result.get("resumed") for result in results]
    published = [result.get("code") for result in results]
    if resume:
        assert {0, SHARDS, None} < set(resumed)
        assert published[-1] == "E100"
    else:
        assert set(resumed) <= {0, None}
    assert sorted(published, key=str, reverse=True) == published  # once there, it stays
    assert max(result["spools"] for result in results) == 1


def follow(fd, count):
    seen = 0
    while seen < count:
        data = os.read(fd, count - seen)
        if not data:
            break
        seen += len(data)
    return seen


def start(url, storage_options, spool):
    read, write = os.pipe()
    options = {"fd": write, "spool": str(spool), "storage_options": storage_options}
    process = program("write", url, json.dumps(options), pass_fds=[write])
    os.close(write)
    return process, read


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_interrupted_over_s3(s3, tmp_path):
    """Shards of three parts each; every run gets a little further than the one before, until one publishes."""
    url, storage_options = s3
    spool = tmp_path / "spool"
    with large(tmp_path / "local", spool) as writer:
        fill_large(writer)
    process, read = start(url + "/undisturbed", storage_options, spool)
    total = 0
    while data := os.read(read, 1 << 16):
        total += len(data)
    os.close(read)
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, output.decode(), errors) == (0, writer.id, b"")
    assert list(spool.iterdir()) == []
    chance = random.Random(0)
    remote = Remote(url + "/ds", storage_options=storage_options)
    runs = 0
    while remote.stat("kvformat.json") is None:
        runs += 1
        process, read = start(url + "/ds", storage_options, spool)
        follow(read, chance.randrange(4, 10) + total * runs // 20)
        kind = signal.SIGINT if runs % 2 else signal.SIGKILL
        process.send_signal(kind)
        os.close(read) if kind == signal.SIGKILL else os.set_blocking(read, False)
        output, errors = process.communicate(timeout=100)
        if kind == signal.SIGINT:
            os.close(read)
        if process.returncode == 0:
            assert output.decode() == writer.id
        elif kind == signal.SIGINT:
            assert errors.rstrip().endswith(b"KeyboardInterrupt"), errors
            assert list(spool.iterdir()) == []
        else:
            assert process.returncode == -signal.SIGKILL
            assert len(list(spool.iterdir())) <= 1
        assert runs < 60
    assert runs > 2
    remote.close()
    report = kvformat.verify(url + "/ds", storage_options=storage_options)
    assert (report.ok, report.id) == (True, writer.id)
