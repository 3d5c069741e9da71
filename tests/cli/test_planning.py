from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvformat.extract
from kvformat.errors import KVFormatError
from kvformat.extract import Tokeniser
from kvformat.extract.documents import open_documents
from kvformat.extract.hf import describe
from kvformat.extract.plan import make_plan, open_plan
from tests.models import save_tiny, write_documents

TEXTS = ["aa", "bb", "a longer text", "aa", "the longest text of them all"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", max_position_embeddings=64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "docs.jsonl", [{"id": f"doc-{n} [red]", "text": t} for n, t in enumerate(TEXTS)])


def plan_of(model: Path, source: Path, **options: Any) -> Any:
    described = describe(model)
    tokeniser = Tokeniser.load(model, max_tokens=described.max_tokens, vocab_size=described.vocab_size)
    return make_plan(source, tokeniser, schema=described.schema, **options)


def test_documents_then_a_plan_of_them(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "new" / "d.kvdocs", tmp_path / "plans" / "one"
    made = run("documents", "--documents", source, "--model", model, "--out", file)
    assert made.code == 0, made.stderr
    assert [found.first_name(number) for found in [open_documents(file)] for number in range(4)] == [
        "doc-0 [red]",
        "doc-1 [red]",
        "doc-2 [red]",
        "doc-4 [red]",
    ]
    options = ["--order", "length", "--batch-size", 2, "--batch-tokens", 64, "--shard-size", "64K"]
    planned = run("plan", "--documents", file, "--model", model, "--out", out, *options)
    assert planned.code == 0, planned.stderr
    found = open_plan(out)
    like = plan_of(model, source, order="length", batch_size=2, batch_tokens=64, shard_nbytes=64 << 10)
    assert found.digest == like.digest
    assert found.digest in planned.stdout
    # The same straight from the source, and again over what is there.
    for target in (tmp_path / "two", out):
        again = run("plan", "--documents", source, "--model", model, "--out", target, *options)
        assert again.code == 0, again.stderr
        assert open_plan(target).digest == found.digest
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["docs.jsonl", "new", "plans", "two"]


def test_what_they_tell(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "d.kvdocs", tmp_path / "plan"
    told = json.loads(run("documents", "--documents", source, "--model", model, "--out", file, "--json").stdout)
    tokens = sum(len(text) + 1 for text in set(TEXTS))
    assert told == {
        "ok": True,
        "location": str(file),
        "documents": 5,
        "records": 4,
        "names": 5,
        "duplicates": 1,
        "skipped": 0,
        "tokens": tokens,
        "longest": 29,
        "nbytes": file.stat().st_size,
        "sha256": open_documents(file).proof.sha256,
    }
    told = json.loads(run("plan", "--documents", file, "--model", model, "--out", out, "--json").stdout)
    plan = open_plan(out)
    assert told == {
        "ok": True,
        "location": str(out),
        "digest": plan.digest,
        "documents": 5,
        "records": 4,
        "names": 5,
        "duplicates": 1,
        "skipped": 0,
        "tokens": tokens,
        "longest": 29,
        "shards": 1,
        "groups": 4,
        "nbytes": plan.nbytes,
    }
    lines = run("plan", "--documents", file, "--model", model, "--out", out).stdout
    assert f"({plan.nbytes:,} bytes)" in lines
    assert "duplicates" in lines


def test_options_of_the_model_reach_the_schema(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    options = ["--layers", "0,2", "--dtype", "bf16", "--compute-dtype", "f32", "--shard-slots", 3]
    result = run("plan", "--documents", source, "--model", model, "--out", tmp_path / "plan", *options)
    assert result.code == 0, result.stderr
    plan = open_plan(tmp_path / "plan")
    assert plan.schema == describe(model, layers=[0, 2], dtype="BF16", compute_dtype="F32").schema
    assert plan.shard_slots == 3


def test_tokenising_is_told_how(run: Any, model: Path, tmp_path: Path) -> None:
    long = write_documents(tmp_path / "d.jsonl", [{"id": "a", "text": "x" * 100}, {"id": "b", "text": "y"}])
    base = ["documents", "--documents", long, "--model", model, "--out"]
    refused = run(*base, tmp_path / "d.kvdocs")
    assert refused.code == 3
    assert "error [E301]: line 1: 101 tokens, but the model has 64 positions" in refused.stderr
    assert run(*base, tmp_path / "cut.kvdocs", "--truncate", 8, "--no-special-tokens").code == 0
    cut = open_documents(tmp_path / "cut.kvdocs")
    assert (cut.num_tokens.tolist(), cut.text.truncate, cut.text.special_tokens) == ([8, 1], 8, False)
    skipped = run(*base, tmp_path / "less.kvdocs", "--skip-too-long", "--json")
    assert json.loads(skipped.stdout)["skipped"] == 1
    assert [one.name for one in open_documents(tmp_path / "less.kvdocs").skipped] == ["a"]
    result = run("plan", "--documents", long, "--model", model, "--out", tmp_path / "plan", "--skip-too-long")
    assert result.code == 0, result.stderr
    assert [one.name for one in open_plan(tmp_path / "plan").skipped] == ["a"]


def test_columns_and_functions(run: Any, model: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"clip": ["a"], "caption": ["x"]}), tmp_path / "d.parquet")
    base = ["documents", "--model", model, "--documents"]
    columns = ["--column", "id=clip", "--column", "text=caption"]
    assert run(*base, tmp_path / "d.parquet", "--out", tmp_path / "p.kvdocs", *columns).code == 0
    (tmp_path / "mine.py").write_text("def f():\n    yield {'id': 'a', 'text': 'x'}\n")
    assert run(*base, f"{tmp_path}/mine.py:f", "--out", tmp_path / "f.kvdocs").code == 0
    assert (tmp_path / "p.kvdocs").read_bytes() == (tmp_path / "f.kvdocs").read_bytes()


@pytest.mark.parametrize(
    ("command", "options", "match"),
    [
        ("documents", ["--out", "d.jsonl"], "--out must be the NAME.kvdocs of a documents file"),
        ("documents", ["--out", "d.kvdocs", "--column", "id"], "--column must be MEMBER=NAME"),
        ("documents", ["--out", "d.kvdocs", "--column", "id=a", "--column", "id=b"], "each member once"),
        ("documents", ["--out", "d.kvdocs", "--column", "id=a"], "columns are named of Parquet"),
        ("documents", ["--out", "d.kvdocs", "--truncate", "65"], "the model has 64 positions"),
        ("plan", ["--out", "plan", "--order", "random"], "random"),
        ("plan", ["--out", "plan", "--shard-slots", "10001"], "--shard-slots must be an integer of 1 to 10000"),
        (
            "plan",
            ["--out", "p.kvdocs"],
            "*.kvdocs is the name of a documents file: choose another location for a plan",
        ),
        ("plan", ["--out", "plan", "--batch-tokens", "0"], "batch-tokens"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    run: Any,
    model: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: list[str],
    match: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(command, "--documents", source, "--model", model, *options)
    assert result.code == 2
    assert match in result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["docs.jsonl"]


def test_documents_that_are_tokenised_already(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "d.kvdocs"
    run("documents", "--documents", source, "--model", model, "--out", file)
    for option in (["--truncate", 3], ["--skip-too-long"], ["--no-special-tokens"], ["--add-generation-prompt"]):
        result = run("plan", "--documents", file, "--model", model, "--out", tmp_path / "plan", *option)
        assert result.code == 2
        assert "tokenised already" in result.stderr
    assert run("documents", "--documents", file, "--model", model, "--out", tmp_path / "e.kvdocs").code == 2


def test_another_plan_is_never_overwritten(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    base = ["plan", "--documents", source, "--model", model, "--out", tmp_path / "plan"]
    assert run(*base).code == 0
    digest = open_plan(tmp_path / "plan").digest
    refused = run(*base, "--order", "length")
    assert refused.code == 3
    assert "error [E207]: another plan is here already; choose another location" in refused.stderr
    assert "(it differs in order: given here, length wanted) (path " in refused.stderr
    assert open_plan(tmp_path / "plan").digest == digest
    for options, said in (
        (
            ["--shard-size", "1M", "--batch-size", 2],
            "batch_size: 1 here, 2 wanted; shard_nbytes: 1073741824 here, 1048576",
        ),
        (["--truncate", 8], "how text became token ids: truncate: absent here, 8 wanted)"),
        (["--layers", "0"], "the schema: layers, dtypes, key stage or model)"),
    ):
        assert said in run(*base, *options).stderr
    write_documents(source, [{"id": "a", "text": "x"}])
    assert "it differs in the documents: 5 names here, 1 wanted)" in run(*base).stderr


def test_nothing_goes_into_the_directory_of_a_plan(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    given = ["--documents", source, "--model", model, "--out"]
    assert run("plan", *given, plan).code == 0
    before = sorted(plan.iterdir())
    for command, out in (
        ("plan", plan / "in"),
        ("documents", plan / "in.kvdocs"),
        ("documents", plan / "documents.kvdocs"),
        ("extract", plan),
        ("extract", plan / "ds"),
        ("estimate", plan),
    ):
        result = run(command, *given, out)
        assert (result.code, "E081" in result.stderr, "a plan is here, and a" in result.stderr) == (2, True, True)
    assert sorted(plan.iterdir()) == before
    for command, options in (("plan", [tmp_path / "x"]), ("documents", [tmp_path / "x.kvdocs"]), ("extract", ["x"])):
        result = run(command, "--documents", plan, "--model", model, "--out", *options)
        assert result.code == 2
        assert "that is a plan: give it to `kvformat extract` as --plan" in result.stderr


def test_plans_and_documents_files_are_inspected(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    file, plan = tmp_path / "d.kvdocs", tmp_path / "plan"
    with source.open("a") as lines:
        lines.write('{"id": "long", "text": "' + "x" * 100 + '"}\n')
    documents = run("documents", "--documents", source, "--model", model, "--out", file, "--skip-too-long", "--json")
    planned = run("plan", "--documents", file, "--model", model, "--out", plan, "--batch-size", 2, "--json")
    assert planned.code == 0, planned.stderr
    reason = "101 tokens, but the model has 64 positions"
    for path, kind, made in ((file, "documents", documents.json), (plan, "plan", planned.json)):
        found = run("inspect", path, "--json").json
        assert found.pop("kind") == kind
        (skipped,) = found.pop("skipped")
        assert (skipped["name"], reason in skipped["reason"], made.pop("skipped")) == ("long", True, 1)
        assert {name: found[name] for name in made} == made
        assert found["text"]["special_tokens"] is True
        assert "token_ids" not in found["text"]["canary"]
        shown = run("inspect", path)
        assert (shown.code, shown.stderr) == (0, "")
        words = " ".join(shown.stdout.split())
        for wanted in (f"{kind} ", str(path), "names 5", "duplicates 1", f"tokens {made['tokens']}", reason):
            assert wanted in words
    assert (found["batch_size"], found["order"], found["shard_nbytes"]) == (2, "given", 1 << 30)
    assert open_plan(plan).digest in run("inspect", plan).stdout
    assert "components.k.layers" in run("inspect", plan).stdout
    assert open_documents(file).proof.sha256 in run("inspect", file).stdout
    refused = run("inspect", plan, "--number", 0)
    assert (refused.code, "E081" in refused.stderr, "this is a plan" in refused.stderr) == (2, True, True)


def test_damaged_ones_are_told(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    assert run("plan", "--documents", source, "--model", model, "--out", plan).code == 0
    (plan / "order.safetensors").unlink()
    assert "error [E307]: no sound plan" in run("inspect", plan).stderr
    assert "error [E002]: no documents file is there" in run("inspect", tmp_path / "none.kvdocs").stderr
    (tmp_path / "bad.kvdocs").write_bytes(b"nothing")
    assert "error [E307]: " in run("inspect", tmp_path / "bad.kvdocs").stderr
    assert "error [E001]: " in run("inspect", tmp_path).stderr


def test_an_interrupt_leaves_nothing(
    run: Any, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvformat.extract.plan.Plan.save", stop)
    assert run("plan", "--documents", source, "--model", model, "--out", tmp_path / "plan").code == 130
    assert [entry.name for entry in tmp_path.iterdir()] == ["docs.jsonl"]


def test_options_of_tokenising_are_refused_wherever_a_documents_file_is_given(
    run: Any, model: Path, source: Path, tmp_path: Path
) -> None:
    file = tmp_path / "d.kvdocs"
    run("documents", "--documents", source, "--model", model, "--out", file)
    for command in ("extract", "estimate", "plan"):
        for option in (["--truncate", 3], ["--skip-too-long"], ["--no-special-tokens"], ["--add-generation-prompt"]):
            result = run(command, "--documents", file, "--model", model, "--out", tmp_path / "out", *option)
            assert (result.code, "error [E081]: a documents file is tokenised already" in result.stderr) == (2, True)
    with pytest.raises(KVFormatError, match="tokenised already: truncation must be asked for when it is made"):
        kvformat.extract.run(model=model, documents=file, out=tmp_path / "out", truncate=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["plan", "--documents", "docs.jsonl", "--out", "s3://bucket/plan"], "a plan"),
        (["plan", "--documents", "s3://bucket/docs.jsonl", "--out", "plan"], "a source of documents"),
        (["documents", "--documents", "docs.jsonl", "--out", "s3://bucket/d.kvdocs"], "a documents file"),
        (["documents", "--documents", "gs://bucket/d", "--out", "d.kvdocs"], "a source of documents"),
        (["extract", "--documents", "s3://key@bucket/d.kvdocs", "--out", "out"], "a source of documents"),
        (["extract", "--plan", "s3://bucket/plan", "--out", "out"], "a plan"),
        (["estimate", "--documents", "s3://bucket/d.kvdocs", "--out", "out"], "a source of documents"),
    ],
)
def test_plans_and_documents_are_local(
    run: Any, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], what: str
) -> None:
    monkeypatch.chdir(source.parent)
    result = run(*arguments, "--model", model)
    assert (result.code, "error [E081]" in result.stderr, "key" in result.stderr) == (2, True, False)
    assert f"{what} is kept on a local file system, found a URL (" in result.stderr
    assert [entry.name for entry in source.parent.iterdir()] == ["docs.jsonl"]


def test_a_plan_by_a_file_url(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    made = run("plan", "--documents", source, "--model", model, "--out", f"file://{tmp_path}/plan", "--json")
    assert (made.code, made.json["location"]) == (0, str(tmp_path / "plan"))
    assert open_plan(tmp_path / "plan").digest == made.json["digest"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["plan", "--documents", "docs.jsonl", "--out", "/"], "a plan needs a name of its own"),
        (["plan", "--documents", "docs.jsonl", "--out", ""], "a plan needs a path, found an empty one"),
        (["plan", "--documents", "", "--out", "plan"], "a source of documents needs a path, found an empty one"),
        (["extract", "--documents", "", "--out", "o"], "a source of documents needs a path, found an empty one"),
        (["extract", "--plan", "", "--out", "o"], "a plan needs a path, found an empty one"),
        (["extract", "--plan", "no.kvdocs", "--out", "o"], "`kvformat extract` takes it as --documents"),
    ],
)
def test_places_that_make_no_sense(
    run: Any, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], match: str
) -> None:
    monkeypatch.chdir(source.parent)
    result = run(*arguments, "--model", model)
    assert (result.code, match in result.stderr, "Traceback" in result.stderr) == (2, True, False)
    assert [entry.name for entry in source.parent.iterdir()] == ["docs.jsonl"]


def test_a_missing_one_fails_and_a_damaged_one_is_a_fault(
    run: Any, model: Path, source: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.kvdocs").write_bytes(b"nothing")
    for plan, name in (("a", "order.safetensors"), ("b", "plan.json")):
        assert run("plan", "--documents", source, "--model", model, "--out", tmp_path / plan).code == 0
        (tmp_path / plan / name).unlink()
    for path, code, error in (
        ("none.kvdocs", 3, "E002"),
        ("none", 3, "E001"),
        ("bad.kvdocs", 1, "E307"),
        ("a", 1, "E307"),
        ("b", 1, "E307"),
    ):
        result = run("inspect", tmp_path / path, "--json")
        assert (result.code, result.json["error"]["code"]) == (code, error)
        assert f"error [{error}]" in result.stderr
    for path, code in (("none.kvdocs", 3), ("bad.kvdocs", 1)):
        assert run("check-documents", dataset, tmp_path / path).code == code


def test_what_a_plan_settled_is_said_as_it_is_typed(run: Any, model: Path, source: Path, tmp_path: Path) -> None:
    assert run("plan", "--documents", source, "--model", model, "--out", tmp_path / "plan").code == 0
    for options, said in (
        (["--layers", "0"], "--layers is 0, but the plan was made with 0-2: leave it out"),
        (["--layers", "0,2"], "--layers is 0,2, but the plan was made with 0-2: leave it out"),
        (["--images"], "--images is given, but the plan was made without it: leave it out"),
        (["--quantise", "int8"], "--quantise is int8, but the plan was made without it: leave it out"),
    ):
        result = run("extract", "--plan", tmp_path / "plan", "--model", model, "--out", tmp_path / "o", *options)
        assert (result.code, said in result.stderr) == (2, True), result.stderr
