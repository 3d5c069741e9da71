from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvformat
from kvformat.cli.lengths import Bin, bars, lengths_of
from kvformat.cli.output import size_text
from kvformat.spec.context import Canary, Text
from tests.cli.datasets import LENGTHS, SECRET, write


def header_bytes(root: Path) -> int:
    """Length fields and headers of all shards, as they stand in the files."""
    return sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in (root / "shards").rglob("*.safetensors")
    )


def test_what_a_dataset_is(run, published: Path) -> None:
    result = run("inspect", published)
    dataset = kvformat.open(published)
    assert (result.code, result.stderr) == (0, "")
    words = " ".join(result.stdout.split())
    for wanted in (
        f"id {dataset.id}",
        "model llama, 2 layers, 1 K/V heads of 2, head_dim 4, computed in F32",
        "records 4 with 4 names",
        f"tokens {sum(LENGTHS):,}",
        f"headers {size_text(header_bytes(published))} of the shards",
        f"a token {size_text(round((dataset.nbytes - header_bytes(published)) / sum(LENGTHS)))}, padding included, ",
        "k key attention 2: 0-1 tokens, heads 1, head_dim 4 F32",
        "token_ids extra tokens I32",
        "median 5",
        "longest 300",
        "rope[0].theta 10000.0",
        "torch 1.2.3",
    ):
        assert wanted in words, wanted
    for number in range(dataset.manifest.totals.shards):
        assert dataset.index.shard(number).path in result.stdout
    # lengths 3, 5, 8, 300 in bins that double, as a drawing
    drawn = [line.split() for line in result.stdout.splitlines() if line.endswith("█")]
    assert [(row[0], row[-2]) for row in drawn] == [("2", "1"), ("4", "1"), ("8", "1"), ("256", "1")]


def test_the_same_as_json(run, published: Path) -> None:
    found = run("inspect", published, "--json").json
    dataset = kvformat.open(published)
    assert (found["ok"], found["id"], found["records"], found["tokens"]) == (True, dataset.id, 4, sum(LENGTHS))
    assert found["nbytes"] == sum(path.stat().st_size for path in (published / "shards").rglob("*.safetensors"))
    assert found["header_nbytes"] == header_bytes(published)
    aside = [*(published / "index").iterdir(), *(published / "files").iterdir()]
    assert found["index_nbytes"] == sum(path.stat().st_size for path in aside)
    lengths = found["token_lengths"]
    assert (lengths["shortest"], lengths["median"], lengths["p95"], lengths["longest"]) == (3, 5, 300, 300)
    assert sum(one["records"] for one in lengths["bins"]) == 4
    assert sum(shard["records"] for shard in found["shards"]) == 4
    assert all((published / shard["path"]).stat().st_size == shard["nbytes"] for shard in found["shards"])
    assert found["context"]["model"]["family"] == "llama"
    assert [component["name"] for component in found["schema"]["components"]] == ["k", "v"]


def test_token_ids_and_values_only_when_asked_for(run, tmp_path: Path) -> None:
    canary = Text(canary=Canary(text="a canary", token_ids=(SECRET, 7)))
    path = write(tmp_path / "dataset", text=canary)
    value = f"{float(kvformat.open(path)[1].component('k')[0, 0, 0, 0]):.4g}"
    for args in ([], ["--json"], ["--record", "clip-1"], ["--record", "clip-1", "--json"]):
        shown = run("inspect", path, *args).stdout
        assert str(SECRET)[:-3] not in shown.replace(",", ""), args
        assert value not in shown, args
    assert "a canary" in run("inspect", path).stdout
    asked = run("inspect", path, "--record", "clip-1", "--values")
    assert str(SECRET + 10_000) in asked.stdout
    assert value in asked.stdout
    found = run("inspect", path, "--record", "clip-1", "--values", "--json").json
    assert found["extras"]["token_ids"] == [SECRET + 10_000 + number for number in range(5)]
    layer = found["layers"][0]
    stored = kvformat.open(path)["clip-1"].component("k")[0]
    assert (layer["component"], layer["layer"], layer["min"]) == ("k", 0, float(stored.min()))
    assert layer["first"] == stored.flatten()[:4].tolist()


def test_one_record(run, tmp_path: Path) -> None:
    name, other = "a [red]name[/red] :smile:\x1b[31m", 'it\'s "quoted"'
    path = write(tmp_path / "[blue]dataset", names=[name, "b", "c", "d"], alias=other)
    record = kvformat.open(path)[name]
    result = run("inspect", path, "--record", name)
    assert (result.code, result.stderr) == (0, "")
    assert "a [red]name[/red] :smile:\\x1b[31m" in result.stdout
    assert "[blue]dataset" in result.stdout
    assert record.document.hex() in result.stdout
    found = run("inspect", path, "--record", other, "--json").json
    assert found["names"] == [name, other]
    assert found["dims"] == {"tokens": 3}
    assert found["fingerprint"] == (record.fingerprint or b"").hex()
    assert {t["name"]: t["shape"] for t in found["tensors"]} == {
        "k": [2, 3, 1, 4],
        "v": [2, 3, 1, 4],
        "token_ids": [3],
    }
    assert run("inspect", path, "--number", 0, "--json").json == found


def test_no_such_record(run, published: Path) -> None:
    for args in (["--record", "none"], ["--number", 4]):
        result = run("inspect", published, *args)
        assert (result.code, result.stdout) == (3, "")
        assert result.stderr.startswith("error [E080]: ")


def test_values_json_has_no_name_for_are_text(run, tmp_path: Path) -> None:
    import torch

    schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=2, dtype="F32")
    values = torch.tensor([[[[float("nan"), float("inf")]]]])
    with kvformat.create(
        tmp_path / "dataset", schema=schema, context=kvformat.Context.unknown(), allow_non_finite=["k", "v"]
    ) as writer:
        writer.add("a", {"k": values, "v": -values}, token_ids=[1])
    layer = run("inspect", tmp_path / "dataset", "--number", 0, "--values", "--json").json["layers"][0]
    assert layer["first"] == ["nan", "inf"]
    assert "fingerprint   none: the context is unknown" in run("inspect", tmp_path / "dataset", "--number", 0).stdout
    assert "model     unknown" in run("inspect", tmp_path / "dataset").stdout


def test_lengths_are_counted_over_parts() -> None:
    random = np.random.default_rng(3)
    values = np.maximum(random.lognormal(5, 1, 10_000), 1).astype(np.uint32)
    whole, parts = lengths_of([values]), lengths_of(np.split(values, [1, 17, 5_000]))
    assert whole == parts
    ordered = np.sort(values)
    assert (whole.shortest, whole.longest) == (ordered[0], ordered[-1])
    assert (whole.median, whole.p95) == (ordered[4_999], ordered[9_499])
    assert whole.mean == pytest.approx(values.mean())
    for one in whole.bins:
        assert one.records == np.count_nonzero((values >= one.first) & (values <= one.last))
    assert sum(one.records for one in whole.bins) == 10_000
    assert all(a.last + 1 == b.first for a, b in zip(whole.bins, whole.bins[1:], strict=False))


@pytest.mark.parametrize("lengths", [[1], [7] * 5, [1, 16], [1, 17], [0, 3], [100, 101, 140], [1 << 24, 1]])
def test_bins_cover_every_length(lengths: list[int]) -> None:
    found = lengths_of([np.array(lengths, dtype=np.uint32)])
    assert sum(one.records for one in found.bins) == len(lengths)
    assert 1 <= len(found.bins) <= 25


def test_bars_are_proportional_and_never_invisible() -> None:
    found = [Bin(first=1, last=1, records=1), Bin(first=2, last=2, records=0), Bin(first=3, last=4, records=800)]
    assert bars(found, width=10, blocks=False) == ["    1    1  #", "    2    0", "3 - 4  800  ##########"]
    assert bars(found, width=10) == ["    1    1  ▏", "    2    0", "3 - 4  800  ██████████"]
