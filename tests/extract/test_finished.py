"""What is said of a finished dataset that is not what a plan would make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import IdentityError
from kvformat.extract.documents import DocumentsWriter
from kvformat.extract.finished import check_plan
from kvformat.extract.plan import Plan, make_plan
from kvformat.read.dataset import Dataset
from kvformat.spec.context import Context, Text
from kvformat.spec.document import Document

SCHEMA = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="F32")
IDS = {"a": [1, 2, 3], "b": [4, 5]}
TEXT = Text(tokenizer="ab" * 32, special_tokens=True)


def plan_of(ids: dict[str, list[int]], text: Text) -> Plan:
    with DocumentsWriter(None) as writer:
        for name, one in ids.items():
            writer.add(name, Document.of(np.array(one, dtype=np.int32)))
        return make_plan(writer.finish(text), schema=SCHEMA)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    with kvformat.create(tmp_path / "ds", schema=SCHEMA, context=Context.unknown(), text=TEXT) as writer:
        for name, ids in IDS.items():
            values = torch.ones(1, len(ids), 1, 4)
            writer.add(name, {"k": values, "v": values}, token_ids=ids)
    return kvformat.open(tmp_path / "ds")


def test_the_plan_it_was_made_of_is_fine(dataset: Dataset) -> None:
    check_plan(dataset, plan_of(IDS, TEXT))


OTHER_TEXT = Text(tokenizer="ab" * 32, special_tokens=False)
RULES = "by other rules (special_tokens: True here, False wanted)"


@pytest.mark.parametrize(
    ("ids", "text", "said"),
    [
        (IDS, OTHER_TEXT, f"its text became the same token ids {RULES}"),
        ({**IDS, "b": [4, 6]}, TEXT, "its record 'b' is of another document"),
        (
            {**IDS, "b": [4, 6]},
            OTHER_TEXT,
            f"its record 'b' is of another document, and its text became token ids {RULES}",
        ),
        ({**IDS, "c": [7]}, OTHER_TEXT, f"it has 2 names, the plan 3, and its text became token ids {RULES}"),
        ({"a": IDS["a"], "c": [4, 5]}, TEXT, "it has no record named 'c'"),
        ({"b": IDS["b"], "a": IDS["a"]}, TEXT, "its record 'b' is number 1, the plan says 0"),
    ],
)
def test_documents_are_named_before_the_rules_that_made_them(
    ids: dict[str, list[int]], text: Text, said: str, dataset: Dataset
) -> None:
    with pytest.raises(IdentityError) as told:
        check_plan(dataset, plan_of(ids, text))
    assert told.value.code == "E118"
    assert told.value.message == f"a dataset is here already, and {said}; choose another location"
