from __future__ import annotations

import re
from pathlib import Path

import kvformat
from tests.cli.datasets import add, flip, interrupted, resumable


def test_a_published_dataset(run, published: Path, snapshot) -> None:
    before = snapshot(published)
    found = run("status", published, "--json").json
    dataset = kvformat.open(published)
    assert found["published"] == {
        "id": dataset.id,
        "records": 4,
        "nbytes": dataset.nbytes,
        "shards": dataset.manifest.totals.shards,
    }
    assert (found["ok"], found["staging"], found["orphans"], found["unknown_staging"]) == (True, [], [], [])
    shown = run("status", published)
    assert (shown.code, shown.stderr) == (0, "")
    assert f"id {dataset.id}" in shown.stdout
    assert "no staged work" in shown.stdout
    assert snapshot(published) == before


def test_staged_work_is_described_and_left_as_it_is(run, tmp_path: Path, snapshot) -> None:
    path = interrupted(tmp_path / "unfinished", records=3)
    before = snapshot(path)
    found = run("status", path, "--json").json
    (work,) = found["staging"]
    assert (found["ok"], found["published"], found["orphans"]) == (True, None, [])
    assert not found["data_without_root"]
    assert (work["state"], work["shards"], work["records"]) == ("abandoned", 2, 2)
    staged = Path(work["path"])
    assert work["nbytes"] == sum((staged / f"{number:08}.shard").stat().st_size for number in range(2))
    assert work["total_nbytes"] == sum(len(data) for data in before.values())
    assert work["plan"]["tag"] == "[bold]tag"
    assert snapshot(path) == before  # an unfinished shard included
    shown = run("status", path)
    assert shown.code == 0
    assert "not published" in shown.stdout
    assert "staged work, abandoned (no writer holds it)" in shown.stdout
    assert "    next: the same program goes on with it, where it resumes; `kvformat clean " in shown.stdout
    assert re.search(r"finished: 2 shards, 2 records, [\d.]+ kB; [\d.]+ kB with what is begun\n", shown.stdout)
    assert "tag: [bold]tag\n" in shown.stdout
    with resumable(path) as writer:  # the lease was given back
        for number in range(3):
            add(writer, f"clip-{number}", tokens=8, seed=number)
    assert run("status", path, "--json").json["published"]["records"] == 3


def test_a_live_writer(run, process, tmp_path: Path) -> None:
    with resumable(tmp_path / "live") as writer:
        add(writer, "clip-0", tokens=8, seed=0)
        (work,) = run("status", tmp_path / "live", "--json").json["staging"]
        assert work["state"] == "live"
        assert "a writer is at work" in process("status", tmp_path / "live").stdout
    assert run("status", tmp_path / "live", "--json").json["staging"] == []


def test_files_nobody_names(run, dataset: Path) -> None:
    orphan = dataset / "shards" / "00000" / "00000009-0123456789abcdef.safetensors"
    orphan.write_bytes(b"12345")
    (dataset / "[red]notes").write_bytes(b"1")
    found = run("status", dataset, "--json").json
    assert found["orphans"] == [
        {"path": "[red]notes", "nbytes": 1},
        {"path": "shards/00000/00000009-0123456789abcdef.safetensors", "nbytes": 5},
    ]
    shown = run("status", dataset)
    assert shown.code == 0
    assert "2 files the dataset does not name, 6 bytes:\n    [red]notes (1 bytes)\n" in shown.stdout


def test_the_rest_of_an_interrupted_publication(run, dataset: Path) -> None:
    count = sum(path.is_file() for path in dataset.rglob("*"))
    (dataset / "kvformat.json").unlink()
    (dataset / "mine").mkdir()
    (dataset / "mine" / "file").write_bytes(b"1")  # not where a writer puts anything
    found = run("status", dataset, "--json").json
    assert found["published"] is None
    assert len(found["orphans"]) == count - 1
    assert not [orphan for orphan in found["orphans"] if "mine" in orphan["path"]]
    assert found["data_without_root"]
    shown = run("status", dataset)
    assert (shown.code, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[1].startswith("not published: data lie here without kvformat.json, ")
    assert "restore the file" in shown.stdout


def test_a_root_that_cannot_be_read(run, dataset: Path) -> None:
    flip(dataset / "kvformat.json", 3)
    result = run("status", dataset, "--json")
    assert (result.code, result.json["ok"], result.json["published"]) == (1, False, None)
    assert result.json["orphans"] is None  # which files are named cannot be known
    assert result.json["error"]["path"] == str(dataset / "kvformat.json")
    shown = run("status", dataset)
    assert shown.code == 1
    assert shown.stderr.startswith("error [E01")
    assert "published, but not readable" in shown.stdout


def test_damaged_staging_is_shown(run, tmp_path: Path) -> None:
    path = interrupted(tmp_path / "unfinished")
    (staged,) = (path / ".staging").iterdir()
    (staged / "plan.json").write_bytes(b"{")
    (staged / "00000000.json").write_bytes(b"")
    (path / ".staging" / "something else").mkdir()
    found = run("status", path, "--json").json
    (work,) = found["staging"]
    assert (work["plan"], work["shards"]) == (None, 1)
    assert found["unknown_staging"] == [str(path / ".staging" / "something else")]
    assert "plan: not readable" in run("status", path).stdout


def test_an_empty_directory(run, tmp_path: Path) -> None:
    assert run("status", tmp_path) == (0, f"{tmp_path}\nnot published\nno staged work\n", "")
