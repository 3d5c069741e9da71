"""Mutations of the two lookup tables (E058, E059)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Found, Mutation

__all__ = ["MUTATIONS"]


def _same_document(files: DatasetFiles) -> None:
    documents = files.column("rows", "document")
    documents[1] = documents[0]
    files.set_document_keys()
    files.reseal("parts")


def _lookup(table: str, change: Callable[[Any, Any], None]) -> Edit:
    """Change key and slot; ``first_key`` follows."""

    def apply(files: DatasetFiles) -> None:
        columns = files.table(table)
        change(columns["key"], columns["slot"])
        files.set_table(table, columns)
        files.reseal("parts")

    return apply


def _exchange(keys: Any, slots: Any) -> None:
    for column in (keys, slots):
        column[[0, 1]] = column[[1, 0]]


def _slots_exchanged(keys: Any, slots: Any) -> None:
    del keys
    slots[[0, 1]] = slots[[1, 0]]


def _slot_twice(keys: Any, slots: Any) -> None:
    """An entry stands twice, and another is gone."""
    keys[1], slots[1] = keys[0], slots[0]


def _put(row: int, *, key: int | None = None, slot: int | None = None) -> Callable[[Any, Any], None]:
    def change(keys: Any, slots: Any) -> None:
        if key is not None:
            keys[row] = key
        if slot is not None:
            slots[row] = slot

    return change


def _equal_keys_exchanged(files: DatasetFiles) -> None:
    """Of two entries with one key, the greater slot first."""
    columns = files.table("name_keys")
    keys, slots = columns["key"], columns["slot"]
    at = int(np.flatnonzero(keys[1:] == keys[:-1])[0])
    slots[[at, at + 1]] = slots[[at + 1, at]]
    files.set_table("name_keys", columns)
    files.reseal("parts")


def _parts_exchanged(files: DatasetFiles) -> None:
    files.parts["document_keys"].reverse()
    files.manifest["index"]["document_keys"].reverse()
    files.reseal("manifest")


def _first_key(table: str) -> Edit:
    def apply(files: DatasetFiles) -> None:
        entry = files.manifest["index"][table][0]
        entry["first_key"] = f"{int(entry['first_key'], 16) + 1:016x}"
        files.reseal("manifest")

    return apply


def _mutations() -> Iterator[Mutation]:
    """E058 and E059."""
    yield Mutation(code="E058", name="two-records", base="no-token-ids", apply=_same_document, found="verify")
    yield Mutation(code="E058", name="with-token-ids", base="masks", apply=_same_mask, found="verify")
    base = "two-shards"
    for table in ("document_keys", "name_keys"):
        names = table == "name_keys"
        label = table.replace("_", "-")
        cases: list[tuple[str, Edit, Found, bool]] = [
            ("not-in-order", _lookup(table, _exchange), "verify", names),
            ("slots-exchanged", _lookup(table, _slots_exchanged), "verify", names),
            ("entry-twice", _lookup(table, _slot_twice), "verify", names),
            ("slot-beyond", _lookup(table, _put(1, slot=3)), "touch", names),
            ("slot-far-beyond", _lookup(table, _put(1, slot=2**64 - 1)), "touch", False),
            ("last-key-other", _lookup(table, _put(-1, key=2**64 - 1)), "verify", names),
            ("first-key-other", _first_key(table), "touch", names),
        ]
        for name, edit, found, vector in cases:
            yield Mutation(code="E059", name=f"{label}-{name}", base=base, apply=edit, found=found, vector=vector)
    yield Mutation(
        code="E059",
        name="equal-keys-exchanged",
        base="aliases-and-unicode-names",
        apply=_equal_keys_exchanged,
        found="verify",
    )
    yield Mutation(code="E059", name="parts-out-of-order", base="tables-in-parts", apply=_parts_exchanged)


def _same_mask(files: DatasetFiles) -> None:
    """Two records made the same document, inputs and digest."""
    files.tensor(1, "mask")[:] = files.tensor(0, "mask")
    documents = files.column("rows", "document")
    documents[1] = documents[0]
    files.set_document_keys()
    files.reseal("sums")


MUTATIONS = tuple(_mutations())
