"""Whether a model gives documents that are computed together the bits it gives each of them alone."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from kvformat.errors import KVFormatError, KVFormatWarning, make_error
from kvformat.extract.refused import is_of_document
from kvformat.interfaces import Extracted, Extractor
from kvformat.spec.document import Document

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchCase",
    "BatchCheck",
    "Batches",
    "Difference",
    "PlannedGroups",
    "batch_cases",
    "check_batches",
    "choose_batches",
    "effective_groups",
]

_CANDIDATES = 4  # groups of one form: a document that is refused must not decide


class _Planned(Protocol):
    @property
    def document(self) -> Document:
        """What the model reads."""


class PlannedGroups(Protocol):
    """The part of a plan that says what is computed together."""

    @property
    def num_shards(self) -> int:
        """Shards of the plan."""

    def groups(self, ordinal: int, /) -> Iterable[range]:
        """Records of each forward of a shard; all records of a group have one length."""

    def num_tokens_of(self, record: int, /) -> int:
        """Tokens of a record."""

    def document(self, record: int, /) -> _Planned:
        """The document of a record."""


class BatchCase(NamedTuple):
    """A form of groups that is tried: ``size`` documents of ``num_tokens`` tokens, and the first groups of it."""

    num_tokens: int
    size: int
    groups: tuple[range, ...]


class Difference(Struct, frozen=True, kw_only=True):
    """Where documents computed together differ most from the same documents computed alone.

    Attributes
    ----------
    num_tokens, size
        Of the group.
    component, layer
        Component and model layer; for an extra its name, and no layer.
    max_abs
        Greatest absolute difference; infinite where a NaN or an infinity is on one side alone, 0 where only signs of
        zeros or NaN payloads differ.
    """

    num_tokens: int
    size: int
    component: str
    layer: int | None
    max_abs: float

    def __str__(self) -> str:
        where = f"{self.component!r}" if self.layer is None else f"{self.component!r}, layer {self.layer}"
        return f"{self.size} documents of {self.num_tokens} tokens: up to {self.max_abs:.2g} in {where}"


class BatchCheck(Struct, frozen=True, kw_only=True):
    """What was tried, and what differed.

    Attributes
    ----------
    forms
        (tokens, documents) of the groups that were computed both ways.
    differences
        Of each form that differs, where it does so most.
    """

    forms: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether something was tried, and all of it was equal bit for bit."""
        return bool(self.forms) and not self.differences

    @property
    def worst(self) -> Difference | None:
        """The greatest difference."""
        return max(self.differences, key=lambda one: one.max_abs, default=None)


class Batches(NamedTuple):
    """What becomes of the groups of a plan.

    Attributes
    ----------
    together
        Whether the documents of a group are computed together.
    recorded
        Provenance, under ``batches``: ``single``, ``equal``, or ``accepted, differ by up to`` what was found.
    """

    together: bool
    recorded: str


def batch_cases(plan: PlannedGroups) -> list[BatchCase]:
    """The forms of groups worth trying: the largest, the commonest, and the longest of several documents.

    A function of the plan alone, so that all workers try the same documents. Empty where every document is computed
    alone anyway.
    """
    counts: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], list[range]] = {}
    for ordinal in range(plan.num_shards):
        for group in plan.groups(ordinal):
            if len(group) > 1:
                form = plan.num_tokens_of(group[0]), len(group)
                counts[form] += 1
                if counts[form] <= _CANDIDATES:
                    first.setdefault(form, []).append(group)
    if not counts:
        return []
    chosen = (
        max(counts, key=lambda form: (form[1], form[0])),
        max(counts, key=lambda form: (counts[form], form)),
        max(counts),
    )
    return [BatchCase(tokens, size, tuple(first[tokens, size])) for tokens, size in dict.fromkeys(chosen)]


def check_batches(extractor: Extractor, plan: PlannedGroups) -> BatchCheck:
    """Compute a few groups of a plan together, and each of their documents alone, and compare all bits.

    Costs two passes over the documents of at most three groups. A group with a document that is refused is passed over
    for the next of its form.

    Raises
    ------
    KVFormatError
        What the extractor raises, unless it is about a document.
    """
    forms: list[tuple[int, int]] = []
    differences: list[Difference] = []
    for case in batch_cases(plan):
        for group in case.groups:
            documents = [plan.document(record).document for record in group]
            try:
                found = _compare(extractor, documents)
            except KVFormatError as error:
                if is_of_document(error):
                    continue
                raise
            forms.append((case.num_tokens, case.size))
            if found is not None:
                differences.append(found)
            break
    return BatchCheck(forms=tuple(forms), differences=tuple(differences))


def choose_batches(check: BatchCheck, *, accept: bool) -> Batches:
    """What to do about the groups, and what to record of it.

    Warns (W007) where documents are computed one by one although they could be computed together.

    Parameters
    ----------
    accept
        Whether differences were accepted by name.
    """
    if check.equal:
        return Batches(together=True, recorded="equal")
    worst = check.worst
    if worst is None:
        return Batches(together=False, recorded="single")
    if accept:
        return Batches(together=True, recorded=f"accepted, differ by up to {worst.max_abs:.2g}")
    message = (
        f"documents computed together have other bits than alone ({'; '.join(map(str, check.differences))}): they are "
        "computed one by one, which takes longer, unless such differences are accepted by name"
    )
    warnings.warn(KVFormatWarning(message, code="W007"), stacklevel=2)
    return Batches(together=False, recorded="single")


def effective_groups(groups: Iterable[range], batches: Batches) -> Iterator[range]:
    """The groups as they are computed: as planned, or records one by one, in the same order."""
    if batches.together:
        yield from groups
    else:
        for group in groups:
            for record in group:
                yield range(record, record + 1)


def _compare(extractor: Extractor, documents: Sequence[Document]) -> Difference | None:
    """Where documents computed together differ most from the same ones alone."""
    layers = {component.name: component.layers for component in extractor.schema.components}
    worst: Difference | None = None
    from kvformat.extract.results import checked_results

    for document, together in zip(documents, checked_results(extractor.extract(documents), documents), strict=True):
        (alone,) = checked_results(extractor.extract([document]), [document])
        for name, layer, max_abs in _differing(together, alone, layers):
            if worst is None or max_abs > worst.max_abs:
                worst = Difference(
                    num_tokens=document.num_tokens,
                    size=len(documents),
                    component=name,
                    layer=layer,
                    max_abs=max_abs,
                )
    return worst


def _differing(
    one: Extracted, other: Extracted, layers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, int | None, float]]:
    """Component or extra, model layer, and greatest difference, of each slab whose bits differ."""
    for what, tensors, others in (
        ("components", one.components, other.components),
        ("extras", one.extras, other.extras),
    ):
        if tensors.keys() != others.keys():
            names = ", ".join(sorted(tensors.keys() ^ others.keys()))
            raise make_error(
                "E103", f"the extractor gives other {what} for a document alone than with others: {names}"
            )
    for name, tensor in one.components.items():
        if not _same_bits(tensor, other.components[name]):
            for row, layer in enumerate(layers[name]):
                if not _same_bits(tensor[row], other.components[name][row]):
                    yield name, layer, _distance(tensor[row], other.components[name][row])
    for name, tensor in one.extras.items():
        if not _same_bits(tensor, other.extras[name]):
            yield name, None, _distance(tensor, other.extras[name])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(a, b)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    import torch

    if one.shape != other.shape:
        return math.inf
    a, b = (tensor.detach().cpu().to(torch.float64) for tensor in (one, other))
    away = (a - b).abs()
    away = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(away), away)
    return float(away.nan_to_num(nan=math.inf, posinf=math.inf).max()) if away.numel() else 0.0
