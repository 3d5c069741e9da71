from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kvformat
from kvformat.cli.progress import Bar, Lines, meter
from kvformat.extract import HuggingFaceExtractor, Tokeniser
from tests.cli.datasets import flip, interrupted
from tests.extract.auditing import publish
from tests.extract.checkpoints import save_dcp, training_state
from tests.models import save_tiny, tiny_config, tiny_model, tiny_tokenizer, write_documents
from tests.vision import picture, save_vision


def shard_of(dataset: Path, number: int) -> Path:
    return dataset / kvformat.open(dataset).index.shard(number).path


def test_a_sound_dataset(run, published: Path) -> None:
    result = run("verify", published)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("ok: no faults at level 4\n")
    assert f"id {kvformat.open(published).id}" in result.stdout
    found = run("verify", published, "--json").json
    assert (found["ok"], found["level"], found["records"], found["findings"], found["warnings"]) == (
        True,
        4,
        4,
        [],
        [],
    )
    assert found["id"] == kvformat.open(published).id


def test_all_faults_with_their_codes(run, dataset: Path) -> None:
    flip(shard_of(dataset, 0), -4097)
    flip(shard_of(dataset, 1), 12)
    covered = next((dataset / "files").iterdir())
    flip(covered, 5)
    (dataset / "[red]README").write_text("x", encoding="ascii")
    report = kvformat.verify(dataset)
    result = run("verify", dataset, "--json")
    found = result.json
    assert (result.code, found["ok"], result.stderr) == (1, False, "")
    assert [f["code"] for f in found["findings"]] == [f.code for f in report.findings]
    assert {"E006", "E063", "E077"} <= {f["code"] for f in found["findings"]}
    assert set(found["findings"][0]) == {"code", "name", "message", "path", "record", "layer"}
    assert found["findings"][0]["path"] == str(covered)
    assert [w["code"] for w in found["warnings"]] == ["W001"]
    shown = run("verify", dataset)
    assert shown.code == 1
    for finding in found["findings"]:
        assert f"fault [{finding['code']}] {finding['name']}: {finding['message']}\n" in shown.stdout
    assert f"path {dataset}/[red]README\n" in shown.stdout
    assert f"FAULTY: {len(report.findings)} faults, 1 warning at level 4\n" in shown.stdout


def test_levels(run, dataset: Path) -> None:
    flip(shard_of(dataset, 0), 4096 * 2 + 100)  # a value
    assert [run("verify", dataset, "--level", level).code for level in (1, 2, 3, 4)] == [0, 0, 1, 1]


def test_the_expected_id(run, published: Path) -> None:
    identity = kvformat.open(published).id
    assert run("verify", published, "--level", 1, "--expected-id", identity).code == 0
    result = run("verify", published, "--level", 1, "--expected-id", "0" * 64, "--json")
    assert (result.code, [f["code"] for f in result.json["findings"]]) == (1, ["E007"])


def test_an_unreadable_dataset_is_a_finding(run, dataset: Path) -> None:
    (dataset / "kvformat.json").write_bytes(b"{}")
    result = run("verify", dataset)
    assert (result.code, result.stderr) == (1, "")
    assert result.stdout.startswith("fault [E01")
    assert "FAULTY: 1 fault at level 4\n" in result.stdout


def test_staged_work_is_a_warning(run, dataset: Path) -> None:
    unfinished = interrupted(dataset.parent / "unfinished")
    (unfinished / ".staging").rename(dataset / ".staging")
    result = run("verify", dataset)
    assert result.code == 0
    assert result.stdout.startswith("warning [W002] staging-left: ")
    assert "ok: no faults, 1 warning at level 4\n" in result.stdout


# --------------------------------------------------------------------------------------------------------- progress


def test_progress_lines_come_now_and_then(capsys) -> None:
    now = [0.0]
    with Lines(clock=lambda: now[0]) as lines:
        lines.begin("working", total=2_000_000)
        for second in range(1, 25):
            now[0] = float(second)
            lines.update(second * 10_000, note="fast")
        lines.begin("sealing")
    assert capsys.readouterr() == (
        "",
        "working: 2 MB\nworking: 100 kB of 2 MB, 5 %, fast\nworking: 200 kB of 2 MB, 10 %, fast\nsealing\n",
    )


def test_progress_without_a_total_or_announcements(capsys) -> None:
    now = [0.0]
    with Lines(clock=lambda: now[0], phases=False) as lines:
        lines.begin("working")
        now[0] = 11.0
        lines.update(5)
        lines.update(6)
    assert capsys.readouterr().err == "working: 5 bytes\n"


def test_a_bar_only_on_a_terminal(monkeypatch) -> None:
    assert isinstance(meter(), Lines)
    monkeypatch.setattr("kvformat.cli.output.is_terminal", lambda _stream: True)
    assert isinstance(meter(), Bar)


def test_verify_tells_how_far_it_is(run, monkeypatch, published: Path) -> None:
    told: list[tuple[int, int | None]] = []

    class Listening(Lines):
        def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
            told.append((done, total))

    monkeypatch.setattr("kvformat.cli.verify.meter", lambda *, phases: Listening(phases=phases))
    assert run("verify", published).code == 0
    assert told[-1] == (told[-1][1], told[-1][1])
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# -------------------------------------------------------------------------------------------------------- recompute


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", max_position_embeddings=64)


@pytest.fixture(scope="module")
def extracted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two layers in BF16, computed in F32, with the text section of the model's tokenizer."""
    tokenizer = tiny_tokenizer()
    extractor = HuggingFaceExtractor.load(model, layers=[0, 1], dtype="BF16", text=Tokeniser(tokenizer).text({"text"}))
    made = {text: tokenizer(text)["input_ids"] for text in ("aa", "bb", "a longer text")}
    return Path(publish(tmp_path_factory.mktemp("extracted") / "dataset", extractor, made).location)


def test_records_are_computed_again(run, model: Path, extracted: Path) -> None:
    result = run("verify", extracted, "--recompute", "100%", "--model", model)
    assert result.code == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[0] == "ok: no faults at level 2"
    assert "k (key), default bound 0.00781 of the relative RMS of any record: no difference" in lines
    assert "v (value), default bound 0.00781 of the relative RMS of any record: no difference" in lines
    assert lines[-1].startswith("ok: 3 records of 3 computed again (seed 0), ")
    assert lines[-1].endswith("3 equal bit by bit, 0 beyond the bounds")
    assert result.stderr.splitlines() == ["loading the model", "computing again"]
    found = run("verify", extracted, "--recompute", 2, "--model", model, "--seed", 5, "--json", "--level", 1).json
    assert (found["ok"], found["level"]) == (True, 1)
    again = found["recomputed"]
    assert (again["sampled"], again["computed"], again["equal"], again["seed"]) == (2, 2, 2, 5)
    assert [component["name"] for component in again["components"]] == ["k", "v"]
    assert [layer["layer"] for layer in again["components"][0]["layers"]] == [0, 1]


def test_another_model_is_a_fault(run, extracted: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "llama", max_position_embeddings=64, seed=1)
    result = run("verify", extracted, "--recompute", "1%", "--model", other)
    assert result.code == 1
    assert "differs [E083]: the model is another one: weights: " in result.stdout
    assert "differs [E311]: 'k' differs in 2 of 2 layers" in result.stdout
    assert "DIFFERENT: 1 record of 3 computed again" in result.stdout
    assert (
        " layer   equal    largest        RMS   largest relative   RMS relative   of the worst record" in result.stdout
    )
    found = run("verify", extracted, "--recompute", "1%", "--model", other, "--json")
    assert (found.code, found.json["ok"], found.json["findings"]) == (1, False, [])
    assert [f["code"] for f in found.json["recomputed"]["findings"]] == ["E083", "E311"]
    assert found.json["recomputed"]["components"][0]["layers"][0]["relative_rms"] > 0.1


def test_documents_are_tokenised_again(run, model: Path, extracted: Path, tmp_path: Path) -> None:
    lines = [{"id": text, "text": text} for text in ("aa", "bb", "a longer text")]
    documents = write_documents(tmp_path / "docs.jsonl", lines)
    call = ["verify", extracted, "--recompute", "3", "--model", model, "--documents"]
    assert run(*call, documents).code == 0
    result = run(
        *call, write_documents(tmp_path / "other.jsonl", [*lines[:2], {"id": "a longer text", "text": "a longer one"}])
    )
    assert result.code == 1
    assert (
        "differs [E312]: token 10 differs (14 tokens in the dataset, 13 given) (record a longer text)" in result.stdout
    )


def test_records_of_a_checkpoint_are_computed_again(run, tmp_path: Path) -> None:
    live, ema = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    checkpoint = save_dcp(training_state(live, ema), tmp_path / "dcp")
    config = tmp_path / "config"  # configuration alone: no weights could come from there
    tiny_config("qwen3").save_pretrained(config)
    path = Path(publish(tmp_path / "ds", HuggingFaceExtractor.of(ema)).location)
    call = ["verify", path, "--recompute", "100%", "--model", config, "--checkpoint", f"dcp:{checkpoint}"]
    result = run(*call, "--preset", "mot", "--weights", "ema", "--checkpoint-dtype", "f32")
    assert result.code == 0, result.stdout + result.stderr
    assert "5 equal bit by bit, 0 beyond the bounds" in result.stdout
    by_hand = ["--select", r"^net_ema\.language_model\.model\.(?!.*(_moe_gen|_und_for_gen)\b)"]
    assert run(*call, *by_hand, "--rename", r"^net_ema\.language_model\.=").code == 0
    result = run(*call, "--preset", "mot", "--weights", "live")
    assert result.code == 1
    assert "differs [E083]: the model is another one: weights: " in result.stdout
    result = run(*call, "--preset", "mot", "--weights", "ema", "--checkpoint-dtype", "bf16")
    assert (result.code, "[E308]" in result.stderr) == (3, True)


@pytest.fixture
def pictured(run, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model that takes images, a dataset of one, and its documents as JSON Lines."""
    model = save_vision(tmp_path / "vision")
    picture(24, 16).save(tmp_path / "a.png")
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what is it?"}]
    documents = write_documents(
        tmp_path / "v.jsonl", [{"id": "v", "messages": [{"role": "user", "content": content}]}]
    )
    options = ["--documents", documents, "--model", model, "--images", "--out"]
    assert run("extract", *options, tmp_path / "ds").code == 0
    assert run("documents", *options, tmp_path / "v.kvdocs").code == 0
    return model, tmp_path / "ds", documents


def test_documents_with_images_need_their_documents_file(run, pictured: tuple[Path, Path, Path]) -> None:
    model, path, documents = pictured
    call = ["verify", path, "--recompute", "100%", "--model", model]
    for more, found in ([], "none"), (["--documents", documents], "'"):
        result = run(*call, *more)
        assert (result.code, "DIFFERENT" in result.stdout) == (2, False)
        assert "give it (--documents FILE.kvdocs, which `kvformat documents --images` makes), found " + found in (
            result.stderr.replace("\n", " ")
        )
        assert "loading the model" not in result.stderr
    result = run(*call, "--documents", documents.with_suffix(".kvdocs"))
    assert result.code == 0, result.stdout + result.stderr
    assert "1 equal bit by bit, 0 beyond the bounds" in result.stdout
    result = run("check-documents", path, documents, "--model", model)
    assert (result.code, result.stdout) == (3, "")
    assert "give the documents file they become (`kvformat documents --images`)" in result.stderr
    assert "ask for it" not in result.stderr
    assert run("check-documents", path, documents.with_suffix(".kvdocs")).code == 0


def test_nothing_is_computed_of_a_faulty_dataset(run, model: Path, extracted: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(extracted, tmp_path / "damaged"))
    flip(shard_of(damaged, 0), 12)
    result = run("verify", damaged, "--recompute", "1%", "--model", model)
    assert result.code == 1
    assert "FAULTY" in result.stdout
    assert result.stderr == "nothing was computed again: mend the faults first\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--recompute", "1%"], "--recompute needs the model"),
        (["--model", "m", "--seed", "3"], "--model, --seed: only together with --recompute"),
        (["--checkpoint", "dcp:x", "--weights", "ema"], "--checkpoint, --weights: only together with --recompute"),
        (["--recompute", "1%", "--model", "m", "--preset", "mot"], "name that too, --checkpoint dcp:DIR"),
        (["--recompute", "0%", "--model", "m"], "--recompute must be a share"),
        (["--recompute", "1%", "--model", "m", "--compute-dtype", "int8"], "--compute-dtype must be"),
    ],
)
def test_options_that_make_no_sense(run, published: Path, options: list[str], said: str) -> None:
    result = run("verify", published, *options)
    assert result.code == 2
    assert said in result.stderr


def test_a_model_without_a_tokenizer_is_no_obstacle(run, extracted: Path, tmp_path: Path) -> None:
    bare = save_tiny(tmp_path / "bare", "llama", max_position_embeddings=64, tokenizer=False)
    result = run("verify", extracted, "--recompute", "1%", "--model", bare)
    assert result.code == 0
    assert "no tokenizer is compared: " in result.stderr
    assert "note: no tokenizer was given: that of the dataset is not compared" in result.stdout


def test_an_interrupt_is_told_as_one(run, model: Path, extracted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HuggingFaceExtractor, "extract", stop)
    result = run("verify", extracted, "--recompute", "1%", "--model", model, "--json")
    assert (result.code, result.json["error"]["code"]) == (130, "interrupted")
