"""Mutations of the tables of shards and rows (E052 to E055)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvformat.spec import limits
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Found, Mutation

__all__ = ["MUTATIONS"]


def _set(table: str, column: str, row: int, value: int) -> Edit:
    def apply(files: DatasetFiles) -> None:
        files.column(table, column)[row] = value
        files.reseal("parts")

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


def _mutations() -> Iterator[Mutation]:
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


MUTATIONS = tuple(_mutations())
