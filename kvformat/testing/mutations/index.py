"""Mutations of index parts and of what the tables say (E050 to E059)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvformat.spec import limits, tables
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Found, Mutation, manifest, put

__all__ = ["MUTATIONS"]

Name = tuple[int, int, bytes]


def _label(table: str) -> str:
    return table.replace("_", "-")


# ------------------------------------------------------------------------------------------------------ parts as files


def _extended(table: str) -> Edit:
    def apply(files: DatasetFiles) -> None:
        part = files.parts[table][0]
        part.replace(part.data + bytes(64))
        files.reseal("parts")

    return apply


def _empty_part(table: str) -> Edit:
    """One more part, without rows."""

    def apply(files: DatasetFiles) -> None:
        columns = files.table(table)
        files.set_table(table, columns, cuts=(len(next(iter(columns.values()))),))
        files.reseal("parts")

    return apply


def _too_many_rows(files: DatasetFiles) -> None:
    """What the manifest says is possible but for the number of rows."""
    count = limits.MAX_PART_ROWS + 1
    for table in ("rows", "document_keys"):
        entry = files.manifest["index"][table][0]
        entry["count"], entry["size"] = count, tables.form(table, count, 1, 0, files.version).nbytes
    files.manifest["totals"]["records"] = count
    files.reseal("manifest")


def _other_nbytes(files: DatasetFiles) -> None:
    """One byte of names more, which the padding hides from the size of the part."""
    part = files.parts["names"][0]
    part.entry["nbytes"] += 1
    if tables.form("names", part.entry["count"], 0, part.entry["nbytes"], files.version).nbytes != len(part.data):
        raise ValueError("the padding of this base does not hide a byte")
    files.reseal("manifest")


def _header(table: str, change: Callable[[bytes], bytes]) -> Edit:
    def apply(files: DatasetFiles) -> None:
        part = files.parts[table][0]
        header, data = bytes(part.data[: part.header_nbytes]), part.data[part.header_nbytes :]
        changed = change(header)
        if len(changed) != len(header) or changed == header:
            raise ValueError("the header must change and keep its length")
        part.replace(changed + data)
        files.reseal("parts")

    return apply


def _tables_exchanged(files: DatasetFiles) -> None:
    """A sound part of another table: document keys where name keys belong."""
    part, other = files.parts["name_keys"][0], files.parts["document_keys"][0]
    if len(part.data) != len(other.data):
        raise ValueError("the two lookup tables of this base have different sizes")
    part.replace(other.data)
    part.entry["first_key"] = other.entry["first_key"]
    files.reseal("parts")


def _files_mutations() -> Iterator[Mutation]:
    for table in tables.TABLES:
        vector = table in ("rows", "names")
        yield Mutation(code="E050", name=f"{_label(table)}-extended", apply=_extended(table), vector=vector)
    for table in ("rows", "shards"):
        yield Mutation(
            code="E050",
            name=f"{table}-part-without-rows",
            base="two-shards",
            apply=_empty_part(table),
            vector=True,
        )
    yield Mutation(code="E050", name="too-many-rows", apply=_too_many_rows, vector=False)
    for name, change in (
        ("space-inside", lambda data: data[:-1].replace(b'","shape"', b'", "shape"', 1)),
        ("newline-at-end", lambda data: data[:-1] + b"\n"),
        ("other-dtype", lambda data: data.replace(b'"U64"', b'"I64"', 1)),
        ("other-version", lambda data: data.replace(b'"1.0"', b'"1.1"', 1)),
        ("other-length", lambda data: bytes([data[0] - 1]) + data[1:]),
        ("length-of-2-to-63", lambda data: data[:7] + b"\x80" + data[8:]),
        ("escaped", lambda data: data[:-5].replace(b'"table"', b'"t\\u0061ble"', 1)),
    ):
        vector = name in ("newline-at-end", "other-dtype")
        for table in ("names", "document_keys"):
            yield Mutation(
                code="E051",
                name=f"{_label(table)}-{name}",
                apply=_header(table, change),
                found="touch",
                vector=vector and table == "names",
            )
    yield Mutation(code="E051", name="names-nbytes", apply=_other_nbytes, found="touch")
    yield Mutation(code="E051", name="part-of-another-table", apply=_tables_exchanged, found="touch")


# -------------------------------------------------------------------------------------------------------- shards, rows


def _set(table: str, column: str, row: int, value: int, *, seal: str = "parts") -> Edit:
    def apply(files: DatasetFiles) -> None:
        files.column(table, column)[row] = value
        files.reseal("shards" if seal == "shards" else "parts")

    return apply


def _one_slot(files: DatasetFiles) -> None:
    """The manifest allows one record a shard; the first has two."""
    files.manifest["shard_slots"] = 1
    files.write_headers()
    files.reseal("shards")


def _resized(change: Callable[[bytearray, int], bytes | bytearray]) -> Edit:
    """Change the last shard's bytes; the shards table and the totals follow."""

    def apply(files: DatasetFiles) -> None:
        files.shards[-1] = bytearray(change(files.shards[-1], files.header_size))
        files.reseal("shards")

    return apply


def _tokens(record: int, tokens: int) -> Edit:
    def apply(files: DatasetFiles) -> None:
        dims = files.column("rows", "dims")
        files.manifest["totals"]["tokens"] += tokens - int(dims[record, 0])
        dims[record, 0] = tokens
        files.reseal("parts")

    return apply


def _huge_record(files: DatasetFiles) -> None:
    dims = files.column("rows", "dims")
    files.manifest["totals"]["tokens"] += limits.MAX_TOKENS - int(dims[0, 0])
    dims[0] = [limits.MAX_TOKENS, 0, 2**32 - 1]
    files.reseal("parts")


def _gap(files: DatasetFiles) -> None:
    """A block of zeros between the two records of a shard."""
    second = files.header_size + int(files.column("rows", "offset")[1])
    files.shards[0] = files.shards[0][:second] + bytes(4096) + files.shards[0][second:]
    files.column("rows", "offset")[1] += 4096
    files.reseal("shards")


def _shard_mutations() -> Iterator[Mutation]:
    """E052 to E055."""
    base = "two-shards"
    firsts = ("shards", "first_record")
    cases: list[tuple[str, str, Edit, Found, bool]] = [
        ("E052", "first-is-one", _set(*firsts, 0, 1), "touch", True),
        ("E052", "shard-of-no-records", _set(*firsts, 1, 0), "touch", True),
        ("E052", "beyond-the-records", _set(*firsts, 1, 3), "touch", True),
        ("E052", "far-beyond", _set(*firsts, 1, 2**63), "touch", False),
        ("E052", "largest-number", _set(*firsts, 1, 2**64 - 1), "touch", False),
        ("E052", "more-than-slots", _one_slot, "touch", True),
        ("E052", "size-odd", _resized(lambda data, _: data + bytes(64)), "touch", False),
        ("E052", "header-alone", _resized(lambda data, size: data[:size]), "touch", False),
        ("E053", "no-tokens", _tokens(1, 0), "touch", True),
        ("E053", "tokens-beyond", _tokens(1, limits.MAX_TOKENS + 1), "touch", True),
        ("E053", "tokens-far-beyond", _tokens(1, 2**32 - 1), "touch", False),
        ("E054", "gap", _gap, "touch", True),
        ("E054", "first-not-at-zero", _set("rows", "offset", 2, 4096), "touch", False),
        ("E054", "overlap", _set("rows", "offset", 1, 0), "touch", True),
        ("E054", "not-aligned", _set("rows", "offset", 1, 4095), "touch", False),
        ("E054", "beyond-the-file", _set("rows", "offset", 1, 2**48), "touch", False),
        ("E054", "largest-offset", _set("rows", "offset", 1, 2**64 - 4096), "touch", False),
        ("E054", "data-behind-the-last", _resized(lambda data, _: data + bytes(4096)), "touch", True),
        ("E054", "records-longer-than-data", _tokens(1, 4096), "touch", True),
        ("E055", "cut-inside-a-shard", _cut_rows, "touch", True),
    ]
    for code, name, edit, found, vector in cases:
        yield Mutation(code=code, name=name, base=base, apply=edit, found=found, vector=vector)
    descending = _set(*firsts, 2, 1)
    yield Mutation(
        code="E052", name="descending", base="several-shards", apply=descending, found="touch", vector=False
    )
    yield Mutation(code="E053", name="record-too-large", base="dims-of-zero", apply=_huge_record, found="touch")


def _cut_rows(files: DatasetFiles) -> None:
    files.set_table("rows", files.table("rows"), cuts=(1,))
    files.reseal("parts")


# --------------------------------------------------------------------------------------------------------------- names


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


def _name_mutations() -> Iterator[Mutation]:
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


# ------------------------------------------------------------------------------------------------------------- lookups


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


def _lookup_mutations() -> Iterator[Mutation]:
    """E058 and E059."""
    yield Mutation(code="E058", name="two-records", base="no-token-ids", apply=_same_document, found="verify")
    yield Mutation(code="E058", name="with-token-ids", base="masks", apply=_same_mask, found="verify")
    base = "two-shards"
    for table in ("document_keys", "name_keys"):
        names = table == "name_keys"
        label = _label(table)
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


MUTATIONS = (*_files_mutations(), *_shard_mutations(), *_name_mutations(), *_lookup_mutations())
