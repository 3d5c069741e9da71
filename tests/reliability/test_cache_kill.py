"""Processes killed at any moment of filling a cache and making room in it: the next one needs no help."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.cache import Cache
from tests.storage.caching import NBYTES, Origin, content, files, impatient, keys_of, ledger, options, usage

FORK = multiprocessing.get_context("fork")
CALLS = ("open", "close", "link", "unlink", "mkdir", "ftruncate", "pwrite", "posix_fallocate", "utime", "dup")
WORKERS = 4
KILLS = 40


def kill_before(number: int) -> itertools.count:
    """Have this process killed before its ``number``-th system call of the kinds a cache makes; the calls so far."""
    counter = itertools.count(1)

    def counted(real):
        def call(*args, **named):
            if next(counter) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)
    return counter


def run(function, *args) -> int:
    """Exit status of a child."""
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join(120)
    status = process.exitcode
    process.close()
    return status


def prepared(directory: Path) -> Cache:
    """A full cache of three entries, one of them damaged."""
    cache = impatient(Cache(options(directory, entries=3)), room_s=0)
    for key in "abc":
        Origin().get(cache, key)
    Path(cache._folder.entry("b")).write_bytes(bytes(NBYTES))
    return cache


def one_of_each(cache: Cache, number: int, notes: Path | None = None) -> None:
    """All that can happen to an entry."""
    counter = kill_before(number)
    origin = Origin()
    for key in "dbe":  # makes room, finds damage, makes room
        origin.get(cache, key)
    origin.damage = 1
    origin.get(cache, "f", use_mmap=False)
    origin.damage = 2
    with contextlib.suppress(KVFormatError):
        origin.get(cache, "g")
    held = origin.get(cache, "h")
    Cache(cache.options)
    origin.get(cache, "a")
    assert held
    if notes is not None:
        notes.write_text(str(next(counter)))


def check_healed(cache: Cache) -> None:
    """What a killed process left is at worst too high a count, and the next look at all files mends that."""
    with cache._room._ledger.locked() as page:
        used = usage(cache.options.dir)
        assert used <= cache.options.max_nbytes
        assert page.used is None or page.used >= used
    again = impatient(Cache(cache.options), room_s=0)
    assert files(cache.options.dir, "parts") == []
    for key in "abcdefgh":
        assert bytes(Origin().get(again, key).read(0, NBYTES)) == content(key)
        assert usage(cache.options.dir) <= cache.options.max_nbytes
    again._room.make(0)
    assert ledger(again) == usage(cache.options.dir)
    assert keys_of(cache.options.dir) == set("abcdefgh"[-cache.options.max_nbytes // NBYTES :])
    assert files(cache.options.dir, "parts") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_before_every_call(tmp_path):
    assert run(one_of_each, prepared(tmp_path / "whole"), -1, tmp_path / "calls") == 0
    calls = int((tmp_path / "calls").read_text()) - 1
    assert calls > 150
    for number in range(1, calls + 1):
        cache = prepared(tmp_path / f"{number}")
        assert run(one_of_each, cache, number) == -signal.SIGKILL
        check_healed(cache)
    check_healed(prepared(tmp_path / "not killed"))


def damage(path: Path, position: int) -> None:
    """Change a byte of an entry nobody uses, or cut it off."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if position < NBYTES:
            file.seek(position)
            file.write(b"\xff")
        else:
            file.truncate(position - NBYTES)


def work(cache: Cache, seed: int) -> None:
    """Use many keys until killed; wrong bytes end it otherwise."""
    chance = random.Random(seed)
    kill_before(chance.randrange(1, 1500))
    origin = Origin()
    held: list[object] = []
    while True:
        key = chance.choice("abcdefghijkl")
        file = origin.get(cache, key, use_mmap=chance.random() < 0.5)
        assert file is None or bytes(file.read(0, NBYTES)) == content(key)
        if chance.random() < 0.2:
            held = [file]
        elif chance.random() < 0.2:
            held.clear()
        if chance.random() < 0.05:
            damage(Path(cache._folder.entry(key)), chance.randrange(2 * NBYTES))


@pytest.mark.timeout(600)
def test_processes_that_share_it_are_killed_again_and_again(tmp_path):
    cache = impatient(Cache(options(tmp_path / "cache", entries=6)), room_s=0.05)
    seeds = iter(range(KILLS))
    running = []
    statuses = []
    while len(statuses) < KILLS:
        while len(running) < WORKERS and (seed := next(seeds, None)) is not None:
            process = FORK.Process(target=work, args=(cache, seed))
            process.start()
            running.append(process)
        running[0].join(0.005)
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            statuses.append(process.exitcode)
            process.close()
        with cache._room._ledger.locked() as page:
            used = usage(cache.options.dir)
            assert page.used is None or page.used >= used
            assert used <= 6 * NBYTES
    assert statuses == [-signal.SIGKILL] * KILLS
    check_healed(cache)
