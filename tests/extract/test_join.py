from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import IdentityError, InputError, UsageError
from kvformat.extract import Tokeniser
from kvformat.extract.join import check_documents
from kvformat.read.dataset import Dataset
from kvformat.spec.context import Context, Text
from kvformat.spec.document import Document
from kvformat.spec.schema import Schema
from tests.extract.auditing import with_inputs
from tests.models import CHAT_TEMPLATE, tiny_tokenizer, write_documents

IDS = {"a": [256, 7, 8, 9], "b": [256, 17, 18], "c": list(range(50, 90)), "d": [5]}
SCHEMA = Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=2, dtype="F32")


def publish(
    path: Path, documents: dict[str, Any] = IDS, *, schema: Schema = SCHEMA, text: Text | None = None
) -> Dataset:
    with kvformat.create(path, schema=schema, context=Context.unknown(), text=text) as writer:
        for name, given in documents.items():
            document = given if isinstance(given, Document) else Document.of(given)
            values = torch.zeros(1, document.num_tokens, 1, 2)
            writer.add(name, {"k": values, "v": values}, document=document)
    return kvformat.open(path)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return publish(tmp_path / "ds")


def kinds(report: Any) -> list[tuple[str, str | None]]:
    return [(finding.kind, finding.name) for finding in report.findings]


def test_equal_documents(dataset: Dataset, tmp_path: Path) -> None:
    report = check_documents(dataset, IDS.items())
    assert report.ok
    assert (report.id, report.location) == (dataset.id, dataset.location)
    assert (report.looked_at, report.matched, report.total, report.findings) == (4, 4, 0, ())
    report.raise_for_findings()
    lines = [{"id": name, "token_ids": ids} for name, ids in IDS.items()]
    assert check_documents(dataset, write_documents(tmp_path / "docs.jsonl", lines)) == report
    assert check_documents(dataset, lambda: iter(lines)) == report
    tensors = {name: torch.tensor(ids) for name, ids in IDS.items()}
    assert check_documents(dataset, tensors.items()) == report


@pytest.mark.parametrize(
    ("name", "ids", "position", "hint"),
    [
        ("a", [256, 7, 1000, 9], 2, ""),
        ("a", [256, 256, 7, 8, 9], 1, ": one token more at the start, its first one twice (BOS doubled?)"),
        ("a", [3, 256, 7, 8, 9], 0, ": one token more at the start"),
        ("a", [7, 8, 9], 0, ": the first token is missing (BOS dropped?)"),
        ("c", list(range(50, 80)), 30, ": the given one ends early (truncated, or an end token?)"),
        ("c", list(range(50, 91)), 40, ": that of the dataset ends early (truncated, or an end token?)"),
        ("c", list(range(60, 90)), 0, ": the given one lacks the start"),
        ("c", list(range(40, 90)), 0, ": that of the dataset lacks the start"),
        ("d", [6], 0, ""),
        ("d", [5, 5], 1, ": one token more at the start, its first one twice (BOS doubled?)"),
    ],
)
def test_the_first_token_that_differs(dataset: Dataset, name: str, ids: list[int], position: int, hint: str) -> None:
    report = check_documents(dataset, (IDS | {name: ids}).items())
    assert kinds(report) == [("tokens", name)]
    (finding,) = report.findings
    assert (finding.position, finding.record) == (position, list(IDS).index(name))
    assert finding.message.startswith(
        f"token {position} differs ({len(IDS[name])} tokens in the dataset, {len(ids)} given)"
    )
    assert finding.message.endswith(hint or "given)")
    assert (report.ok, report.matched, report.tokens) == (False, 3, 1)
    assert (finding.expected, finding.found, finding.expected_text) == (None, None, None)  # nobody asked for values
    with pytest.raises(IdentityError) as caught:
        report.raise_for_findings()
    assert (caught.value.code, caught.value.record) == ("E312", name)


def test_values_are_told_when_they_are_asked_for(dataset: Dataset) -> None:
    given = (IDS | {"b": [256, 40, 18], "d": [5, 41]}).items()
    (b, d) = check_documents(dataset, given, values=True).findings
    assert (b.expected, b.found, b.expected_text, b.found_text) == (17, 40, None, None)
    assert (d.expected, d.found) == (None, 41)
    tokenizer = tiny_tokenizer()
    (b, d) = check_documents(dataset, given, values=True, tokenizer=tokenizer).findings
    assert (b.expected_text, b.found_text) == (tokenizer.decode([17]), tokenizer.decode([40]))
    assert (d.expected_text, d.found_text) == (None, tokenizer.decode([41]))
    assert check_documents(dataset, given, tokenizer=tokenizer).findings[0].found_text is None
    assert "40" not in check_documents(dataset, given).findings[0].message


def test_names_of_one_side_alone(dataset: Dataset) -> None:
    given = {"a": IDS["a"], "new": [1, 2], "renamed": IDS["c"], "d": IDS["d"]}
    report = check_documents(dataset, given.items())
    assert kinds(report) == [("missing", "new"), ("missing", "renamed"), ("extra", "b"), ("extra", "c")]
    assert (report.missing, report.extra, report.matched) == (2, 2, 2)
    assert "none of this document" in report.findings[0].message
    assert "under other names, such as 'c'" in report.findings[1].message
    assert report.findings[2].record == 1
    assert kinds(check_documents(dataset, given.items(), subset=True)) == [("missing", "new"), ("missing", "renamed")]
    assert check_documents(dataset, [("d", [5])], subset=True).ok


def test_several_names_of_a_document_and_a_name_twice_are_fine(tmp_path: Path) -> None:
    with kvformat.create(tmp_path / "ds", schema=SCHEMA, context=Context.unknown()) as writer:
        for name in ("a", "b"):
            values = torch.zeros(1, len(IDS[name]), 1, 2)
            writer.add(name, {"k": values, "v": values}, token_ids=IDS[name])
        for number in range(700):
            writer.alias(f"null-{number}", "a")
    dataset = kvformat.open(tmp_path / "ds")
    given = [("a", IDS["a"]), ("b", IDS["b"]), *((f"null-{number}", IDS["a"]) for number in range(700))]
    report = check_documents(dataset, [*given, ("a", IDS["a"])])
    assert report.ok
    assert (report.looked_at, report.matched) == (703, 703)
    report = check_documents(dataset, given[:-5])
    assert kinds(report) == [("extra", f"null-{number}") for number in range(695, 700)]
    report = check_documents(dataset, [*given, ("null-3", IDS["b"])])
    assert kinds(report) == [("tokens", "null-3")]


def test_the_first_of_each_kind_are_told_and_all_are_counted(dataset: Dataset) -> None:
    given = [(f"new-{number}", [number]) for number in range(100)] + [(name, [1, 1]) for name in IDS]
    report = check_documents(dataset, given, limit=3)
    assert (report.missing, report.tokens, report.extra, report.total) == (100, 4, 0, 104)
    assert kinds(report) == [*(("missing", f"new-{n}") for n in range(3)), *(("tokens", name) for name in "abc")]
    with pytest.raises(IdentityError, match="and 103 more findings"):
        report.raise_for_findings()
    assert check_documents(dataset, [("a", IDS["a"])], limit=2).extra == 3


def test_positions_masks_and_media_count_where_they_are_given(tmp_path: Path) -> None:
    shifted = Document.of([1, 2, 3], position_ids=[4, 5, 6], mask="prefix", prefix_length=1)
    dataset = publish(tmp_path / "ds", {"s": shifted, "p": [1, 2, 3]}, schema=with_inputs(SCHEMA, rows=1))
    assert check_documents(dataset, [("s", shifted), ("p", Document.of([1, 2, 3]))]).ok
    report = check_documents(
        dataset, [("s", Document.of([1, 2, 3])), ("p", Document.of([1, 2, 3], position_ids=[0, 1, 9]))]
    )
    assert kinds(report) == [("inputs", "s"), ("inputs", "p")]
    assert "the mask (prefix in the dataset, causal given), the positions" in report.findings[0].message
    assert report.findings[1].message.endswith("are not: the positions")
    assert check_documents(dataset, [("s", [1, 2, 3]), ("p", [1, 2, 3])]).ok  # ids alone say nothing of them


def test_without_stored_ids_documents_still_differ(tmp_path: Path) -> None:
    schema = Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=2, dtype="F32", token_ids=False)
    dataset = publish(tmp_path / "ds", schema=schema)
    assert check_documents(dataset, IDS.items()).ok
    (finding,) = check_documents(dataset, (IDS | {"a": [256, 7, 8]}).items()).findings
    assert (finding.kind, finding.position) == ("tokens", None)
    assert "stores no token ids that would tell where" in finding.message


# -- text -----------------------------------------------------------------------------------------------------------


def rules_of(tokenizer: Any, **rules: Any) -> Text:
    return Tokeniser(tokenizer, **rules).text({"text", "messages"})


def test_text_is_tokenised_by_the_rules_of_the_dataset(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("some words")["input_ids"]
    dataset = publish(tmp_path / "ds", {"t": ids[:6]}, text=rules_of(tokenizer, truncate=6))
    documents = write_documents(tmp_path / "docs.jsonl", [{"id": "t", "text": "some words"}])
    assert check_documents(dataset, documents, tokenizer=tokenizer).ok
    with pytest.raises(InputError, match="text needs a tokenizer, give a model that has one") as caught:
        check_documents(dataset, documents)
    assert (caught.value.code, caught.value.record) == ("E305", "t")
    # A trainer's own ids are taken as they are: what it will use is longer than what is stored.
    tokenised = write_documents(tmp_path / "ids.jsonl", [{"id": "t", "token_ids": ids}])
    assert kinds(check_documents(dataset, tokenised, tokenizer=tokenizer)) == [("tokens", "t")]


def test_the_tokenizer_is_compared_with_the_datasets(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    dataset = publish(tmp_path / "ds", text=rules_of(tokenizer))
    report = check_documents(dataset, IDS.items())
    assert report.ok
    assert "nothing is known of the tokenizer of these documents" in report.notes[0]
    report = check_documents(dataset, IDS.items(), tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE + " "))
    assert [finding.kind for finding in report.findings] == ["text"]
    assert "chat_template: " in report.findings[0].message
    assert report.matched == 4
    report = check_documents(dataset, IDS.items(), tokenizer=tiny_tokenizer(chat_template=None))
    assert [finding.kind for finding in report.findings] == ["text"]


def test_a_documents_file_says_how_it_was_tokenised(tmp_path: Path) -> None:
    from kvformat.extract.documents import write_documents as tokenise

    tokenizer = tiny_tokenizer()
    source = write_documents(
        tmp_path / "docs.jsonl",
        [{"id": "t", "text": "some words"}, {"id": "u", "text": "some words"}, {"id": "v", "text": "x"}],
    )
    made = {text: tokenizer(text)["input_ids"] for text in ("some words", "x")}
    dataset = publish(
        tmp_path / "ds", {"t": made["some words"], "v": made["x"]}, text=Tokeniser(tokenizer).text({"text"})
    )
    tokenise(source, tmp_path / "same.kvdocs", Tokeniser(tokenizer))
    report = check_documents(dataset, tmp_path / "same.kvdocs")
    assert kinds(report) == [("missing", "u")]
    assert "such as 't'" in report.findings[0].message
    tokenise(source, tmp_path / "other.kvdocs", Tokeniser(tokenizer, special_tokens=False))
    report = check_documents(dataset, tmp_path / "other.kvdocs")
    assert (report.text, report.tokens, report.missing) == (2, 2, 1)
    assert "special_tokens: True against False" in report.findings[0].message
    assert "canary: one text gives other ids from token 0 on" in report.findings[1].message


def test_messages_with_images_are_refused_once(dataset: Dataset, tmp_path: Path) -> None:
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]
    lines = [{"id": name, "messages": [{"role": "user", "content": content}]} for name in "ab"]
    documents = write_documents(tmp_path / "docs.jsonl", lines)
    for tokenizer in (None, tiny_tokenizer()):
        with pytest.raises(InputError, match=r"give the documents file they become") as caught:
            check_documents(dataset, documents, tokenizer=tokenizer)
        assert (caught.value.code, caught.value.record) == ("E309", "a")


# -- what is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "code"),
    [
        ([], "E306"),
        ([("a", [])], "E110"),
        ([("a", ["x"])], "E110"),
        ([("a",)], "E081"),
        ([(1, [2])], "E081"),
        (7, "E081"),
    ],
)
def test_what_is_no_document_is_refused(dataset: Dataset, documents: Any, code: str) -> None:
    with pytest.raises((InputError, UsageError)) as caught:
        check_documents(dataset, documents)
    assert caught.value.code == code


def test_a_line_that_is_none_is_refused_with_its_number(dataset: Dataset, tmp_path: Path) -> None:
    lines: list[Any] = [{"id": "a", "token_ids": IDS["a"]}, "{}"]
    with pytest.raises(InputError, match="line 2: ") as caught:
        check_documents(dataset, write_documents(tmp_path / "docs.jsonl", lines))
    assert caught.value.code == "E300"
    with pytest.raises(UsageError):
        check_documents(dataset, IDS.items(), limit=0)


def test_progress_counts_documents(dataset: Dataset) -> None:
    seen: list[int] = []
    check_documents(dataset, ((f"n-{n}", [n + 1]) for n in range(1500)), subset=True, progress=seen.append)
    assert seen == [512, 1024, 1500]


def test_memory_does_not_grow_with_the_documents(dataset: Dataset) -> None:
    def many(count: int) -> Iterator[tuple[str, Any]]:
        for number in range(count):
            yield f"clip-{number}", np.array([number, number + 1, 2])

    peaks = []
    check_documents(dataset, many(600))
    for count in (2_000, 20_000):
        tracemalloc.start()
        report = check_documents(dataset, many(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert report.missing == count
    assert peaks[1] < 1.5 * peaks[0]
