"""Mutations of index parts as files (E050, E051)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvformat.spec import limits, tables
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Mutation

__all__ = ["MUTATIONS"]


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


def _mutations() -> Iterator[Mutation]:
    for table in tables.TABLES:
        vector = table in ("rows", "names")
        yield Mutation(code="E050", name=f"{table.replace('_', '-')}-extended", apply=_extended(table), vector=vector)
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
                name=f"{table.replace('_', '-')}-{name}",
                apply=_header(table, change),
                found="touch",
                vector=vector and table == "names",
            )
    yield Mutation(code="E051", name="names-nbytes", apply=_other_nbytes, found="touch")
    yield Mutation(code="E051", name="part-of-another-table", apply=_tables_exchanged, found="touch")


MUTATIONS = tuple(_mutations())
