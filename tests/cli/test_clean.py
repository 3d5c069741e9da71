from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.datasets import Result, add, interrupted, resumable


@pytest.fixture
def unfinished(dataset: Path) -> Path:
    """A published dataset with the staged work of another writer beside it."""
    (interrupted(dataset.parent / "unfinished") / ".staging").rename(dataset / ".staging")
    return dataset


def staged(path: Path) -> list[Path]:
    return sorted((path / ".staging").iterdir()) if (path / ".staging").exists() else []


@pytest.mark.parametrize(("args", "answer"), [(["--yes"], None), ([], "y\n"), ([], "Yes\n")])
def test_staging_goes_and_nothing_else(run, unfinished: Path, snapshot, args: list[str], answer: str | None) -> None:
    before = snapshot(unfinished)
    freed = sum(len(data) for name, data in before.items() if name.startswith(".staging"))
    result: Result = run("clean", unfinished, *args, input=answer)
    assert (result.code, result.stdout) == (0, f"removed 1 staging directory, {freed:,} bytes freed\n")
    assert freed > 0
    after = snapshot(unfinished)
    assert after == {name: data for name, data in before.items() if not name.startswith(".staging")}
    assert not (unfinished / ".staging").exists()
    assert ("[y/N]" in result.stderr) == (answer is not None)
    assert run("verify", unfinished).stdout.startswith("ok: no faults at level 4\n")


@pytest.mark.parametrize("answer", ["n\n", "\n", "yep\n"])
def test_any_other_answer_removes_nothing(run, unfinished: Path, snapshot, answer: str) -> None:
    before = snapshot(unfinished)
    result = run("clean", unfinished, input=answer)
    assert (result.code, result.stdout) == (0, "nothing removed, 0 bytes freed\n")
    assert snapshot(unfinished) == before


def test_no_answer_is_a_usage_error(run, unfinished: Path, snapshot) -> None:
    before = snapshot(unfinished)
    result = run("clean", unfinished, input="")
    assert (result.code, result.stdout) == (2, "")
    assert "--yes" in result.stderr.splitlines()[-1]
    assert snapshot(unfinished) == before


def test_a_live_writer_is_left_alone(run, tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    with resumable(path) as writer:
        add(writer, "clip-0", tokens=8, seed=0)
        (live,) = staged(path)
        alone = run("clean", path, "--yes")
        assert (alone.code, alone.stdout) == (3, "nothing removed, 0 bytes freed\n")
        assert alone.stderr.startswith("error [E117]: ")
        assert str(live) in alone.stderr
        abandoned = path / ".staging" / f"{'0' * 16}-{'1' * 8}"
        abandoned.mkdir()
        (abandoned / "00000000.shard").write_bytes(bytes(100))
        both = run("clean", path, "--yes")
        assert (both.code, both.stdout) == (3, "removed 1 staging directory, 100 bytes freed\n")
        assert staged(path) == [live]
    assert run("verify", path).code == 0  # the writer went on undisturbed


def test_nothing_to_clean(run, published: Path, snapshot) -> None:
    before = snapshot(published)
    assert run("clean", published) == (0, "no staged work, 0 bytes freed\n", "")
    assert snapshot(published) == before


def test_links_and_foreign_files_are_left_alone(run, tmp_path: Path, snapshot) -> None:
    """A directory that only looks like staging, because a link leads to it, keeps its files."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"keep me")
    path = interrupted(tmp_path / "unfinished")
    looks_like = path / ".staging" / f"{'a' * 16}-{'b' * 8}"
    looks_like.symlink_to(precious)
    plain_file = path / ".staging" / f"{'c' * 16}-{'d' * 8}"
    plain_file.write_bytes(b"x")
    result = run("clean", path, "--yes")
    assert result.code == 0
    assert result.stdout.startswith("removed 1 staging directory, ")
    assert staged(path) == [looks_like, plain_file]
    assert snapshot(precious) == {"file": b"keep me"}
    assert result.stderr.splitlines() == [
        f"not a staging directory, left alone: {left}" for left in (looks_like, plain_file)
    ]


def test_a_link_in_place_of_staging_is_not_followed(run, tmp_path: Path) -> None:
    elsewhere = interrupted(tmp_path / "elsewhere")
    root = tmp_path / "root"
    root.mkdir()
    (root / ".staging").symlink_to(elsewhere / ".staging")
    assert run("clean", root, "--yes").code == 0
    assert len(staged(elsewhere)) == 1


def test_shards_that_have_their_final_name_are_not_freed(run, tmp_path: Path) -> None:
    """Linking comes before the root: a writer killed in between leaves two names for one file."""
    path = interrupted(tmp_path / "unfinished")
    (directory,) = staged(path)
    final = path / "shards" / "00000"
    final.mkdir(parents=True)
    os.link(directory / "00000000.shard", final / "x.safetensors")
    linked = (final / "x.safetensors").stat().st_size
    total = sum(file.stat().st_size for file in directory.iterdir())
    result = run("clean", path, "--yes")
    assert result.stdout == f"removed 1 staging directory, {total - linked:,} bytes freed\n"
    assert (final / "x.safetensors").stat().st_size == linked


def test_the_lease_is_held_while_the_question_stands(run, monkeypatch, tmp_path: Path) -> None:
    path = interrupted(tmp_path / "unfinished")
    seen: list[str] = []

    class Answering:
        def readline(self) -> str:
            with pytest.raises(Exception, match="E117"), resumable(path):
                pytest.fail("a writer resumed what is about to be removed")
            seen.append("asked")
            return "n\n"

    from kvformat.cli import clean

    monkeypatch.setattr(clean, "sys", type("sys", (), {"stdin": Answering()}))
    assert run("clean", path).code == 0
    assert seen == ["asked"]
    with pytest.raises(RuntimeError, match="resumed"), resumable(path) as writer:  # given back afterwards
        add(writer, "clip-0", tokens=8, seed=0)
        raise RuntimeError("resumed")
