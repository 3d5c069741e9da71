"""Columns of Arrow tables as the objects they stand for. pyarrow comes with whoever reads such tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvformat.errors import make_error
from kvformat.extract.documents.source import KINDS, MEMBERS, Value

__all__ = ["check_columns", "chosen", "objects_of"]

Batch = Any  # pyarrow.RecordBatch


def check_columns(columns: Mapping[str, str] | None) -> None:
    """E081 unless each member named is one that a document has."""
    unknown = sorted((columns or {}).keys() - set(MEMBERS))
    if unknown:
        raise make_error("E081", f"columns name {', '.join(MEMBERS)}, found {', '.join(map(repr, unknown))}")


def chosen(names: Sequence[str], columns: Mapping[str, str] | None, path: object) -> dict[str, str]:
    """By member, the column it comes from.

    Parameters
    ----------
    names
        Columns there are.
    columns
        By member, the column asked for; the rest are those named like their member, unless ``columns`` name where the
        content is.

    Raises
    ------
    InputError
        E300 where a column is missing.
    """
    check_columns(columns)
    asked = dict(columns or {})
    members = MEMBERS if not asked.keys() & set(KINDS) else ("id", *asked)
    found = {member: asked.get(member, member) for member in members if asked.get(member, member) in names}
    absent = [column for column in asked.values() if column not in names]
    if absent or "id" not in found or len(found) < 2:
        missing = absent or ["id" if "id" not in found else " or ".join(KINDS)]
        raise make_error(
            "E300",
            f"no column {', '.join(missing)}; there are {', '.join(names) or 'none'}: name the columns of `id` and of "
            f"one of {', '.join(KINDS)} (--column id=NAME)",
            path=path,
        )
    return found


def objects_of(batch: Batch, columns: Mapping[str, str]) -> Iterator[dict[str, Value]]:
    """One object a row; a null is a member that is not there."""
    values = [_values(batch.column(column)) for column in columns.values()]
    members = tuple(columns)
    for row in zip(*values, strict=True):
        yield {
            member: _without_nulls(value) if member == "messages" else value
            for member, value in zip(members, row, strict=True)
            if value is not None
        }


def _values(array: Any) -> Sequence[Value]:
    """Python objects of an array; lists of integers as NumPy arrays."""
    kind = str(array.type)
    if kind.startswith(("list<", "large_list<")) and array.type.value_type.num_fields == 0:
        flat = array.flatten()
        if flat.null_count == 0 and str(flat.type).startswith(("int", "uint")):
            numbers = flat.to_numpy(zero_copy_only=False)
            found: list[Value] = []
            at = 0
            for length in array.value_lengths().to_pylist():  # None for a null
                found.append(None if length is None else numbers[at : at + length])
                at += length or 0
            return found
    listed: list[Value] = array.to_pylist()
    return listed


def _without_nulls(value: Value) -> Value:
    """Messages as JSON would have them: a column has every member of every message, null where it is not there."""
    if not isinstance(value, list):
        return value
    return [
        {name: item for name, item in message.items() if item is not None or name == "content"}
        if isinstance(message, dict)
        else message
        for message in value
    ]
