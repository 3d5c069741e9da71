"""Copies and verification over a real S3 server, in parts and by several processes' worth of kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvformat
from kvformat.storage.remote import Remote
from kvformat.testing.servers import Server
from tests.transfer.killing import stopped_after
from tests.transfer.places import tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 20 MB each: uploads in three parts."""
    path = tmp_path_factory.mktemp("large") / "dataset"
    schema = kvformat.Schema.uniform(num_layers=4, num_kv_heads=8, head_dim=128, dtype="F32")
    random_ = torch.Generator().manual_seed(0)
    with kvformat.create(
        path, schema=schema, context=kvformat.Context.unknown(), shard_nbytes=20 << 20, shard_slots=4
    ) as writer:
        for number in range(4):
            values = {name: torch.randn(4, 600, 8, 128, generator=random_) for name in ("k", "v")}
            writer.add(f"clip-{number}", values, token_ids=[number * 1000 + token for token in range(600)])
    return path


def objects(url: str, options: dict[str, Any]) -> dict[str, bytes]:
    remote = Remote(url, storage_options=options)
    try:
        return {stat.name: remote.read(stat.name) for stat in remote.list()}
    finally:
        remote.close()


def test_there_across_and_back(large: Path, seaweed: Server, tmp_path: Path) -> None:
    options = seaweed.storage_options
    one, two = f"{seaweed.bucket()}/a/one", f"{seaweed.bucket()}/two"
    identity = kvformat.open(large).id
    first = kvformat.copy(large, one, target_options=options)
    second = kvformat.copy(one, two, source_options=options, target_options=options, spool=tmp_path / "spool")
    third = kvformat.copy(two, tmp_path / "back", source_options=options)
    assert {report.id for report in (first, second, third)} == {identity}
    assert tree(tmp_path / "back") == tree(large)
    assert objects(one, options) == objects(two, options) == tree(large)
    for level in (1, 2, 3, 4):
        report = kvformat.verify(two, level=level, storage_options=options)
        assert (report.ok, report.id, report.warnings) == (True, identity, ())
    assert kvformat.copy(large, two, target_options=options).already_there


def test_a_damaged_shard_is_found_and_not_replaced(large: Path, seaweed: Server) -> None:
    options, url = seaweed.storage_options, f"{seaweed.bucket()}/dataset"
    shard = next(name for name in tree(large) if name.startswith("shards/"))
    data = bytearray(tree(large)[shard])
    data[10_000_000] ^= 1
    remote = Remote(url, storage_options=options)
    remote.put(shard, data)
    with pytest.raises(kvformat.ConflictError, match="E113"):
        kvformat.copy(large, url, target_options=options)
    assert remote.stat("kvformat.json") is None
    # what another program would have done
    for name, content in tree(large).items():
        if name != shard and remote.stat(name) is None:
            remote.put(name, content)
    remote.close()
    assert kvformat.verify(url, level=2, storage_options=options).ok
    codes = {finding.code for finding in kvformat.verify(url, storage_options=options).findings}
    assert codes == {"E072", "E077"}


@pytest.mark.parametrize("route", ["local-s3", "s3-local", "s3-s3"])
def test_killed_again_and_again(route: str, large: Path, seaweed: Server, tmp_path: Path) -> None:
    options = seaweed.storage_options
    source, target = str(large), str(tmp_path / "target")
    if route.startswith("s3"):
        source = f"{seaweed.bucket()}/source"
        kvformat.copy(large, source, target_options=options)
    if route.endswith("s3"):
        target = f"{seaweed.bucket()}/target"
    runs, status = 0, -1
    while status:
        runs += 1
        status = stopped_after(3 * runs, source, target, cache=tmp_path / "cache", options=options)
    assert runs > 3
    final = kvformat.copy(source, target, source_options=options, target_options=options, threads=2)
    assert final.id == kvformat.open(large).id
    assert (objects(target, options) if route.endswith("s3") else tree(Path(target))) == tree(large)
    assert kvformat.verify(target, storage_options=options).warnings == ()
