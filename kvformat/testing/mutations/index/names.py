"""Mutations of the table of names (E056, E057)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Found, Mutation, manifest, put

__all__ = ["MUTATIONS"]


Name = tuple[int, int, bytes]


def _names(change: Callable[[list[Name]], Sequence[Name]]) -> Edit:
    """Change the rows of the names table; its lookup table and the totals follow."""

    def apply(files: DatasetFiles) -> None:
        columns = files.table("names")
        given = list(zip(columns["record"].tolist(), columns["input"].tolist(), files.names(), strict=True))
        changed = change(given)
        files.set_names(changed)
        files.manifest["totals"]["names"] = len(changed)
        files.reseal("parts")

    return apply


def _row(number: int, *, record: int | None = None, given: int | None = None, name: bytes | None = None) -> Edit:
    def change(rows: list[Name]) -> Sequence[Name]:
        old = rows[number]
        rows[number] = (
            old[0] if record is None else record,
            old[1] if given is None else given,
            old[2] if name is None else name,
        )
        return rows

    return _names(change)


def _end(number: int, difference: int) -> Edit:
    def apply(files: DatasetFiles) -> None:
        ends = files.column("names", "end")
        ends[number] = np.uint64((int(ends[number]) + difference) % 2**64)
        files.reseal("parts")

    return apply


def _mutations() -> Iterator[Mutation]:
    """E056 and E057."""
    base = "two-shards"
    cases: list[tuple[str, str, Edit, Found, bool]] = [
        ("E056", "record-without-name", _row(1, record=0), "touch", True),
        ("E056", "last-record-without-name", _names(lambda rows: rows[:-1]), "touch", False),
        ("E056", "first-record-without-name", _names(lambda rows: rows[1:]), "touch", False),
        ("E056", "records-descending", _names(lambda rows: [rows[1], rows[0], *rows[2:]]), "touch", False),
        ("E056", "record-beyond", _names(lambda rows: [*rows, (3, 9, b"more")]), "touch", True),
        ("E056", "record-far-beyond", _names(lambda rows: [*rows, (2**64 - 1, 9, b"more")]), "touch", False),
        ("E056", "input-twice", _row(1, given=0), "verify", True),
        ("E056", "inputs-descending", _names(lambda rows: [(0, 9, b"early"), *rows]), "verify", False),
        ("E056", "input-of-2-to-48", _row(1, given=2**48), "verify", False),
        ("E056", "input-of-2-to-63", _row(1, given=2**63), "verify", False),
        ("E056", "empty-name", _row(1, name=b""), "touch", False),
        ("E056", "name-of-513", _row(1, name=b"x" * 513), "verify", True),
        ("E056", "not-utf-8", _row(1, name=b"clip-\xff"), "touch", True),
        ("E056", "surrogate", _row(1, name=b"clip-\xed\xa0\x80"), "touch", False),
        ("E056", "end-descending", _end(1, -10), "touch", False),
        ("E056", "end-beyond", _end(1, 1000), "touch", False),
        ("E056", "end-far-beyond", _end(1, 2**63), "touch", False),
        ("E056", "bytes-behind-the-last", _end(-1, -1), "verify", True),
        ("E057", "of-two-records", _row(1, name=b"clip-0000"), "verify", True),
        ("E057", "of-one-record", _names(lambda rows: [rows[0], (0, 9, rows[0][2]), *rows[1:]]), "verify", True),
    ]
    for code, name, edit, found, vector in cases:
        yield Mutation(code=code, name=name, base=base, apply=edit, found=found, vector=vector)
    skipped = [{"input": 9, "name": "clip-0000", "reason": "too long"}]
    yield Mutation(code="E057", name="also-skipped", apply=manifest(put(skipped, "skipped")), found="verify")
    skipped = [{"input": 0, "name": "left-out", "reason": "too long"}]
    yield Mutation(code="E056", name="input-also-skipped", apply=manifest(put(skipped, "skipped")), found="verify")
    yield Mutation(
        code="E056",
        name="empty-name-in-parts",
        base="tables-in-parts",
        apply=_empty_name_in_parts,
        found="touch",
        vector=False,
    )


def _empty_name_in_parts(files: DatasetFiles) -> None:
    """The first name of a later part is empty."""
    ends = files.parts["names"][2].columns["end"]
    ends[0] = 0
    files.reseal("parts")


MUTATIONS = tuple(_mutations())
