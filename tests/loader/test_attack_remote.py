"""Attacks on loading from afar: cursors, broken-off epochs, damage and loss of the cache, the end of the process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import kvformat
from kvformat.errors import DamageError, KVFormatError
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.sampler import BatchSampler
from kvformat.read import ahead
from kvformat.read.dataset import Dataset
from kvformat.storage import requests
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.remote import Remote
from tests.loader.folder import folder_remote
from tests.loader.made import make_dataset
from tests.loader.test_remote_loading import content

RECORDS = 30
UNITS = ["none", "record", "shard"]


@pytest.fixture(autouse=True)
def _no_threads_left(monkeypatch):
    """Those that fetch ahead wait a while for more; other modules look at which there are."""
    monkeypatch.setattr(ahead, "_IDLE_S", 0.05)
    monkeypatch.setattr(requests, "_IDLE_S", 0.05)
    yield
    for thread in threading.enumerate():
        if thread.name in ("kvformat-ahead", "kvformat-remote"):
            thread.join(60)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("remote") / "data"
    make_dataset(found, RECORDS, aliases=(3, 17), slots=4, layers=3)
    return found


@pytest.fixture
def remote(path, tmp_path) -> Remote:
    return folder_remote(path, tmp_path / "log")


def opened(remote: Remote, unit: str, tmp_path: Path, *, nbytes: int = 1 << 28, **options) -> Dataset:
    cache = None
    if unit != "none":
        cache = CacheOptions(dir=str(tmp_path / "cache"), max_nbytes=nbytes, unit=unit, min_free_nbytes=0)
    return kvformat.open(remote, cache=cache, **options)


def sampler_of(dataset: Dataset) -> BatchSampler:
    return BatchSampler(dataset, batch_size=4, seed=3, shuffle="window", window_shards=2)


@pytest.mark.parametrize("unit", UNITS)
def test_a_state_counts_what_was_handed_out_at_every_cut(path, remote, unit, tmp_path) -> None:
    """Not what was announced: the same as of a local dataset, broken off or not, and in the next epoch."""
    local, dataset = kvformat.open(path), opened(remote, unit, tmp_path)
    whole = [content(batch) for batch in KVLoader(local, sampler_of(local))]
    for cut in range(1, len(whole) + 1):
        states, rest = [], []
        for one in (local, dataset):
            loader = KVLoader(one, sampler_of(one))
            batches = iter(loader)
            taken = [content(next(batches)) for _ in range(cut)]
            assert taken == whole[:cut]
            states.append(loader.state_dict())
            batches.close()
            assert loader.state_dict() == states[-1]
        assert states[0] == states[1]
        for one in (local, dataset):
            loader = KVLoader(one, sampler_of(one))
            loader.load_state_dict(states[0])
            rest.append([content(batch) for _ in range(2) for batch in loader])
        assert rest[0] == rest[1]
        if cut < len(whole):
            assert rest[0][: len(whole) - cut] == whole[cut:]


@pytest.mark.parametrize("unit", UNITS)
def test_an_epoch_broken_off_for_another_one(path, remote, unit, tmp_path) -> None:
    local, dataset = kvformat.open(path), opened(remote, unit, tmp_path)
    found = []
    for one in (local, dataset):
        sampler = sampler_of(one)
        loader = KVLoader(one, sampler)
        seen = []
        for epoch in (0, 5, 2):
            sampler.set_epoch(epoch)
            batches = iter(loader)
            seen += [content(next(batches)) for _ in range(3)]
            batches.close()
        sampler.set_epoch(1)
        seen += [content(batch) for batch in loader]
        found.append(seen)
    assert found[0] == found[1]
    if unit != "shard":
        assert not dataset.shards._announced


def test_two_loaders_take_turns_over_one_dataset(path, remote, tmp_path) -> None:
    """The end of one drops what the other announced, which is then fetched at its use."""
    dataset = opened(remote, "none", tmp_path)
    expected = [content(batch) for batch in KVLoader(kvformat.open(path), sampler_of(dataset))]
    train = iter(KVLoader(dataset, sampler_of(dataset)))
    found = []
    for _ in expected:
        found.append(content(next(train)))
        for number, batch in enumerate(KVLoader(dataset, BatchSampler(dataset, batch_size=2, seed=9))):
            content(batch)
            if number == 2:
                break
    assert found == expected
    assert next(train, None) is None


# ---------------------------------------------------------------------------------------------------- a cache's fate


def entries(tmp_path: Path, least: int = 0) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "entries").rglob("*.entry") if path.stat().st_size >= least]


def scribble(path: Path) -> None:
    """Other bytes in the very same file: what a bad disk does, and nobody notes."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(255 - byte for byte in path.read_bytes()))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_an_open_entry_that_is_damaged_is_never_given_out_where_each_access_is_verified(
    remote, unit, tmp_path
) -> None:
    dataset = opened(remote, unit, tmp_path, verify="always")
    assert (dataset[7].component("k") == 7).all()
    for entry in entries(tmp_path):
        scribble(entry)
    with pytest.raises(DamageError, match=r"E07[0-4]"):
        dataset[7].component("k")
    out = bytearray(dataset[7].nbytes)
    with pytest.raises(DamageError, match=r"E07[0-4]"):
        dataset.read_into(7, out)


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("unit", ["record", "shard"])
def test_a_damaged_entry_is_healed_at_the_next_start(remote, unit, verify, tmp_path) -> None:
    for batch in KVLoader(dataset := opened(remote, unit, tmp_path), sampler_of(dataset)):
        content(batch)
    del dataset, batch
    for entry in entries(tmp_path):
        scribble(entry)
    dataset = opened(remote, unit, tmp_path, verify=verify)
    assert sum(len(content(batch)[0]) for batch in KVLoader(dataset, sampler_of(dataset))) >= RECORDS


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_what_nobody_verified_is_verified_by_who_wants_that(path, unit, tmp_path) -> None:
    """A damaged store, read with verify="off" into the cache that others share."""
    copied = tmp_path / "copied"
    shutil.copytree(path, copied)
    sound = {shard: shard.read_bytes() for shard in copied.glob("shards/*/*")}
    start = kvformat.open(path).manifest.header_size
    for shard, data in sound.items():
        shard.chmod(0o644)
        shard.write_bytes(data[:start] + bytes(255 - byte for byte in data[start:]))
    remote = folder_remote(copied, tmp_path / "log")
    careless = opened(remote, unit, tmp_path, verify="off")
    for record in careless:
        record.component("k")
    with pytest.raises(DamageError):
        for batch in KVLoader(dataset := opened(remote, unit, tmp_path), sampler_of(dataset)):
            content(batch)
    for shard, data in sound.items():
        shard.write_bytes(data)
    dataset = opened(remote, unit, tmp_path)
    assert sum(len(content(batch)[0]) for batch in KVLoader(dataset, sampler_of(dataset))) >= RECORDS


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_the_directory_of_the_cache_is_removed_in_the_middle(remote, unit, tmp_path) -> None:
    dataset = opened(remote, unit, tmp_path)
    batches = iter(KVLoader(dataset, sampler_of(dataset), prefetch_nbytes=0))
    count = len(content(next(batches))[0])
    (tmp_path / "cache").rename(tmp_path / "gone")  # in one step: threads write to it
    for batch in batches:
        count += len(content(batch)[0])
    assert count >= RECORDS
    assert sum(len(content(batch)[0]) for batch in KVLoader(dataset, sampler_of(dataset))) >= RECORDS


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_a_full_disk_ends_the_epoch_with_its_code_and_leaves_no_part(remote, unit, monkeypatch, tmp_path) -> None:
    dataset = opened(remote, unit, tmp_path)
    dataset[0].component("k")
    fallocate = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(KVFormatError, match="E200"):
        for batch in KVLoader(dataset, sampler_of(dataset)):
            content(batch)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    assert not list((tmp_path / "cache" / "parts").iterdir())
    assert sum(len(content(batch)[0]) for batch in KVLoader(dataset, sampler_of(dataset))) >= RECORDS


@pytest.mark.parametrize("unit", ["record", "shard"])
def test_epochs_over_a_cache_that_holds_a_part_of_the_dataset(path, remote, unit, tmp_path) -> None:
    shards = [shard.stat().st_size for shard in path.glob("shards/*/*")]
    index = sum(part.stat().st_size for part in path.glob("index/*"))
    dataset = opened(remote, unit, tmp_path, nbytes=index + 6 * max(shards))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            loader = KVLoader(dataset, sampler_of(dataset), prefetch_nbytes=1 << 12)
            assert sum(len(content(batch)[0]) for batch in loader) >= RECORDS


# ------------------------------------------------------------------------------------------------- ends of processes

PROGRAM = """
import sys, threading, time
import kvformat
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.sampler import BatchSampler
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from tests.loader.folder import FolderStore

class Stuck(FolderStore):
    left = 2
    def get(self, name, start, nbytes, *, timeout_s):
        if name.startswith("shards/"):
            Stuck.left -= 1
            if Stuck.left < 0:
                sys.stdout.write("stuck\\n")  # in one piece: several threads do
                sys.stdout.flush()
                threading.Event().wait()
        return super().get(name, start, nbytes, timeout_s=timeout_s)

def connect(url, options, _):
    return Stuck(url, options)

root, log, how = sys.argv[1:]
options = {"root": root, "log": log}
dataset = kvformat.open(Remote("folder://x", storage_options=options, connect=connect))
if how == "ahead":
    dataset.announce(range(len(dataset)), [(name, [(0, count)]) for name, count in dataset.slabs.items()])
    time.sleep(1)
else:
    batches = iter(KVLoader(dataset, BatchSampler(dataset, batch_size=2, seed=1)))
    try:
        for batch in batches:
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", ["ahead", "interrupt"])
def test_a_process_ends_though_the_store_does_not_answer(path, how, tmp_path) -> None:
    """Its requests may be waited for by whoever wants their bytes, for minutes; not by the interpreter."""
    (tmp_path / "log").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "log"), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    killer = threading.Timer(120, process.kill)
    killer.start()
    try:
        if how == "interrupt":
            assert process.stdout is not None
            assert process.stdout.readline() == "stuck\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=45)  # a deadline of 60 s, and more, is that of the requests
    finally:
        killer.cancel()
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert ("interrupted" in out) == (how == "interrupt")


def test_memory_stays_where_it_is_over_many_epochs(tmp_path) -> None:
    """Anonymous memory of a loader without a cache, from the third epoch on."""
    schema = kvformat.Schema.uniform(num_layers=4, num_kv_heads=4, head_dim=64)
    with kvformat.create(tmp_path / "made", schema=schema, context=kvformat.Context.unknown()) as out:
        for number in range(16):
            k = torch.full((4, 512, 4, 64), float(number), dtype=torch.bfloat16)
            out.add(f"r{number}", {"k": k, "v": k}, token_ids=[number + 1] * 512)
    dataset = opened(folder_remote(tmp_path / "made", tmp_path / "log"), "none", tmp_path)
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=2, seed=1), prefetch_nbytes=16 << 20)
    seen = []
    for _ in range(12):
        for batch in loader:
            assert batch["k"].shape[0] == 4
        seen.append(anonymous_mib())
    assert max(seen[3:]) <= seen[3] + 48
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("kvformat-load") for name in names) == 0
    assert sum(name.startswith("kvformat-ahead") for name in names) <= 8


def anonymous_mib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10
