from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvformat.errors import InputError, KVFormatWarning, make_error
from kvformat.extract.batch_check import (
    BatchCheck,
    Batches,
    Difference,
    batch_cases,
    check_batches,
    choose_batches,
    effective_groups,
)
from kvformat.interfaces import Extracted
from kvformat.spec.document import Document
from tests.extract.pipelines import Plain


class Item(NamedTuple):
    document: Document


class Groups:
    """A plan of forward groups: (tokens, documents) of each, by shard."""

    def __init__(self, *shards: Sequence[tuple[int, int]]) -> None:
        self.lengths: list[int] = []
        self.shards: list[list[range]] = []
        for shard in shards:
            self.shards.append([])
            for tokens, size in shard:
                first = len(self.lengths)
                self.lengths += [tokens] * size
                self.shards[-1].append(range(first, first + size))
        self.read: list[int] = []

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def groups(self, ordinal: int):
        yield from self.shards[ordinal]

    def num_tokens_of(self, record: int) -> int:
        return self.lengths[record]

    def document(self, record: int) -> Item:
        self.read.append(record)
        return Item(Document.of([record + 1] * self.lengths[record]))


class Together(Plain):
    """Adds to K and V of documents that are computed together.

    Parameters
    ----------
    error
        What is added, by (tokens, documents) of the forward: component, layer, amount.
    """

    def __init__(self, error: dict[tuple[int, int], tuple[str, int, float]] | None = None, **options) -> None:
        super().__init__(**options)
        self.error = error or {}

    def extract(self, documents):
        found = super().extract(documents)
        form = documents[0].num_tokens, len(documents)
        if form in self.error:
            name, layer, amount = self.error[form]
            for one in found:
                one.components[name][layer, -1] += amount
        return found


PLAN = Groups([(5, 2), (9, 1), (5, 2)], [(3, 8), (7, 3), (5, 2)], [(30, 1), (7, 3)])


def test_the_largest_the_commonest_and_the_longest_are_tried() -> None:
    cases = batch_cases(PLAN)
    assert [(case.num_tokens, case.size) for case in cases] == [(3, 8), (5, 2), (7, 3)]
    assert cases[1].groups == (range(2), range(3, 5), range(16, 18))


def test_a_form_is_tried_once() -> None:
    assert [case[:2] for case in batch_cases(Groups([(4, 2), (4, 2)]))] == [(4, 2)]


def test_documents_alone_are_nothing_to_try() -> None:
    plan = Groups([(5, 1), (6, 1)])
    check = check_batches(Plain(), plan)
    assert (check.forms, check.equal, plan.read) == ((), False, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_batches(check, accept=False) == Batches(together=False, recorded="single")


def test_equal_bits() -> None:
    model = Together()
    check = check_batches(model, PLAN)
    assert check == BatchCheck(forms=((3, 8), (5, 2), (7, 3)), differences=())
    assert check.equal
    assert [len(call) for call in model.calls] == [8, *[1] * 8, 2, 1, 1, 3, 1, 1, 1]
    assert choose_batches(check, accept=False) == Batches(together=True, recorded="equal")


def test_where_bits_differ_and_how_much() -> None:
    model = Together({(5, 2): ("v", 1, 0.5), (3, 8): ("k", 0, -0.125)})
    check = check_batches(model, PLAN)
    assert not check.equal
    assert check.differences == (
        Difference(num_tokens=3, size=8, component="k", layer=0, max_abs=0.125),
        Difference(num_tokens=5, size=2, component="v", layer=1, max_abs=0.5),
    )
    assert check.worst == check.differences[1]
    with pytest.warns(KVFormatWarning, match="one by one") as caught:
        assert choose_batches(check, accept=False) == Batches(together=False, recorded="single")
    (warning,) = caught
    assert warning.message.code == "W007"
    assert "8 documents of 3 tokens: up to 0.12 in 'k', layer 0" in str(warning.message)
    assert "2 documents of 5 tokens: up to 0.5 in 'v', layer 1" in str(warning.message)


def test_accepted_by_name() -> None:
    check = check_batches(Together({(7, 3): ("k", 1, 0.25)}), PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = choose_batches(check, accept=True)
    assert chosen == Batches(together=True, recorded="accepted, differ by up to 0.25")


@pytest.mark.parametrize(
    ("bits", "distance"),
    [(0x8000_0000, 0.0), (0x7FC0_0001, math.inf), (0x7F80_0000, math.inf), (0x3F80_0000, 1.0)],
    ids=["sign of zero", "NaN", "infinity", "one"],
)
def test_bits_are_compared_and_not_values(bits: int, distance: float) -> None:
    class Odd(Plain):
        def extract(self, documents):
            found = [
                Extracted({n: torch.zeros_like(t) for n, t in one.components.items()}, {})
                for one in super().extract(documents)
            ]
            if len(documents) > 1:
                value = torch.from_numpy(np.array([bits], dtype=np.uint32).view(np.float32))
                found[-1].components["k"][1, 0, 0, :1] = value
            return found

    check = check_batches(Odd(), Groups([(4, 2)]))
    assert check.differences == (Difference(num_tokens=4, size=2, component="k", layer=1, max_abs=distance),)


def test_extras_count() -> None:
    class Extra(Plain):
        def extract(self, documents):
            return [one._replace(extras={"n": torch.tensor([len(documents)])}) for one in super().extract(documents)]

    check = check_batches(Extra(), Groups([(4, 3)]))
    assert check.differences == (Difference(num_tokens=4, size=3, component="n", layer=None, max_abs=2.0),)
    assert str(check.worst) == "3 documents of 4 tokens: up to 2 in 'n'"


def test_a_refused_document_does_not_decide() -> None:
    """Its group is passed over for the next of the same form."""

    def refuse(documents) -> None:
        if any(int(document.token_ids[0]) == 2 for document in documents):
            raise make_error("E301", "too long")

    plan = Groups([(4, 2), (4, 2)])
    check = check_batches(Plain(before=refuse), plan)
    assert check.equal
    assert plan.read == [0, 1, 2, 3]


def test_refused_documents_alone_leave_nothing_equal() -> None:
    def refuse(documents) -> None:
        raise make_error("E301", "too long")

    check = check_batches(Plain(before=refuse), Groups([(4, 2)] * 9))
    assert check == BatchCheck(forms=(), differences=())
    assert choose_batches(check, accept=True).together is False


def test_a_model_that_fails_is_heard() -> None:
    def refuse(documents) -> None:
        raise make_error("E302", "refused")

    with pytest.raises(InputError, match="refused"):
        check_batches(Plain(before=refuse), PLAN)


def test_effective_groups() -> None:
    groups = [range(3), range(3, 4), range(4, 6)]
    assert list(effective_groups(groups, Batches(together=True, recorded="equal"))) == groups
    single = list(effective_groups(groups, Batches(together=False, recorded="single")))
    assert single == [range(record, record + 1) for record in range(6)]


@pytest.mark.parametrize("size", [2, 5])
def test_a_real_architecture(size: int) -> None:
    """Whatever the arithmetic of this machine does: what is found is what a comparison by hand finds."""
    from kvformat.extract import HuggingFaceExtractor
    from tests.models import tiny_model

    extractor = HuggingFaceExtractor.of(tiny_model("llama"), context="unknown")
    plan = Groups([(6, size)])
    check = check_batches(extractor, plan)
    documents = [plan.document(record).document for record in range(size)]
    together = extractor.extract(documents)
    away = 0.0
    for document, one in zip(documents, together, strict=True):
        (alone,) = extractor.extract([document])
        for name, tensor in one.components.items():
            away = max(away, (tensor.double() - alone.components[name].double()).abs().max().item())
    assert (check.worst.max_abs if check.worst else 0.0) == away
