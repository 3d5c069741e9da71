"""Several workers of one plan: whoever makes a shard, the dataset is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import kvformat
import kvformat.extract.publishing
from kvformat.cli.app import app
from kvformat.errors import ConflictError, IdentityError, KVFormatWarning, UsageError, make_error
from kvformat.extract import HuggingFaceExtractor, Plan, Tokeniser, extract_plan, make_plan, open_plan, run
from kvformat.extract.progress import Silent
from kvformat.interfaces import Extracted
from tests.extract.arithmetic import Arithmetic
from tests.models import save_tiny, write_documents

REPOSITORY = Path(__file__).resolve().parents[2]
SHARD = 32 << 10  # two records of three tokens


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(tmp_path, shard_nbytes=SHARD)


def plan_of(tmp_path: Path, number: int = 20, **options: Any) -> Plan:
    lines = [{"id": f"r{i}", "token_ids": [i, i, i]} for i in range(number)]
    documents = write_documents(tmp_path / "d.jsonl", lines)
    return make_plan(documents, Tokeniser(None), schema=Arithmetic.schema, **options)


def work(plan: Plan, out: Path, rank: int, world_size: int, **options: Any) -> tuple[str, list[int]]:
    extractor = Arithmetic()
    return extract_plan(extractor, plan, out, rank=rank, world_size=world_size, **options).id, extractor.first


@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_side_by_side_publish_what_one_does(plan: Plan, tmp_path: Path, world_size: int) -> None:
    expected, _ = work(plan, tmp_path / "one", 0, 1)
    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(lambda rank: work(plan, tmp_path / "ds", rank, world_size), range(world_size)))
    assert {identity for identity, _ in found} == {expected}
    assert {first for _, made in found for first in made} == set(range(20))
    assert kvformat.verify(tmp_path / "ds").ok
    assert sorted(path.name for path in (tmp_path / "ds").iterdir()) == [
        "index",
        "kvformat.json",
        "manifest",
        "shards",
    ]


def test_one_worker_of_several_makes_what_the_others_never_begin(plan: Plan, tmp_path: Path) -> None:
    expected, _ = work(plan, tmp_path / "one", 0, 1)
    identity, made = work(plan, tmp_path / "ds", 1, 3)
    assert identity == expected
    assert sorted(made) == list(range(20))
    assert made[:6] == [2, 3, 8, 9, 14, 15]  # its own shards come first


class Stopping(Silent):
    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        self._left -= computed
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("first", "then"), [((0, 3), (0, 1)), ((0, 1), (1, 2)), ((2, 5), (0, 2))])
def test_another_number_of_workers_continues(
    plan: Plan, tmp_path: Path, first: tuple[int, int], then: tuple[int, int]
) -> None:
    expected, _ = work(plan, tmp_path / "one", 0, 1)
    with pytest.raises(KeyboardInterrupt):
        work(plan, tmp_path / "ds", *first, progress=Stopping(10))
    kept = len(list((tmp_path / "ds").glob(".staging/*/0*.json")))
    assert kept >= 1
    identity, made = work(plan, tmp_path / "ds", *then)
    assert identity == expected
    assert len(made) == 20 - 2 * kept


def staged_shards(out: Path) -> list[Path]:
    return sorted(out.glob(".staging/*/0*-*.shard"))


@pytest.mark.parametrize("shard", [0, 1])
def test_a_damaged_shard_of_a_worker_that_never_comes_back_is_made_again(
    plan: Plan, tmp_path: Path, shard: int
) -> None:
    expected, _ = work(plan, tmp_path / "one", 0, 1)
    with pytest.raises(KeyboardInterrupt):
        work(plan, tmp_path / "ds", 0, 1, progress=Stopping(12))
    path = staged_shards(tmp_path / "ds")[shard]
    data = bytearray(path.read_bytes())
    data[-9000] ^= 1
    path.write_bytes(data)
    with pytest.warns(KVFormatWarning, match="W006"):
        identity, made = work(plan, tmp_path / "ds", 0, 2)
    assert identity == expected
    assert {2 * shard, 2 * shard + 1} <= set(made)
    assert kvformat.verify(tmp_path / "ds").ok


def test_a_shard_that_is_gone_when_it_is_published_is_made_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = work(plan, tmp_path / "one", 0, 1)
    real = kvformat.extract.publishing.seal
    calls = []

    def losing(workshop: Any, *args: Any, **options: Any) -> str:
        calls.append(None)
        if len(calls) == 1:
            staged_shards(tmp_path / "ds")[3].unlink()
        return real(workshop, *args, **options)

    monkeypatch.setattr(kvformat.extract.publishing, "seal", losing)
    with pytest.warns(KVFormatWarning, match="W006"):
        identity, made = work(plan, tmp_path / "ds", 0, 1)
    assert (identity, len(calls)) == (expected, 2)
    assert sorted(made) == sorted([*range(20), 6, 7])


def test_a_worker_stops_where_others_published(plan: Plan, tmp_path: Path) -> None:
    """One that was paused meanwhile, say: it makes no shard more."""
    expected, _ = work(plan, tmp_path / "one", 0, 1)
    first: list[str] = []

    class Pausing(Arithmetic):
        def extract(self, given: Any) -> list[Extracted]:
            if not first:
                first.append(work(plan, tmp_path / "ds", 1, 2)[0])
            return super().extract(given)

    extractor = Pausing()
    found = extract_plan(extractor, plan, tmp_path / "ds", rank=0, world_size=2)
    assert {found.id, *first} == {expected}
    assert extractor.first == [0, 1]  # the shard it had in hand


def test_a_worker_that_differs_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract_plan(Arithmetic(torch="1"), plan, tmp_path / "ds", rank=0, world_size=2, progress=Stopping(10))
    with pytest.raises(IdentityError, match=r"provenance\.torch \('2' here, '1' there\)") as refused:
        extract_plan(Arithmetic(torch="2"), plan, tmp_path / "ds", rank=1, world_size=2)
    assert refused.value.code == "E120"
    with pytest.raises(IdentityError, match="tag"):
        extract_plan(Arithmetic(torch="1"), plan, tmp_path / "ds", tag="other", rank=1, world_size=2)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (None, 2)])
def test_ranks_that_make_no_sense(plan: Plan, tmp_path: Path, monkeypatch, rank: Any, world_size: int) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError):
        extract_plan(Arithmetic(), plan, tmp_path / "ds", rank=rank, world_size=world_size)


# ------------------------------------------------------------------------------------------------------ documents


def test_a_poisoned_document_is_named_and_handled_as_asked(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(kvformat.InputError) as refused:
        extract_plan(Arithmetic(wrong=[6]), plan, tmp_path / "ds")
    assert (refused.value.code, refused.value.record, refused.value.layer) == ("E104", "r6", 1)
    with pytest.raises(ConflictError, match=r"1 names are of documents that were skipped: 'r6' \(E104: ") as missing:
        extract_plan(Arithmetic(wrong=[6]), plan, tmp_path / "ds", on_error="skip")
    assert missing.value.code == "E119"
    again = Arithmetic(wrong=[6])
    dataset = extract_plan(again, plan, tmp_path / "ds", on_error="skip", allow_skips=True)
    assert again.first == []  # all shards are there
    assert [skipped.name for skipped in dataset.manifest.skipped] == ["r6"]
    assert "E104" in dataset.manifest.skipped[0].reason
    assert len(dataset) == 19
    assert "r6" not in [name for name, _ in dataset.names()]
    assert dataset["r7"].component("k")[0, 0, 0, 0].item() == 7
    assert kvformat.verify(tmp_path / "ds").ok
    same = extract_plan(Arithmetic(), plan, tmp_path / "other", on_error="skip")
    assert len(same) == 20


def test_once_the_cause_is_mended_what_was_skipped_is_made(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConflictError):
        extract_plan(Arithmetic(wrong=[6]), plan, tmp_path / "ds", on_error="skip")
    mended = Arithmetic()
    dataset = extract_plan(mended, plan, tmp_path / "ds", on_error="skip")
    assert mended.first == [6, 7]
    assert len(dataset) == 20
    assert dataset.id == work(plan, tmp_path / "one", 0, 1)[0]


def test_a_shard_of_which_nothing_is_left_keeps_no_other_from_being_made(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="shard") as refused:
        extract_plan(Arithmetic(wrong=[6, 7]), plan, tmp_path / "ds", on_error="skip", allow_skips=True)
    assert refused.value.code == "E119"
    mended = Arithmetic()
    dataset = extract_plan(mended, plan, tmp_path / "ds", on_error="skip")
    assert mended.first == [6, 7]  # all others are there
    assert dataset.id == work(plan, tmp_path / "one", 0, 1)[0]


class Odd(Arithmetic):
    """Gives something else than it should, from some call on."""

    def __init__(self, change: Any, *, after: int) -> None:
        super().__init__()
        self._change = change
        self._left = after

    def extract(self, given: Any) -> Any:
        self._left -= 1
        found = super().extract(given)
        return found if self._left >= 0 else self._change(found)


WRONG: dict[str, Any] = {
    "nothing": lambda _found: None,
    "too few": lambda _found: [],
    "nothing for one": lambda found: [None, *found[1:]],
    "an error": lambda found: [make_error("E301", "too long"), *found[1:]],
    "no mapping": lambda found: [found[0]._replace(components=None), *found[1:]],
    "arrays": lambda found: [found[0]._replace(components={"k": np.zeros(3), "v": np.zeros(3)}), *found[1:]],
    "no values": lambda found: [
        found[0]._replace(components={name: tensor.to("meta") for name, tensor in found[0].components.items()}),
        *found[1:],
    ],
}


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", list(WRONG))
def test_what_an_extractor_must_not_give_is_refused(
    kind: str, batch_size: int, after: int, on_error: Any, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, batch_size=batch_size, shard_nbytes=64 << 10)
    with pytest.raises(kvformat.InputError) as refused:
        extract_plan(Odd(WRONG[kind], after=after), plan, tmp_path / "ds", on_error=on_error)
    assert refused.value.code == "E103"
    assert len(extract_plan(Arithmetic(), plan, tmp_path / "ds")) == 20


def test_batches_that_change_bits_are_not_made_unless_accepted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, batch_size=4)
    with pytest.warns(KVFormatWarning, match="W007"):
        single = extract_plan(Arithmetic(batched=0.25), plan, tmp_path / "single")
    assert single["r3"].component("k")[0, 0, 0, 0].item() == 3
    assert single.provenance["batches"] == "single"
    accepted = extract_plan(Arithmetic(batched=0.25), plan, tmp_path / "accepted", accept_batches=True)
    assert accepted["r3"].component("k")[0, 0, 0, 0].item() == 3.25
    assert accepted.provenance["batches"] == "accepted, differ by up to 0.25"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal = extract_plan(Arithmetic(), plan, tmp_path / "equal")
    assert equal.provenance["batches"] == "equal"


# ------------------------------------------------------------------------------------------- models and launchers


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONWARNINGS")}
    return kept | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **more}


def launch(*arguments: object, **more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environment(**more),
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return of_the_first(done.stdout)


def of_the_first(printed: str) -> dict[str, Any]:
    """What the first of the workers printed that have one standard output in common."""
    found, decoder = {}, json.JSONDecoder()
    while printed := printed.lstrip():
        document, end = decoder.raw_decode(printed)
        found = found if document.get("rank") else document
        printed = printed[end:]
    return found


@pytest.mark.slow
def test_a_real_model_gives_the_same_dataset_by_every_launcher(smollm2: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    whole = AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=4, dtype=torch.bfloat16)
    whole.save_pretrained(model)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(model)
    texts = [f"{number} bottles of beer on the wall, " * (1 + number % 5) for number in range(40)]
    documents = write_documents(tmp_path / "d.jsonl", [{"id": f"{i}", "text": text} for i, text in enumerate(texts)])
    cli = ("-m", "kvformat")
    plan = tmp_path / "plan"
    planned = launch(
        *cli, "plan", "--model", model, "--documents", documents, "--out", plan, "--shard-size", "512K",
        "--batch-size", "4", "--order", "length", "--json",
    )  # fmt: skip
    assert planned["shards"] >= 5
    extract = ("extract", "--plan", plan, "--model", model, "--threads", "1", "--json")
    one = launch(*cli, *extract, "--out", tmp_path / "one")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *cli)
    two = launch(*torchrun, *extract, "--out", tmp_path / "two")
    array = [
        subprocess.Popen(
            [sys.executable, *cli, *map(str, extract), "--out", tmp_path / "array", "--rank", str(rank),
             "--world-size", "2"],
            stdout=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env=environment(),
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [process.wait(250) for process in array] == [0, 0]
    found = {one["id"], two["id"], kvformat.open(tmp_path / "array").id}
    if importlib.util.find_spec("ray") is not None:
        ray = launch(*cli, *extract, "--out", tmp_path / "ray", "--engine", "ray", "--ray-workers", "2")
        found.add(ray["id"])
    assert len(found) == 1
    dataset = kvformat.open(tmp_path / "two")
    assert dataset.num_names == 40
    assert dataset.provenance["batches"] in ("equal", "single")
    report = kvformat.verify(tmp_path / "two")
    assert report.ok


def test_a_plan_and_its_documents_give_one_dataset(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama", max_position_embeddings=64)
    documents = write_documents(tmp_path / "d.jsonl", [{"id": f"{n}", "text": f"text {n}"} for n in range(12)])
    direct = run(model=model, documents=documents, out=tmp_path / "direct", shard_nbytes=24 << 10, layers=[0, 2])
    arguments = ["plan", "--model", model, "--documents", documents, "--out", tmp_path / "plan", "--layers", "0,2"]
    done = CliRunner().invoke(app, [str(one) for one in [*arguments, "--shard-size", "24K"]], prog_name="kvformat")
    assert done.exit_code == 0, done.output
    planned = run(model=model, plan=tmp_path / "plan", out=tmp_path / "planned")
    assert planned.id == direct.id
    assert run(model=model, plan=open_plan(tmp_path / "plan"), out=tmp_path / "planned").id == direct.id
    settled = ({"layers": [0]}, {"quantise": "int8"}, {"batch_size": 2}, {"truncate": 9}, {"documents": documents})
    for options in settled:
        with pytest.raises(UsageError):
            run(model=model, plan=tmp_path / "plan", out=tmp_path / "other", **options)


def test_workers_that_compute_with_other_threads_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama", max_position_embeddings=64)
    documents = write_documents(tmp_path / "d.jsonl", [{"id": f"{n}", "text": f"text {n}"} for n in range(30)])
    options: dict[str, Any] = {"model": model, "documents": documents, "out": tmp_path / "ds", "world_size": 2}
    options["shard_nbytes"] = 24 << 10
    before = torch.get_num_threads()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(**options, rank=0, threads=1, progress=Stopping(9))
        with pytest.raises(IdentityError, match="threads") as refused:
            run(**options, rank=1, threads=2)
        assert refused.value.code == "E120"
        dataset = run(**options, rank=1, threads=1)
        assert dataset.provenance["threads"] == "1"
    finally:
        torch.set_num_threads(before)


def test_a_finished_dataset_is_returned_to_extractors_of_ones_own(plan: Plan, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, "llama", max_position_embeddings=64)
    extractor = HuggingFaceExtractor.load(model)
    lines = [{"id": f"r{i}", "token_ids": [i, i, i]} for i in range(5)]
    given = make_plan(write_documents(tmp_path / "x.jsonl", lines), Tokeniser(None), schema=extractor.schema)
    first = extract_plan(extractor, given, tmp_path / "ds")
    assert extract_plan(extractor, given, tmp_path / "ds").id == first.id
    work(plan, tmp_path / "unknown", 0, 1)
    with pytest.raises(IdentityError, match="equals nothing") as refused:
        work(plan, tmp_path / "unknown", 0, 1)
    assert refused.value.code == "E118"


def test_threads_are_left_as_they_are_unless_asked_for(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama", max_position_embeddings=64)
    documents = write_documents(tmp_path / "d.jsonl", [{"id": "a", "text": "text"}])
    before = torch.get_num_threads()
    try:
        run(model=model, documents=documents, out=tmp_path / "one")
        assert torch.get_num_threads() == before
        run(model=model, documents=documents, out=tmp_path / "two", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert threading.active_count() < 50
