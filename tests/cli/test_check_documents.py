from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import kvformat
from kvformat.cli.check_documents import check_documents
from kvformat.cli.group import Commands
from tests.cli.datasets import LENGTHS, SECRET, Result, write
from tests.models import save_tiny, write_documents

app = typer.Typer(cls=Commands, add_completion=False)
app.command()(check_documents)
app.callback()(lambda: None)


def run(*args: object) -> Result:
    done = CliRunner().invoke(app, ["check-documents", *map(str, args)], prog_name="kvformat")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Result(done.exit_code, done.stdout, done.stderr)


def ids(number: int) -> list[int]:
    return [SECRET + 10_000 * number + token for token in range(LENGTHS[number])]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    lines = [{"id": f"clip-{number}", "token_ids": ids(number)} for number in range(4)]
    return write_documents(tmp_path / "docs.jsonl", lines)


def test_equal_documents(published: Path, documents: Path) -> None:
    result = run(published, documents)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "note: the dataset's documents came as token ids: there is no tokenizer to compare",
        "ok: 4 documents, 4 of them the dataset's",
        f"    {published}",
        f"    id {kvformat.open(published).id}",
    ]
    found = run(published, documents, "--json").json
    assert (found["ok"], found["looked_at"], found["matched"], found["findings"]) == (True, 4, 4, [])


def test_differences_are_named_without_values(published: Path, tmp_path: Path) -> None:
    other = [*ids(1)[:2], 77, *ids(1)[3:]]
    lines = [
        {"id": "clip-1", "token_ids": other},
        {"id": "clip-0", "token_ids": ids(0)},
        *({"id": f"new-{number}", "token_ids": [number]} for number in range(3)),
    ]
    documents = write_documents(tmp_path / "docs.jsonl", lines)
    result = run(published, documents, "--limit", 2)
    assert result.code == 1
    assert result.stdout.splitlines()[:-2] == [
        "missing: the dataset has no record of this name, and none of this document (record new-0)",
        "missing: the dataset has no record of this name, and none of this document (record new-1)",
        "tokens: token 2 differs (5 tokens in the dataset, 5 given) (record clip-1)",
        "extra: the dataset has it, and it was not given (record clip-2)",
        "extra: the dataset has it, and it was not given (record clip-3)",
        "missing: and 1 more",
        "note: the dataset's documents came as token ids: there is no tokenizer to compare",
        (
            "DIFFERENT: 5 documents, 1 of them the dataset's, 3 not in the dataset, 1 of other tokens, "
            "2 in the dataset alone"
        ),
    ]
    assert run(published, documents, "--subset").stdout.count("extra") == 0
    told = run(published, documents, "--values").stdout
    assert f"; the dataset has {ids(1)[2]}, given is 77 (record clip-1)" in told
    assert str(ids(1)[2]) not in result.stdout


def test_text_is_tokenised_with_a_model(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    path = write(tmp_path / "ds", names=["clip"], lengths=[4], unknown=True)
    lines = [{"id": "clip", "text": "abc"}, {"id": "other", "text": "abcd"}]
    result = run(path, write_documents(tmp_path / "two.jsonl", lines))
    assert (result.code, result.stdout) == (3, "")
    assert result.stderr.count("text needs a tokenizer") == 1
    assert "give a model that has one (--model DIR_OR_ID), or a documents file (`kvformat documents`)" in result.stderr
    documents = write_documents(tmp_path / "docs.jsonl", lines[:1])
    result = run(path, documents, "--model", model, "--values")
    assert result.code == 1
    assert "token 0 differs (4 tokens in the dataset, 4 given); the dataset has 1234567, given is 256 '<s>'" in (
        result.stdout.replace("1234567 ''", "1234567")
    )


def test_a_file_that_is_none(published: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text("{}\n", encoding="ascii")
    result = run(published, tmp_path / "docs.jsonl")
    assert (result.code, result.stderr.startswith("error [E300]: line 1: ")) == (3, True)
