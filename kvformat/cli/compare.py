"""What differs between two datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvformat.cli.fields import context_fields, schema_fields, text_fields
from kvformat.errors import KVFormatError, make_error
from kvformat.read.check_covered import TensorList, read_covered
from kvformat.read.dataset import Dataset
from kvformat.read.frequencies import TOLERANCE, InverseFrequencies, largest_difference
from kvformat.spec import canonical
from kvformat.spec.context import TensorDigest
from kvformat.spec.paths import covered_path

__all__ = ["Change", "Comparison", "Records", "compare"]

T = TypeVar("T")
_EXAMPLES = 10


class Change(Struct, frozen=True, kw_only=True):
    """A field, and its value on both sides; None where it is absent."""

    field: str
    a: str | None
    b: str | None


class Records(Struct, frozen=True, kw_only=True):
    """How the sets of records differ. Names are examples, a few of each kind.

    Attributes
    ----------
    other_values
        Documents of both sides whose stored bytes differ; None where the schemas do, so that nothing can be said.
    same_order
        Whether the documents of both sides stand in one order. Not counted as a difference.
    names_moved
        Names of both sides that stand for another document.
    """

    a: int
    b: int
    only_a: int
    only_b: int
    other_values: int | None
    same_order: bool
    names_only_a: int
    names_only_b: int
    names_moved: int
    examples_only_a: tuple[str, ...]
    examples_only_b: tuple[str, ...]
    examples_other_values: tuple[str, ...]
    examples_names: tuple[str, ...]

    @property
    def differ(self) -> bool:
        """Whether anything but the order does."""
        counts = (self.only_a, self.only_b, self.other_values, self.names_only_a, self.names_only_b, self.names_moved)
        return any(counts)


class Comparison(Struct, frozen=True, kw_only=True):
    """Everything that differs; ``notes`` and ``provenance`` are shown and not counted.

    ``weights`` is None where they cannot be compared, because a context is unknown and the datasets are two.
    """

    same: bool
    context: tuple[Change, ...]
    weights: tuple[Change, ...] | None
    files: tuple[Change, ...]
    schema: tuple[Change, ...]
    text: tuple[Change, ...]
    records: Records
    provenance: tuple[Change, ...]
    notes: tuple[str, ...]


def compare(a: Dataset, b: Dataset) -> Comparison:
    """Compare two open datasets.

    Raises
    ------
    FormatError, DamageError
        Where a part or covered file that must be read is faulty.
    """
    context = _changes(context_fields(a.context), context_fields(b.context))
    notes = []
    if a.id != b.id and a.context.model is None and b.context.model is None:
        context = (Change(field="kind", a="unknown", b="unknown"),)
        notes.append("an unknown context equals nothing: whether one model made both cannot be known")
    schema = _changes(schema_fields(a.schema), schema_fields(b.schema))
    text = _changes(text_fields(a.text), text_fields(b.text))
    canaries = [dataset.text.canary.token_ids if dataset.text.canary else () for dataset in (a, b)]
    if canaries[0] != canaries[1] and not any(change.field == "canary.token_ids" for change in text):
        text += (Change(field="canary.token_ids", a="other ids", b="other ids"),)
    weights = _weights(a, b)
    files, remarks = _files(a, b)
    records = _records(a, b, comparable=not schema)
    differ = bool(context or weights or files or schema or text) or records.differ
    return Comparison(
        same=not differ,
        context=context,
        weights=weights,
        files=files,
        schema=schema,
        text=text,
        records=records,
        provenance=_changes(dict(a.provenance), dict(b.provenance)),
        notes=(*notes, *remarks),
    )


def _changes(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Change, ...]:
    return tuple(
        Change(field=field, a=a.get(field), b=b.get(field))
        for field in [*a, *(field for field in b if field not in a)]
        if a.get(field) != b.get(field)
    )


# -- covered files --------------------------------------------------------------------------------------------------


def _weights(a: Dataset, b: Dataset) -> tuple[Change, ...] | None:
    """The tensors that differ, by name; None where nobody knows."""
    if a.context.model is None or b.context.model is None:
        return () if a.id == b.id else None
    if a.context.model.weights == b.context.model.weights:
        return ()
    lists = [_tensors(dataset) for dataset in (a, b)]
    found = []
    for name in sorted(lists[0].keys() | lists[1].keys()):
        left, right = lists[0].get(name), lists[1].get(name)
        if left != right:
            found.append(Change(field=name, a=_tensor_text(left), b=_tensor_text(right)))
    return tuple(found)


def _tensors(dataset: Dataset) -> dict[str, TensorDigest]:
    listed = _content(dataset, "weights", TensorList)
    return {} if listed is None else {tensor.name: tensor for tensor in listed.tensors}


def _tensor_text(tensor: TensorDigest | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)} sha256 {tensor.sha256[:16]}"


def _files(a: Dataset, b: Dataset) -> tuple[tuple[Change, ...], list[str]]:
    """Covered files that differ; ``weights`` is the context's, and ``inv_freq`` is compared by value."""
    digests = [{f.name: f.sha256 for f in d.manifest.files if f.name != "weights"} for d in (a, b)]
    left, right = (digest.pop("inv_freq", None) for digest in digests)
    notes = []
    found = _changes(*digests)
    if left is not None and right is not None:
        if left != right:
            largest = largest_difference(*(_content(side, "inv_freq", InverseFrequencies) for side in (a, b)))
            if largest is None or largest > TOLERANCE:
                stated = "other groups or lengths" if largest is None else f"up to {largest:.1e} relative"
                found += (Change(field="inv_freq", a=stated, b=stated),)
            else:
                notes.append(f"inverse frequencies differ by {largest:.1e} relative, within the tolerance of 1e-6")
    elif left != right:
        notes.append(f"inverse frequencies are recorded in {'A' if right is None else 'B'} only, and not compared")
    return found, notes


def _content(dataset: Dataset, name: str, kind: type[T]) -> T | None:
    """Content of a covered file whose digest was checked; E044 where it is not of its form."""
    file = dataset.manifest.file(name)
    if file is None:
        return None
    data = read_covered(dataset.reader, file)
    try:
        return canonical.convert(canonical.decode(data), kind)
    except KVFormatError as error:
        path = dataset.reader.path(covered_path(file.sha256))
        raise make_error("E044", f"covered file {name!r}: {error.message}", path=path) from None


# -- records --------------------------------------------------------------------------------------------------------


def _records(a: Dataset, b: Dataset, *, comparable: bool) -> Records:
    left, right = _column(a, "document"), _column(b, "document")
    common, in_left, in_right = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    only = [np.setdiff1d(np.arange(len(side)), among) for side, among in ((left, in_left), (right, in_right))]
    other: NDArray[np.intp] | None = None
    if comparable:
        sums = [_column(dataset, "record_sum") for dataset in (a, b)]
        other = np.sort(in_left[sums[0][in_left] != sums[1][in_right]])
    moved, names_only = _names(a, b, dict(zip(in_left.tolist(), in_right.tolist(), strict=True)))
    order = in_right[np.argsort(in_left)]
    return Records(
        a=len(left),
        b=len(right),
        only_a=len(left) - len(common),
        only_b=len(right) - len(common),
        other_values=None if other is None else len(other),
        same_order=bool((order[1:] > order[:-1]).all()),
        names_only_a=len(names_only[0]),
        names_only_b=len(names_only[1]),
        names_moved=len(moved),
        examples_only_a=_first_names(a, only[0]),
        examples_only_b=_first_names(b, only[1]),
        examples_other_values=() if other is None else _first_names(a, other),
        examples_names=tuple((moved + names_only[0] + names_only[1])[:_EXAMPLES]),
    )


def _column(dataset: Dataset, name: str) -> NDArray[np.bytes_]:
    """A column of digests as byte strings. numpy drops zeros at their end, which among equal widths loses nothing."""
    rows = dataset.index.rows
    column = np.concatenate([rows.part(number).arrays[name] for number in range(len(rows.parts))])
    count, width = column.shape
    return column.view(f"S{width}").reshape(count)


def _names(a: Dataset, b: Dataset, counterpart: Mapping[int, int]) -> tuple[list[str], tuple[list[str], list[str]]]:
    """Names that stand for another document, and names of one side alone that stand for a document of both."""
    sides = [dict(dataset.names()) for dataset in (a, b)]
    moved = [
        name for name, record in sides[0].items() if name in sides[1] and counterpart.get(record) != sides[1][name]
    ]
    shared = set(counterpart.values())
    only_a = [name for name, record in sides[0].items() if name not in sides[1] and record in counterpart]
    only_b = [name for name, record in sides[1].items() if name not in sides[0] and record in shared]
    return moved, (only_a, only_b)


def _first_names(dataset: Dataset, records: NDArray[np.intp]) -> tuple[str, ...]:
    return tuple(dataset.index.names_of(int(record))[0] for record in records[:_EXAMPLES])
