from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import kvformat
from kvformat.errors import IdentityError, InputError, KVFormatError, KVFormatWarning, StorageError
from kvformat.extract import (
    Estimate,
    HuggingFaceExtractor,
    Plan,
    Tokeniser,
    estimate,
    extract_plan,
    make_plan,
    run,
)
from kvformat.extract.options import ModelOptions, PlanOptions, SourceOptions, TargetOptions, WorkOptions
from kvformat.interfaces import Extracted
from kvformat.spec.context import Context, differences
from kvformat.spec.schema import Schema
from tests.extract.arithmetic import Arithmetic
from tests.models import live_attention, save_tiny, tiny_model, tiny_tokenizer, write_documents

SHARD = 12 << 10  # a record of the tiny model takes one or two pages: a few records a shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "gemma3", max_position_embeddings=256)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    words = ["aa", "bb", "a longer text", "cc", "aa", "dd", "ee", "ff", "the longest text of them all", "gg", "bb"]
    lines: list[dict[str, Any]] = [{"id": f"doc-{i:02}", "text": word} for i, word in enumerate(words)]
    lines += [{"id": "chat", "messages": [{"role": "user", "content": "hi"}]}, {"id": "ids", "token_ids": [3, 1, 4]}]
    return write_documents(tmp_path / "docs.jsonl", lines)


class Event(NamedTuple):
    tokens: int
    computed: bool


class Watcher:
    """Records what it is told, and interrupts after some computed records."""

    def __init__(self, *, interrupt_after: int | None = None) -> None:
        self.phases: list[tuple[str, int, int]] = []
        self.events: list[Event] = []
        self.nbytes = 0
        self.interrupt_after = interrupt_after

    def phase(self, name: str, *, tokens: int = 0, nbytes: int = 0) -> None:
        self.phases.append((name, tokens, nbytes))

    def elsewhere(self, *, nbytes: int) -> None:
        raise AssertionError("there are no other workers")

    def times(self, times: Any) -> None:
        self.spent = times

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        self.events.append(Event(tokens, computed))
        self.nbytes += nbytes
        if sum(event.computed for event in self.events) == self.interrupt_after:
            raise KeyboardInterrupt


def plan_of(path: Path, token_lists: list[list[int]], *, schema: Schema = Arithmetic.schema, **options: Any) -> Plan:
    lines = [{"id": f"r{i}", "token_ids": ids} for i, ids in enumerate(token_lists)]
    return make_plan(write_documents(path, lines), Tokeniser(None), schema=schema, **options)


def test_published_k_and_v_are_the_live_models(model: Path, documents: Path, tmp_path: Path) -> None:
    dataset = run(model=model, documents=documents, out=tmp_path / "ds", shard_nbytes=SHARD)
    assert kvformat.verify(tmp_path / "ds").ok
    live = tiny_model("gemma3", max_position_embeddings=256)
    assert len(dataset) == 11
    assert dataset.num_names == 13
    assert dataset.manifest.totals.shards > 3
    assert sorted(dataset["doc-00"].names) == ["doc-00", "doc-04"]
    assert sorted(dataset["doc-01"].names) == ["doc-01", "doc-10"]
    assert dataset["ids"].extra("token_ids").tolist() == [3, 1, 4]
    for record in dataset:
        for layer, (key, value) in enumerate(live_attention(live, record.extra("token_ids").tolist())):
            assert torch.equal(record.slab("key", layer=layer), key)
            assert torch.equal(record.slab("value", layer=layer), value)
    assert dataset.context.model is not None
    assert dataset.text.chat_template is not None
    assert dataset.provenance["transformers"]
    assert {file.name for file in dataset.manifest.files} == {"bounds", "inv_freq", "weights"}


def test_a_finished_dataset_is_returned_when_plan_and_context_are_equal(
    model: Path, documents: Path, tmp_path: Path
) -> None:
    first = run(model=model, documents=documents, out=tmp_path / "ds")
    watcher = Watcher()
    again = run(model=model, documents=documents, out=tmp_path / "ds", progress=watcher)
    assert again.id == first.id
    assert [name for name, _, _ in watcher.phases] == ["read", "load"]
    assert watcher.events == []


def rewritten(documents: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = [json.loads(line) for line in documents.read_text().splitlines()]
    change(lines)
    write_documents(documents, lines)


CHANGES: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "one more": (lambda lines: lines.append({"id": "more", "text": "x"}), "13 names, the plan 14"),
    "one less": (lambda lines: lines.pop(), "13 names, the plan 12"),
    "another name": (lambda lines: lines[2].update(id="other"), "no record named 'other'"),
    "another text": (lambda lines: lines[2].update(text="other"), "'doc-02' is of another document"),
    "another order": (lambda lines: lines.insert(0, lines.pop(2)), "'doc-02' is number 2, the plan says 0"),
    "no chat": (lambda lines: lines.__setitem__(11, {"id": "chat", "text": "hi"}), "by other rules"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_another_plan_is_refused(change: str, model: Path, documents: Path, tmp_path: Path) -> None:
    run(model=model, documents=documents, out=tmp_path / "ds")
    edit, text = CHANGES[change]
    rewritten(documents, edit)
    for function in (run, estimate):
        with pytest.raises(IdentityError, match=text) as refused:
            function(model=model, documents=documents, out=tmp_path / "ds")  # type: ignore[operator]
        assert refused.value.code == "E118"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers": [0]}, "schema"),
        ({"dtype": "BF16"}, "schema"),
        ({"compute_dtype": "BF16", "dtype": "F32"}, "compute_dtype: F32 against BF16"),
        ({"special_tokens": False}, "by other rules"),
        ({"truncate": 9}, "by other rules"),
        ({"context": "unknown"}, "equals nothing"),
    ],
)
def test_another_context_or_schema_is_refused(
    options: dict[str, Any], text: str, model: Path, documents: Path, tmp_path: Path
) -> None:
    run(model=model, documents=documents, out=tmp_path / "ds")
    with pytest.raises(IdentityError, match=text) as refused:
        run(model=model, documents=documents, out=tmp_path / "ds", **options)
    assert refused.value.code == "E118"


def test_other_weights_under_the_same_path_are_refused(model: Path, documents: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(model, own)
    run(model=own, documents=documents, out=tmp_path / "ds")
    tiny_model("gemma3", seed=5, max_position_embeddings=256).save_pretrained(own)
    with pytest.raises(IdentityError, match=r"weights\.sha256"):
        run(model=own, documents=documents, out=tmp_path / "ds")


# -------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("after", [1, 4, 7, 10])
def test_an_interrupted_run_resumes_at_the_last_finished_shard(
    after: int, model: Path, documents: Path, tmp_path: Path
) -> None:
    whole = run(model=model, documents=documents, out=tmp_path / "whole", shard_nbytes=SHARD)
    options: dict[str, Any] = {"model": model, "documents": documents, "out": tmp_path / "ds", "shard_nbytes": SHARD}
    with pytest.raises(KeyboardInterrupt):
        run(**options, progress=Watcher(interrupt_after=after))
    assert not (tmp_path / "ds" / "kvformat.json").exists()
    watcher = Watcher()
    resumed = run(**options, progress=watcher)
    assert resumed.id == whole.id
    kept = [event for event in watcher.events if not event.computed]  # one for each shard
    computed = [event for event in watcher.events if event.computed]
    assert watcher.events == kept + computed
    assert 11 - after <= len(computed)
    assert (len(kept) > 0) == (after >= 4)  # by then the first shard is full
    assert (len(computed) == 11) == (not kept)
    assert kvformat.verify(tmp_path / "ds").ok
    phase, tokens, nbytes = next(entry for entry in watcher.phases if entry[0] == "extract")
    assert (phase, tokens, nbytes) == ("extract", sum(e.tokens for e in watcher.events), watcher.nbytes)


def test_a_directory_is_one_model_however_it_is_spelt(
    model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"documents": documents, "out": tmp_path / "ds", "shard_nbytes": SHARD}
    link = tmp_path / "link"
    link.symlink_to(model)
    staged = interrupt(options | {"model": model}, after=7)
    assert staged > 0
    monkeypatch.chdir(model.parent)
    for spelt in (model.name, f"./{model.name}/", link):
        assert estimate(**options, model=spelt).staged_nbytes == staged
    watcher = Watcher()
    assert len(run(**options, model=model.name, progress=watcher)) == 11
    assert not all(event.computed for event in watcher.events)


def test_a_target_is_looked_at_first(
    model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for function in (run, estimate):
            with pytest.raises(StorageError, match="a file stands where a directory is needed") as refused:
                function(model=tmp_path / "no model", documents=tmp_path / "no file", out=out)  # type: ignore[operator]
            assert (refused.value.code, refused.value.path) == ("E207", str(tmp_path / "file"))
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, _mode: Path(path) != tmp_path)  # for root, every directory is open
        with pytest.raises(StorageError, match="may not be written to") as refused:
            estimate(model=model, documents=documents, out=tmp_path / "ds")
        assert (refused.value.code, refused.value.path) == ("E207", str(tmp_path))
    run(model=model, documents=documents, out=tmp_path / "ds")
    with pytest.raises(IdentityError, match="its schema is another one"):
        estimate(model=model, documents=tmp_path / "no file", out=tmp_path / "ds", layers=[0])


def test_an_extractor_is_not_asked_for_what_is_staged(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "d.jsonl", [[i, i, i] for i in range(10)], shard_nbytes=32 << 10)
    first = Arithmetic()
    with pytest.raises(KeyboardInterrupt):
        extract_plan(first, plan, tmp_path / "ds", progress=Watcher(interrupt_after=7))
    second = Arithmetic()
    dataset = extract_plan(second, plan, tmp_path / "ds")
    asked = [call[0][0] for call in second.calls]
    assert asked == list(range(asked[0], 10))
    assert 0 < asked[0] < 7
    assert [record.component("k")[0, 0, 0, 0].item() for record in dataset] == list(range(10))


def test_a_failure_of_the_extractor_leaves_no_dataset_and_resumes(tmp_path: Path) -> None:
    class Failing(Arithmetic):
        def extract(self, given: Any) -> list[Extracted]:
            if len(self.calls) == 6:
                raise MemoryError
            return super().extract(given)

    plan = plan_of(tmp_path / "d.jsonl", [[i, i, i] for i in range(10)], shard_nbytes=32 << 10)
    with pytest.raises(MemoryError):
        extract_plan(Failing(), plan, tmp_path / "ds")
    assert not (tmp_path / "ds" / "kvformat.json").exists()
    assert len(extract_plan(Arithmetic(), plan, tmp_path / "ds")) == 10


def test_other_documents_do_not_continue_an_interrupted_run(tmp_path: Path) -> None:
    lists = [[i, i, i] for i in range(10)]
    with pytest.raises(KeyboardInterrupt):
        extract_plan(
            Arithmetic(),
            plan_of(tmp_path / "d.jsonl", lists, shard_nbytes=32 << 10),
            tmp_path / "ds",
            progress=Watcher(interrupt_after=7),
        )
    other = Arithmetic()
    plan = plan_of(tmp_path / "d.jsonl", lists[::-1], shard_nbytes=32 << 10)
    with pytest.warns(KVFormatWarning, match="W002.* of another run are staged here, and not continued: plan"):
        dataset = extract_plan(other, plan, tmp_path / "ds")
    assert len(other.calls) == 10
    assert [record.component("k")[0, 0, 0, 0].item() for record in dataset] == list(range(10))[::-1]


class Interrupted(NamedTuple):
    model: Path
    options: dict[str, Any]


@pytest.fixture
def interrupted(model: Path, documents: Path, tmp_path: Path) -> Interrupted:
    """A run under an unknown context that was interrupted after some staged records; its own model to change."""
    own = tmp_path / "own"
    shutil.copytree(model, own)
    options: dict[str, Any] = {
        "model": own,
        "documents": documents,
        "out": tmp_path / "ds",
        "shard_nbytes": SHARD,
        "dtype": "F32",
        "context": "unknown",
    }
    with pytest.raises(KeyboardInterrupt):
        run(**options, progress=Watcher(interrupt_after=7))
    assert list((tmp_path / "ds" / ".staging").glob("*/*.shard"))
    return Interrupted(own, options)


def changed_weights(own: Path) -> None:
    tiny_model("gemma3", seed=5, max_position_embeddings=256).save_pretrained(own)


def changed_configuration(own: Path) -> None:
    path = own / "config.json"
    config = json.loads(path.read_text())
    config["query_pre_attn_scalar"] = 99
    path.write_text(json.dumps(config))


def unchanged(own: Path) -> None:
    assert own.is_dir()


def with_high_precision_off(_own: Path) -> None:
    torch.set_float32_matmul_precision("medium")


@pytest.fixture
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize(
    ("change", "more"),
    [
        (changed_weights, {}),
        (changed_configuration, {}),
        (with_high_precision_off, {}),
        (unchanged, {"compute_dtype": "BF16"}),
        (unchanged, {"attn_implementation": "eager"}),
    ],
    ids=["weights", "configuration", "precision", "compute dtype", "attention"],
)
def test_under_an_unknown_context_another_model_continues_nothing(
    change: Callable[[Path], None], more: dict[str, Any], interrupted: Interrupted, tmp_path: Path
) -> None:
    change(interrupted.model)
    options = interrupted.options | more
    watcher = Watcher()
    with pytest.warns(KVFormatWarning, match="W002.* of another run are staged here, and not continued: "):
        resumed = run(**options, progress=watcher)
    assert all(event.computed for event in watcher.events)
    undisturbed = run(**(options | {"out": tmp_path / "whole"}))
    assert resumed.id == undisturbed.id
    assert kvformat.verify(tmp_path / "ds").ok


def test_under_an_unknown_context_the_same_model_resumes(interrupted: Interrupted, tmp_path: Path) -> None:
    watcher = Watcher()
    resumed = run(**interrupted.options, progress=watcher)
    assert 0 < sum(not event.computed for event in watcher.events) < 7
    assert [name for name, _, _ in watcher.phases] == ["read", "load", "identify", "extract", "publish"]
    assert resumed.id == run(**(interrupted.options | {"out": tmp_path / "whole"})).id


def test_a_plan_extracted_by_hand_mixes_no_models_either(model: Path, tmp_path: Path) -> None:
    first = HuggingFaceExtractor.load(model, context="unknown")
    lists = [[i, i, i] for i in range(10)]
    plan = plan_of(tmp_path / "d.jsonl", lists, schema=first.schema, shard_nbytes=SHARD)
    with pytest.raises(KeyboardInterrupt):
        extract_plan(first, plan, tmp_path / "ds", progress=Watcher(interrupt_after=7))
    other = HuggingFaceExtractor.of(tiny_model("gemma3", seed=5, max_position_embeddings=256), context="unknown")
    watcher = Watcher()
    with pytest.warns(KVFormatWarning, match="W002.* of another run are staged here, and not continued: "):
        extract_plan(other, plan, tmp_path / "ds", progress=watcher)
    assert all(event.computed for event in watcher.events)


# -------------------------------------------------------------------------------------------- order, batches, repeats


def test_batches_hold_neighbours_of_one_length_and_the_order_is_the_files(tmp_path: Path) -> None:
    lists = [[1], [2], [3], [4, 4], [5, 5], [6], [1], [7], [8], [9]]
    extractor = Arithmetic()
    plan = plan_of(tmp_path / "d.jsonl", lists, batch_size=2)
    dataset = extract_plan(extractor, plan, tmp_path / "ds")
    groups = [[[1], [2]], [[3]], [[4, 4], [5, 5]], [[6], [7]], [[8], [9]]]  # the repeat is no record
    assert extractor.calls[-len(groups) :] == groups  # before that, batches were tried
    assert [record.extra("token_ids").tolist() for record in dataset] == [ids for i, ids in enumerate(lists) if i != 6]
    assert sorted(dataset["r0"].names) == ["r0", "r6"]
    assert [name for name, _ in dataset.names()] == ["r0", "r6", *(f"r{i}" for i in range(10) if i not in (0, 6))]


def test_a_repeat_of_a_pending_document_is_stored_once(tmp_path: Path) -> None:
    extractor = Arithmetic()
    dataset = extract_plan(
        extractor, plan_of(tmp_path / "d.jsonl", [[1], [1], [1], [2]], batch_size=8), tmp_path / "ds"
    )
    assert extractor.calls[-1] == [[1], [2]]
    assert len(dataset) == 2
    assert sorted(dataset["r0"].names) == ["r0", "r1", "r2"]


def test_batched_and_single_runs_agree_up_to_rounding(model: Path, documents: Path, tmp_path: Path) -> None:
    one = run(model=model, documents=documents, out=tmp_path / "one")
    many = run(model=model, documents=documents, out=tmp_path / "many", batch_size=4, accept_batches=True)
    assert differences(one.context, many.context) == []
    for left, right in zip(one, many, strict=True):
        assert left.names == right.names
        torch.testing.assert_close(left.component("k"), right.component("k"), rtol=1e-4, atol=1e-4)


def test_non_finite_values_are_refused_unless_allowed(tmp_path: Path) -> None:
    class Broken(Arithmetic):
        def extract(self, given: Any) -> list[Extracted]:
            (found,) = super().extract(given)
            return [Extracted(components={"k": found.components["k"] / 0, "v": found.components["v"]}, extras={})]

    plan = plan_of(tmp_path / "d.jsonl", [[1]])
    with pytest.raises(InputError) as refused:
        extract_plan(Broken(), plan, tmp_path / "ds")
    assert refused.value.code == "E104"
    assert len(extract_plan(Broken(), plan, tmp_path / "ds", allow_non_finite=["k"])) == 1


# -------------------------------------------------------------------------------------------------- size and space


def test_an_estimate_is_exact_and_needs_no_weights(model: Path, documents: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    options: dict[str, Any] = {"documents": documents, "shard_nbytes": SHARD, "layers": [0, 2], "dtype": "bf16"}
    found = estimate(model=bare, out=tmp_path / "ds", **options)
    dataset = run(model=model, out=tmp_path / "ds", **options)
    assert (found.documents, found.records) == (13, len(dataset))
    assert (found.tokens, found.nbytes) == (dataset.num_tokens, dataset.nbytes)
    assert found.shards == dataset.manifest.totals.shards
    assert found.longest == max(record.num_tokens for record in dataset)
    assert found.schema == dataset.schema
    assert (found.family, found.compute_dtype) == ("gemma3_text", "F32")
    others = sum(f.stat().st_size for f in (tmp_path / "ds").rglob("*") if f.is_file()) - dataset.nbytes
    assert others <= found.index_nbytes


def full_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr("kvformat.extract.size.shutil.disk_usage", lambda _path: usage)


def test_short_space_is_refused_before_the_model_is_loaded(
    model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = estimate(model=model, documents=documents, out=tmp_path / "ds").needed_nbytes
    full_disk(monkeypatch, needed - 1)
    watcher = Watcher()
    with pytest.raises(StorageError, match=f"{needed:,} bytes are needed and {needed - 1:,} are free") as refused:
        run(model=model, documents=documents, out=tmp_path / "ds", progress=watcher)
    assert refused.value.code == "E200"
    assert [name for name, _, _ in watcher.phases] == ["read"]
    assert not (tmp_path / "ds").exists()
    full_disk(monkeypatch, needed)
    assert len(run(model=model, documents=documents, out=tmp_path / "ds")) == 11


def test_what_is_staged_is_not_needed_again(model: Path, documents: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": model, "documents": documents, "out": tmp_path / "ds", "shard_nbytes": SHARD}
    before = estimate(**options)
    with pytest.raises(KeyboardInterrupt):
        run(**options, progress=Watcher(interrupt_after=10))
    after = estimate(**options)
    assert after.staged_nbytes > 0
    assert after.needed_nbytes == before.needed_nbytes - after.staged_nbytes
    assert after.nbytes == before.nbytes


def interrupt(options: dict[str, Any], *, after: int) -> int:
    """Interrupt a run; bytes of the finished shards it left."""
    staging = Path(options["out"]) / ".staging"
    before = set(staging.glob("*/*.json"))
    with pytest.raises(KeyboardInterrupt):
        run(**options, progress=Watcher(interrupt_after=after))
    return sum(
        next(p.parent.glob(f"{p.stem}-*.shard")).stat().st_size for p in set(staging.glob("*/0*.json")) - before
    )


@pytest.mark.filterwarnings("ignore:.*of another run are staged")
def test_what_another_run_staged_is_needed_still(model: Path, documents: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": model, "documents": documents, "out": tmp_path / "ds", "shard_nbytes": SHARD}
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    for other in ({"shard_nbytes": SHARD * 2}, {"layers": [0, 1]}, {"order": "length"}):
        assert interrupt(options | other, after=10) > 0
    assert estimate(**options).staged_nbytes == 0
    own = interrupt(options, after=7)
    assert estimate(**options | {"model": moved}).staged_nbytes == own > 0  # a plan knows no model


@pytest.mark.filterwarnings("ignore:.*of another run are staged")
def test_of_several_runs_that_may_be_meant_the_one_with_least_counts(
    model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    options: dict[str, Any] = {"model": own, "documents": documents, "out": tmp_path / "ds", "shard_nbytes": SHARD}
    much = interrupt(options, after=10)
    changed_weights(own)
    little = interrupt(options, after=5)
    assert estimate(**options).staged_nbytes == little < much
    changed_weights_again = tiny_model("gemma3", seed=6, max_position_embeddings=256)
    changed_weights_again.save_pretrained(own)
    full_disk(monkeypatch, estimate(**options).needed_nbytes)
    watcher = Watcher()
    with pytest.raises(StorageError) as refused:  # it continues neither, which the weights alone tell
        run(**options, progress=watcher)
    assert refused.value.code == "E200"
    assert [name for name, _, _ in watcher.phases] == ["read", "load"]


def test_shards_without_a_receipt_and_damaged_runs_count_for_nothing(
    model: Path, documents: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": model, "documents": documents, "out": tmp_path / "ds", "shard_nbytes": SHARD}
    staged = interrupt(options, after=10)
    (run_file,) = (tmp_path / "ds").glob(".staging/*/run.json")
    (second,) = run_file.parent.glob("00000001-*.shard")
    (run_file.parent / "00000001.json").unlink()
    assert estimate(**options).staged_nbytes == staged - second.stat().st_size > 0
    run_file.write_bytes(run_file.read_bytes()[:-1])
    assert estimate(**options).staged_nbytes == 0


def test_estimates_say_whether_it_fits() -> None:
    settings: dict[str, Any] = {
        "documents": 1,
        "records": 1,
        "tokens": 1,
        "longest": 1,
        "nbytes": 100,
        "shards": 1,
        "groups": 1,
        "header_nbytes": 50,
        "index_nbytes": 10,
        "family": "llama",
        "compute_dtype": "BF16",
        "schema": Arithmetic.schema,
    }
    assert Estimate(**settings, free_nbytes=110, staged_nbytes=0).fits
    assert not Estimate(**settings, free_nbytes=109, staged_nbytes=0).fits
    assert Estimate(**settings, free_nbytes=0, staged_nbytes=1000).needed_nbytes == 0


# -------------------------------------------------------------------------------------------------------- the rest


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_both_functions_and_the_options_have_the_same_names_and_defaults() -> None:
    running, estimating = parameters(run), parameters(estimate)
    assert {parameter.kind for parameter in running.values()} == {inspect.Parameter.KEYWORD_ONLY}
    shared = {name: parameter for name, parameter in running.items() if name in estimating}
    assert estimating.pop("documents").default is inspect.Parameter.empty  # a plan has no model to estimate by
    del shared["documents"]
    assert estimating == shared
    structs = (ModelOptions, SourceOptions, PlanOptions, TargetOptions, WorkOptions)
    fields = {field.name: field for struct in structs for field in msgspec.structs.fields(struct)}
    del fields["world"], fields["shard_slots"]
    assert set(running) - {"plan", "rank", "world_size", "ray", "progress"} == set(fields)
    for field in fields.values():
        if not field.required and field.name != "documents":
            assert running[field.name].default == field.default


@pytest.mark.parametrize(
    ("line", "options", "code"),
    [
        ({"id": "a", "text": "x" * 300}, {}, "E301"),
        ({"id": "a", "token_ids": [320]}, {}, "E300"),
        ({"id": "a", "text": "<s>x"}, {}, "E305"),
        ({"id": "a"}, {}, "E300"),
        ({"id": "a", "text": "x"}, {"batch_size": 0}, "E081"),
        ({"id": "a", "text": "x"}, {"shard_nbytes": 0}, "E081"),
        ({"id": "a", "text": "x"}, {"shard_nbytes": 1 << 48}, "E081"),
        ({"id": "a", "text": "x"}, {"context": "unkown"}, "E081"),
        ({"id": "a", "text": "x"}, {"context": None}, "E081"),
        ({"id": "a", "text": "x"}, {"layers": [3]}, "E081"),
        ({"id": "a", "text": "x"}, {"layers": "0-2"}, "E081"),
        ({"id": "a", "text": "x"}, {"layers": 2}, "E081"),
        ({"id": "a", "text": "x"}, {"device": "foo"}, "E081"),
        ({"id": "a", "text": "x"}, {"truncate": 257}, "E081"),
    ],
)
def test_what_cannot_be_extracted_is_refused_before_anything_is_written(
    line: dict[str, Any], options: dict[str, Any], code: str, model: Path, tmp_path: Path
) -> None:
    documents = write_documents(tmp_path / "d.jsonl", [{"id": "good", "text": "x"}, line])
    with pytest.raises(KVFormatError) as refused:
        run(model=model, documents=documents, out=tmp_path / "ds", **options)
    assert refused.value.code == code
    assert not (tmp_path / "ds").exists()


def test_all_bad_lines_are_told_whatever_is_wrong_with_them(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"id": "a", "token_ids": [1]},
        {"id": "b", "token_ids": [320]},
        "nothing",
        {"id": "c", "text": "<s>x"},
        {"id": "d", "token_ids": [0] * 9},
        {"id": "e", "messages": [{"role": "user", "content": "x" * 7}]},
    ]
    documents = write_documents(tmp_path / "d.jsonl", lines)
    tokeniser = Tokeniser(tiny_tokenizer(), vocab_size=320, max_tokens=8)
    with pytest.raises(InputError) as refused:
        make_plan(documents, tokeniser, schema=Arithmetic.schema)
    assert (refused.value.code, refused.value.path) == ("E300", str(documents))
    first, *others = refused.value.message.split("; line ")
    assert first == "5 bad lines: line 2: token id 320 is beyond the model's vocabulary of 320"
    assert [other.partition(":")[0] for other in others] == ["3", "4", "5", "6"]
    assert "not JSON" in others[0]
    assert "adds another" in others[1]
    assert "9 tokens" in others[2]
    assert "14 tokens" in others[3]


def test_a_single_bad_document_is_told_with_its_id(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "d.jsonl", [{"id": i, "token_ids": [9]} for i in "ab"])
    with pytest.raises(InputError, match="2 bad lines"):
        make_plan(documents, Tokeniser(None, vocab_size=9), schema=Arithmetic.schema)
    rewritten(documents, lambda lines: lines[0].update(token_ids=[8]))
    with pytest.raises(InputError, match="line 2: token id 9") as refused:
        make_plan(documents, Tokeniser(None, vocab_size=9), schema=Arithmetic.schema)
    assert refused.value.record == "b"
    assert refused.value.message.startswith("line 2: ")


@pytest.mark.parametrize(
    ("tokeniser", "text"),
    [
        (Tokeniser(None), "text needs a tokenizer"),
        (Tokeniser(tiny_tokenizer(chat_template=None)), "messages need a chat template"),
    ],
)
def test_what_the_model_lacks_is_told_once(tokeniser: Tokeniser, text: str, tmp_path: Path) -> None:
    member = {"text": "x"} if text.startswith("text") else {"messages": [{"role": "user", "content": "x"}]}
    lines = ["[]", *({"id": f"{i}", **member} for i in range(9))]
    with pytest.raises(InputError) as refused:
        make_plan(write_documents(tmp_path / "d.jsonl", lines), tokeniser, schema=Arithmetic.schema)
    assert refused.value.message.startswith("2 bad lines: line 1: ")
    assert refused.value.message.count(text) == 1


def test_truncation_on_request(model: Path, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "d.jsonl", [{"id": "a", "text": "x" * 300}])
    dataset = run(model=model, documents=documents, out=tmp_path / "ds", truncate=16)
    assert dataset["a"].num_tokens == 16
    assert dataset.text.truncate == 16


def test_an_unknown_context_is_published_as_such(model: Path, documents: Path, tmp_path: Path) -> None:
    dataset = run(model=model, documents=documents, out=tmp_path / "ds", context=Context.unknown())
    assert dataset.context.kind == "unknown"
    assert dataset[0].fingerprint is None
    assert dataset.manifest.files == ()


def test_documents_are_given_as_the_path_of_a_file(model: Path, tmp_path: Path) -> None:
    for function in (run, estimate):
        with pytest.raises(KVFormatError, match="documents must be a path") as refused:
            function(model=model, documents=[{"id": "a", "text": "x"}], out=tmp_path / "ds")  # type: ignore[operator]
        assert refused.value.code == "E081"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_an_absent_device_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(KVFormatError, match="device 'cuda:0' is not available here, only cpu") as refused:
        run(model=tmp_path / "no model", documents=tmp_path / "no file", out=tmp_path / "ds", device="cuda:0")
    assert refused.value.code == "E081"


@pytest.mark.parametrize(
    ("made", "asked", "text"),
    [
        (
            "unknown",
            "unknown",
            r"both contexts are unknown, which equals nothing.*; use it as it is if you trust it, or",
        ),
        (
            "unknown",
            "derive",
            r"its context is unknown, which equals nothing.*; use it as it is if you trust it, or",
        ),
        ("derive", "unknown", r"this run's context would be unknown, .*; leave out --unknown-context"),
    ],
)
def test_an_unknown_context_is_never_a_finished_run_and_the_message_says_what_to_do(
    made: Any, asked: Any, text: str, model: Path, documents: Path, tmp_path: Path
) -> None:
    first = run(model=model, documents=documents, out=tmp_path / "ds", context=made)
    watcher = Watcher()
    with pytest.raises(IdentityError, match=text) as refused:
        run(model=model, documents=documents, out=tmp_path / "ds", context=asked, progress=watcher)
    assert (refused.value.code, refused.value.path) == ("E118", str(tmp_path / "ds"))
    assert [name for name, _, _ in watcher.phases] == ["read"]  # no model was loaded for that
    assert kvformat.open(tmp_path / "ds").id == first.id
    with pytest.raises(IdentityError, match="by other rules"):  # the plan comes first
        run(model=model, documents=documents, out=tmp_path / "ds", context=asked, truncate=9)


def test_importing_the_package_loads_no_model_library() -> None:
    code = "import sys, kvformat.extract; print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "use",
    [
        "kvformat.extract.HuggingFaceExtractor",
        "kvformat.extract.estimate(model='m', documents='d', out='o')",
        "kvformat.extract.tokenise.Tokeniser.load('m')",
    ],
)
def test_a_missing_package_is_named_with_its_remedy(use: str) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import kvformat.extract, kvformat.extract.tokenise\n"
        "try:\n"
        f"    {use}\n"
        "except kvformat.DependencyError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert "[E205]" in done.stdout
    assert "pip install 'kvformat[hf]'" in done.stdout
