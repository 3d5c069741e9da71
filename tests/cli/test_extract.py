from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvformat
import kvformat.extract
from kvformat.cli.headers import header_nbytes, header_warning
from kvformat.cli.output import size_text
from kvformat.cli.progress import Lines
from kvformat.cli.watch import Watch
from kvformat.errors import make_error
from kvformat.extract import CheckpointSource, PipelineTimes
from kvformat.extract.options import RayOptions
from tests.cli.conftest import command, environment
from tests.models import save_tiny, write_documents

TEXTS = ["aa", "bb", "a longer text", "aa", "the longest text of them all"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", max_position_embeddings=64)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(
        tmp_path / "docs.jsonl", [{"id": f"doc-{n} [red]", "text": text} for n, text in enumerate(TEXTS)]
    )


@pytest.fixture
def arguments(model: Path, documents: Path, tmp_path: Path) -> list[object]:
    return ["--model", model, "--documents", documents, "--out", tmp_path / "out", "--shard-size", "16K"]


# ---------------------------------------------------------------------------------------------------------- extract


def test_extract_publishes_what_the_function_would(run, arguments, model, documents, tmp_path: Path) -> None:
    result = run("extract", *arguments, "--layers", "0,2", "--dtype", "bf16")
    assert result.code == 0, result.stderr
    assert run("verify", tmp_path / "out").code == 0
    dataset = kvformat.open(tmp_path / "out")
    same = kvformat.extract.run(
        model=model,
        documents=documents,
        out=tmp_path / "same",
        layers=[0, 2],
        dtype="BF16",
        shard_nbytes=16 << 10,
    )
    assert dataset.id == same.id
    assert dataset.schema.components[0].layers == (0, 2)
    assert (len(dataset), dataset.num_names) == (4, 5)
    first, identity, counts, rates, limits, saved = result.stdout.splitlines()
    assert first == f"published: {tmp_path / 'out'}"
    assert identity == f"    id {dataset.id}"
    assert counts.startswith(f"    4 records, 5 names, {dataset.num_tokens:,} tokens, ")
    assert "tokens/s" in rates
    assert re.search(r" tokens/s, [\d.]+ [kM]B/s$", rates)
    assert limits.startswith("    limited by: ")
    assert re.fullmatch(
        rf"    load against recompute: {dataset.num_tokens} tokens in .* ms, verified, against .* times as long", saved
    )
    lines = result.stderr.splitlines()
    assert lines[0] == "reading documents"
    assert lines[1] == "loading the model"
    assert lines[2].startswith(f"extracting {dataset.num_tokens:,} tokens: ")
    assert lines[3] == "publishing"
    headers = header_nbytes(dataset)
    shards = dataset.manifest.totals.shards
    assert lines[4].startswith(f"warning: the headers of {shards} shards take {size_text(headers)}, more than their ")
    assert lines[4].endswith(f"data ({size_text(dataset.nbytes - headers)}): choose a larger --shard-size")
    shutil.rmtree(tmp_path / "out")
    estimated = run("estimate", *arguments, "--layers", "0,2", "--dtype", "bf16")
    assert (estimated.code, estimated.stderr.splitlines()) == (0, lines[4:])


def test_a_finished_dataset_stays_and_is_fine(run, arguments, tmp_path: Path, snapshot) -> None:
    first = run("extract", *arguments, "--json")
    assert (first.json["ok"], first.json["already_finished"]) == (True, False)
    assert first.json["computed_tokens"] == first.json["tokens"] == kvformat.open(tmp_path / "out").num_tokens
    before = snapshot(tmp_path / "out")
    again = run("extract", *arguments, "--json")
    assert (again.code, again.json["already_finished"], again.json["id"]) == (0, True, first.json["id"])
    larger = run("extract", *arguments[:-1], "1GiB").stdout.splitlines()
    assert larger[0] == f"already finished, with equal plan and context: {tmp_path / 'out'}"
    largest = max(path.stat().st_size for path in (tmp_path / "out" / "shards").rglob("*") if path.is_file())
    estimated = run("estimate", *arguments, "--json")
    assert (estimated.json["finished"], estimated.json["needed_nbytes"]) == (True, 0)
    assert estimated.stderr == ("a dataset of these documents is here already: extraction only compares its context\n")
    assert larger[3].startswith(f"    its shards are of up to {size_text(largest)}; shard size, batch size, device ")
    other = run("extract", *arguments, "--layers", "0", "--json")
    assert (other.code, other.json["error"]["code"]) == (3, "E118")
    assert snapshot(tmp_path / "out") == before


def test_an_unknown_context_says_so_the_second_time(run, arguments, tmp_path: Path, snapshot) -> None:
    first = run("extract", *arguments, "--unknown-context")
    assert first.code == 0
    assert first.stderr.splitlines()[1:3] == ["loading the model", "hashing the weights"]
    before = snapshot(tmp_path / "out")
    again = run("extract", *arguments, "--unknown-context")
    assert (again.code, again.stdout) == (3, "")
    error = again.stderr.splitlines()[-1]
    assert error.startswith("error [E118]: a dataset is here already, and both contexts are unknown, ")
    assert "use it as it is if you trust it, or choose another location" in error
    assert snapshot(tmp_path / "out") == before


def test_bad_lines_name_file_line_and_reason(run, arguments, documents: Path, tmp_path: Path) -> None:
    documents.write_text('{"id": "a", "text": "b"}\n{"id": "c"}\n', encoding="utf-8")
    for name in ("extract", "estimate"):
        result = run(name, *arguments)
        assert result.code == 3
        error = result.stderr.splitlines()[-1]
        assert error.startswith("error [E300]: line 2: ")
        assert error.endswith(f"(path {documents})")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_extraction_resumes(run, monkeypatch, model: Path, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "many.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(30)])
    out = tmp_path / "out"
    arguments = ["extract", "--model", model, "--documents", documents, "--out", out, "--shard-size", "16K"]
    advance = Watch.advance

    def interrupt(self: Watch, *, tokens: int, nbytes: int, computed: bool) -> None:
        advance(self, tokens=tokens, nbytes=nbytes, computed=computed)
        if self.nbytes >= 10 * nbytes:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "advance", interrupt)
        stopped = run(*arguments)
    assert (stopped.code, stopped.stdout) == (130, "")
    assert stopped.stderr.endswith("\ninterrupted: finished shards are kept, the same command resumes after them\n")
    (work,) = run("status", out, "--json").json["staging"]
    assert work["state"] == "abandoned"
    shards = json.loads(run("estimate", *arguments[1:], "--json").stdout)["shards"]
    assert 3 <= work["shards"] <= 5 < shards
    resumed = run(*arguments, "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.json["records"] == 30
    share = resumed.json["resumed_nbytes"] / (resumed.json["resumed_nbytes"] + resumed.json["computed_nbytes"])
    assert share == pytest.approx(work["shards"] / shards, rel=0.2)
    assert run("verify", out).code == 0


def test_interrupted_before_a_shard_is_finished_nothing_is_said_to_be_kept(run, monkeypatch, arguments) -> None:
    def interrupt(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    for name in ("phase", "advance"):  # before anything is staged, and after the first record
        with monkeypatch.context() as patched:
            patched.setattr(Watch, name, interrupt)
            stopped = run("extract", *arguments)
        assert stopped.code == 130
        told = stopped.stderr.splitlines()[-1]
        assert told == "interrupted: no shard was finished, the same command begins anew"


def test_a_signal_stops_an_extraction(run, model: Path, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "many.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(500)])
    out = tmp_path / "out"
    env = environment()
    del env["PYTHONWARNINGS"]  # what torch and transformers deprecate at import is theirs
    with subprocess.Popen(
        command(
            ["extract", "--model", model, "--documents", documents, "--out", out, "--shard-size", "16K", "--json"]
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as extracting:
        assert extracting.stderr is not None
        while not (line := extracting.stderr.readline()).startswith("extracting "):
            assert line
        # 500 records in 250 shards that must be synced are far from done.
        extracting.send_signal(signal.SIGINT)
        printed, complained = extracting.communicate(timeout=120)
    assert extracting.returncode == 130
    kept = any(work["shards"] for work in run("status", out, "--json").json.get("staging", ()))
    assert complained == (
        "interrupted: finished shards are kept, the same command resumes after them\n"
        if kept
        else "interrupted: no shard was finished, the same command begins anew\n"
    )
    assert json.loads(printed)["error"]["code"] == "interrupted"
    assert run("verify", out).code == 3  # nothing is published


def test_every_option_reaches_the_function(run, monkeypatch) -> None:
    caught: list[dict[str, Any]] = []

    def refuse(**options: Any) -> None:
        caught.append(options)
        raise make_error("E306", "far enough")

    monkeypatch.setattr(kvformat.extract, "run", refuse)
    monkeypatch.setattr(kvformat.extract, "estimate", refuse)

    def given(*args: str) -> dict[str, Any]:
        assert run(*args).code == 3
        caught[-1].pop("progress", None)
        return caught[-1]

    required = ["--model", "m", "--documents", "d", "--out", "o"]
    shared = {
        "model": "m",
        "documents": "d",
        "out": "o",
        "revision": None,
        "dtype": None,
        "compute_dtype": None,
        "layers": None,
        "shard_nbytes": 1 << 30,
        "truncate": None,
        "add_generation_prompt": False,
        "special_tokens": True,
    }
    shared |= {
        "columns": None,
        "spool": None,
        "storage_options": {},
        "key_stage": "attention",
        "quantise": None,
        "images": False,
        "order": "given",
        "batch_size": 1,
        "batch_tokens": None,
        "too_long": "refuse",
    }
    own = {
        "plan": None,
        "checkpoint": None,
        "adapter": None,
        "adapter_mode": None,
        "device": "cpu",
        "attn_implementation": None,
        "threads": None,
        "accept_batches": False,
        "context": "derive",
        "rank": 0,
        "world_size": 1,
        "ray": None,
        "on_error": "fail",
        "allow_skips": False,
        "allow_non_finite": (),
    }
    assert given("estimate", *required) == shared
    assert given("extract", *required) == shared | own
    options = ["--revision", "r", "--dtype", "f16", "--compute-dtype", "BF16", "--layers", "0-1", "--shard-size", "2M"]
    options += ["--truncate", "9", "--add-generation-prompt", "--no-special-tokens", "--skip-too-long"]
    options += ["--column", "id=clip", "--spool", "s", "--storage-option", "anon=true", "--key-stage", "raw"]
    options += ["--quantise", "int8", "--images", "--order", "length", "--batch-size", "4", "--batch-tokens", "99"]
    changed = {
        "revision": "r",
        "dtype": "F16",
        "compute_dtype": "BF16",
        "layers": [0, 1],
        "shard_nbytes": 2 << 20,
        "truncate": 9,
        "add_generation_prompt": True,
        "special_tokens": False,
        "too_long": "skip",
        "columns": {"id": "clip"},
        "spool": "s",
        "storage_options": {"anon": True},
        "key_stage": "raw",
        "quantise": "int8",
        "images": True,
        "order": "length",
        "batch_size": 4,
        "batch_tokens": 99,
    }
    assert given("estimate", *required, *options) == shared | changed
    more = ["--device", "cuda:1", "--attn-implementation", "eager", "--unknown-context", "--threads", "3"]
    more += ["--allow-non-finite", "k", "--allow-non-finite", "v", "--accept-batches", "--rank", "1"]
    more += ["--world-size", "3", "--on-error", "skip", "--allow-skips", "--adapter", "a", "--adapter-mode", "merge"]
    more += ["--checkpoint", "dcp:c", "--select", "^net", "--rename", "^net[.]=", "--checkpoint-dtype", "f32"]
    checkpoint = CheckpointSource(kind="dcp", path="c", select="^net", rename=(("^net[.]", ""),), dtype="F32")
    assert given("extract", *required, *options, *more) == shared | changed | {
        "plan": None,
        "checkpoint": checkpoint,
        "adapter": "a",
        "adapter_mode": "merge",
        "device": "cuda:1",
        "attn_implementation": "eager",
        "threads": 3,
        "accept_batches": True,
        "context": "unknown",
        "rank": 1,
        "world_size": 3,
        "ray": None,
        "on_error": "skip",
        "allow_skips": True,
        "allow_non_finite": ("k", "v"),
    }
    cluster = [
        "--engine",
        "ray",
        "--ray-address",
        "here",
        "--ray-workers",
        "2",
        "--ray-cpus",
        "4",
        "--ray-gpus",
        "0.5",
    ]
    ray = RayOptions(address="here", num_workers=2, num_cpus=4, num_gpus=0.5)
    assert given("extract", *required, *cluster) == shared | own | {"ray": ray}
    assert given("estimate", *required, "--quantize", "int8") == shared | {"quantise": "int8"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--documents", "d", "--engine", "ray", "--rank", "0"], "--rank and --world-size are for workers that are"),
        (["--documents", "d", "--engine", "ray", "--world-size", "1"], "with --engine ray, start a single process"),
        (["--documents", "d", "--ray-gpus", "1"], "--ray-cpus and --ray-gpus go with --engine ray"),
        ([], "give --documents SRC or --plan DIR, one of them"),
        (["--documents", "d", "--plan", "p"], "give --documents SRC or --plan DIR, one of them"),
        (["--plan", "p", "--order", "length", "--batch-size", "2"], "has settled --order, --batch-size: leave it out"),
        (["--plan", "p", "--no-special-tokens"], "the plan has settled --no-special-tokens"),
        (["--plan", "p", "--shard-size", "1M", "--truncate", "3"], "the plan has settled --shard-size, --truncate"),
    ],
)
def test_options_that_do_not_go_together(run, monkeypatch, options: list[str], said: str) -> None:
    monkeypatch.setattr(kvformat.extract, "run", pytest.fail)
    result = run("extract", "--model", "m", "--out", "o", *options)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error [E081]: ")
    assert said in result.stderr


def test_other_spellings_of_a_scheme(run, arguments, tmp_path: Path) -> None:
    made = run("extract", *arguments, "--quantize=INT8", "--json")
    assert made.code == 0, made.stderr
    again = run("extract", *arguments, "--quantise", "int8", "--json")
    assert (again.code, again.json["id"]) == (0, made.json["id"])
    assert {c.dtype for c in kvformat.open(tmp_path / "out").schema.components} == {"I8", "F32"}
    assert "quantize" not in run("extract", "--help").stdout


def test_a_hint_where_the_machine_was_busy(run, monkeypatch, arguments) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    limited = PipelineTimes(elapsed_s=10.0, model_s=9.0, tokens=1, nbytes=1)
    monkeypatch.setattr(Watch, "times", lambda watch, _times: setattr(watch, "spent", limited))
    one = run("extract", *arguments, "--threads", "1", "--json")
    assert (one.code, one.json["hint"]) == (0, None)
    shutil.rmtree(one.json["location"])
    monkeypatch.setattr("kvformat.extract.reasoner.threads_used", lambda: 4)
    told = run("extract", *arguments).stdout.splitlines()[-1]
    assert told.startswith("    hint: the machine was busy when this began (load 1000.0 on ")
    assert told.endswith("with 4 threads, which then wait for each other: --threads 1 may be many times as fast")


@pytest.mark.parametrize("name", ["extract", "estimate"])
@pytest.mark.parametrize(
    "option",
    [
        ["--layers", "3-1"],
        ["--dtype", "int4"],
        ["--compute-dtype", "f64"],
        ["--shard-size", "big"],
        ["--truncate", "0"],
    ],
)
def test_options_that_make_no_sense(run, monkeypatch, name: str, option: list[str]) -> None:
    monkeypatch.setattr(kvformat.extract, "run", pytest.fail)
    monkeypatch.setattr(kvformat.extract, "estimate", pytest.fail)
    result = run(name, "--model", "m", "--documents", "d", "--out", "o", *option)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error [E081]: ")


# --------------------------------------------------------------------------------------------------------- estimate


def test_the_estimate_is_what_is_written(run, arguments, tmp_path: Path) -> None:
    result = run("estimate", *arguments, "--json")
    assert result.code == 0, result.stderr
    assert not (tmp_path / "out").exists()
    found = result.json
    assert run("extract", *arguments).code == 0
    dataset = kvformat.open(tmp_path / "out")
    totals = dataset.manifest.totals
    assert (found["documents"], found["records"], found["tokens"]) == (totals.names, totals.records, totals.tokens)
    assert (found["nbytes"], found["shards"], found["fits"]) == (totals.nbytes, totals.shards, True)
    shown = " ".join(run("estimate", *arguments).stdout.split())
    headers = header_nbytes(dataset)
    assert found["header_nbytes"] == headers
    for wanted in (
        f"tokens {totals.tokens:,}, ",
        f"shards {totals.shards:,}, ",
        "documents 5, 4 of them different",
        f"headers {size_text(headers)} of that",
        f"a token {size_text(round((totals.nbytes - headers) / totals.tokens))}, padding included, headers not",
        "index at most 1.05 MB, with room to spare",
    ):
        assert wanted in shown
    assert "components.k.layers 0-2" in shown


def test_headers_are_warned_of_where_larger_shards_would_save_them() -> None:
    assert header_warning(shards=1, headers=90, nbytes=100) is None
    assert header_warning(shards=2, headers=50, nbytes=100) is None
    assert header_warning(shards=2, headers=51, nbytes=100) is not None


def test_short_of_space(run, monkeypatch, arguments, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    told = run("estimate", *arguments, "--json")
    assert (told.code, told.json["fits"], told.json["free_nbytes"]) == (0, False, 1000)
    assert told.stderr.splitlines()[-1].startswith("warning: ")
    refused = run("extract", *arguments, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (3, "E200")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------- progress


def test_rates_are_of_what_was_computed_in_this_run(capsys) -> None:
    now = [0.0]

    def clock() -> float:
        return now[0]

    watch = Watch(Lines(clock=clock), clock=clock)
    watch.phase("read")
    now[0] = 100.0
    watch.phase("load")
    assert not watch.extracted
    now[0] = 200.0
    watch.phase("extract", tokens=3_000, nbytes=4_000_000_000)
    watch.advance(tokens=1_000, nbytes=1_000_000_000, computed=False)
    now[0] = 220.0
    watch.advance(tokens=2_000, nbytes=2_000_000_000, computed=True)
    watch.phase("publish")
    now[0] = 999.0
    assert (watch.tokens, watch.nbytes, watch.resumed_nbytes, watch.seconds) == (
        2_000,
        2_000_000_000,
        1_000_000_000,
        20.0,
    )
    assert watch.rates() == "100 tokens/s, 100 MB/s"
    assert capsys.readouterr().err.splitlines() == [
        "reading documents",
        "loading the model",
        "extracting 3,000 tokens: 4 GB",
        "extracting 3,000 tokens: 3 GB of 4 GB, 75 %, 100 tokens/s, 100 MB/s",
        "publishing",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--threads", str(10**23)], "--threads must be 1 to "),
        (["--threads", "100000"], "--threads must be 1 to "),
        (["--adapter", "a"], "an adapter needs its mode: --adapter-mode merge, or --adapter-mode apply"),
        (["--adapter-mode", "merge"], "--adapter-mode merge goes with an adapter"),
        (
            ["--allow-non-finite", "zz"],
            "--allow-non-finite names zz, which the schema has not; it has k, v, token_ids",
        ),
        (["--preset", "mot"], "--preset goes with a checkpoint: name that too, --checkpoint dcp:DIR"),
        (["--select", "a", "--checkpoint-dtype", "F32"], "--select, --checkpoint-dtype go with a checkpoint"),
        (["--checkpoint", "dcp:x", "--checkpoint-dtype", "Q"], "--checkpoint-dtype must be one of BF16, F16, F32"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_model_is_loaded(
    run, arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], said: str
) -> None:
    monkeypatch.setattr("kvformat.extract.model_job.load_extractor", lambda *_, **__: pytest.fail("it was loaded"))
    result = run("extract", *arguments, *options)
    assert (result.code, f"error [E081]: {said}" in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_spool_that_cannot_be_is_refused_first(run, arguments, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvformat.extract.model_job.prepare", lambda *_, **__: pytest.fail("documents were read"))
    (tmp_path / "file").touch()
    given = [*arguments[:4], "--out", "memory://spool-that-cannot-be/x", "--spool", tmp_path / "file" / "s"]
    result = run("extract", *given)
    assert (result.code, "error [E207]: a file stands where a directory is needed" in result.stderr) == (3, True)
