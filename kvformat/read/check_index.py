"""What verification checks about the contents of index tables, part by part (SPEC.md, section 13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.read.index import IndexReader
from kvformat.spec import digests, limits
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest

__all__ = ["check_lookups", "check_names", "check_padding", "check_rows", "check_shards", "check_tokens"]

Faults = Iterator[KVFormatError]
U64 = NDArray[np.uint64]
_REPORTED = 100


def check_shards(index: IndexReader, manifest: Manifest) -> Faults:
    """E052 of the whole shards table, E020 of its total."""
    path = index.shards.path(0)
    first = _column(index.shards, "first_record").astype(np.int64)
    size = _column(index.shards, "size")
    if len(first) > limits.MAX_SHARDS:
        yield make_error("E052", f"{len(first)} shards, at most {limits.MAX_SHARDS} are allowed", path=path)
    counts = np.diff(np.append(first, manifest.totals.records))
    wrong = (counts < 1) | (counts > manifest.shard_slots)
    wrong[0] |= bool(first[0] != 0)
    for shard in _some(wrong):
        yield make_error("E052", f"shard {shard} would hold {counts[shard]} records from {first[shard]} on", path=path)
    odd = (size % 4096 != 0) | (size <= manifest.header_size) | (size > limits.MAX_FILE_NBYTES)
    for shard in _some(odd):
        yield make_error("E052", f"shard {shard} would have {size[shard]} bytes", path=path)
    total = sum(int(part) for part in size)
    if total != manifest.totals.nbytes:
        yield make_error("E020", f"the shards have {total} bytes, the totals say {manifest.totals.nbytes}", path=path)


def check_rows(index: IndexReader, manifest: Manifest, layout: Layout) -> Faults:
    """E053, E054 and E055 of the rows table; the shards table must be sound."""
    first = _column(index.shards, "first_record").astype(np.int64)
    data_end = _column(index.shards, "size").astype(np.int64) - manifest.header_size
    for number, start in enumerate(index.rows.starts[:-1]):
        path = index.rows.path(number)
        columns = index.rows.part(number)
        dims = columns.arrays["dims"]
        shard = np.searchsorted(first, start)
        if shard == len(first) or first[shard] != start:
            yield make_error("E055", f"the part begins with record {start}, inside a shard", path=path)
            continue
        sizes = _record_sizes(dims, layout)
        for row in _some(sizes < 0):
            yield make_error(
                "E053", f"dims {dims[row].tolist()} are beyond the limits", path=path, record=start + int(row)
            )
        offset = columns.arrays["offset"].astype(np.int64)
        last = np.searchsorted(first, start + columns.count)
        begins = first[shard:last] - start
        expected = np.empty(columns.count + 1, dtype=np.int64)
        expected[1:] = offset + sizes
        ends = np.append(begins[1:], columns.count)
        found_ends = expected[ends]
        expected[begins] = 0
        known = np.append(
            True, sizes[:-1] >= 0
        )  # a record of impossible dims says nothing about where the next begins
        wrong = (offset != expected[:-1]) & (sizes >= 0) & known
        for row in _some(wrong):
            yield make_error(
                "E054", f"offset {offset[row]}, expected {expected[row]}", path=path, record=start + int(row)
            )
        whole = ends < columns.count  # the last shard may go on in the next part, which is reported there
        whole[-1] = start + columns.count in (*first.tolist(), manifest.totals.records)
        for at in _some((found_ends != data_end[shard:last]) & (sizes[ends - 1] >= 0) & whole):
            yield make_error(
                "E054",
                f"the last record of shard {shard + at} ends at {found_ends[at]}, its data at {data_end[shard + at]}",
                path=path,
                record=start + int(ends[at]) - 1,
            )


def check_tokens(index: IndexReader, manifest: Manifest) -> Faults:
    """E020 of the rows table."""
    parts = range(len(index.rows.parts))
    tokens = sum(int(index.rows.part(number).arrays["dims"][:, 0].sum(dtype=np.uint64)) for number in parts)
    if tokens != manifest.totals.tokens:
        yield make_error(
            "E020",
            f"the records have {tokens} tokens, the totals say {manifest.totals.tokens}",
            path=index.rows.path(0),
        )


def check_names(index: IndexReader, manifest: Manifest) -> Faults:
    """E056 of the names table."""
    previous = (-1, -1)
    inputs = []
    for number in range(len(index.names.parts)):
        path = index.names.path(number)
        columns = index.names.part(number)
        record = columns.arrays["record"].astype(np.int64)
        given = columns.arrays["input"].astype(np.int64)
        inputs.append(given)
        before_record = np.concatenate(([previous[0]], record[:-1]))
        before_input = np.concatenate(([previous[1]], given[:-1]))
        step = record - before_record
        wrong = (step < 0) | (step > 1) | ((step == 0) & (given <= before_input))
        wrong |= (record < 0) | (record >= manifest.totals.records) | (given < 0) | (given > limits.MAX_RECORDS)
        for row in _some(wrong):
            yield make_error(
                "E056", f"row {row}: record {record[row]} after {before_record[row]}, input {given[row]}", path=path
            )
        previous = (int(record[-1]), int(given[-1]))
        yield from _check_ends(columns.arrays["end"].astype(np.int64), columns.flat["bytes"], path)
    if previous[0] != manifest.totals.records - 1:
        yield make_error(
            "E056", f"names end with record {previous[0]}", path=index.names.path(len(index.names.parts) - 1)
        )
    inputs.append(np.array([skipped.input for skipped in manifest.skipped], dtype=np.int64))
    all_inputs = np.sort(np.concatenate(inputs))
    for at in _some(all_inputs[1:] == all_inputs[:-1]):
        yield make_error(
            "E056", f"input {all_inputs[at]} stands twice, among names or skipped documents", path=index.names.path(0)
        )


def check_lookups(index: IndexReader, manifest: Manifest) -> Faults:
    """E057, E058 and E059; rows and names must be sound."""
    documents = np.concatenate(
        [
            np.ascontiguousarray(index.rows.part(n).arrays["document"][:, :8])
            .view(">u8")
            .reshape(-1)
            .astype(np.uint64)
            for n in range(len(index.rows.parts))
        ]
    )
    for slot, other in _equal(documents, index.document):
        yield make_error(
            "E058", f"records {slot} and {other} hold the same document", path=index.rows.path(0), record=other
        )
    names = [name for name, _ in index.all_names()]
    keys = np.fromiter((digests.name_key(name.encode()) for name in names), dtype=np.uint64, count=len(names))
    for slot, _ in _equal(keys, names.__getitem__):
        yield make_error("E057", "the name stands twice", path=index.names.path(0), record=names[slot])
    taken = set(names) if manifest.skipped else set()
    for skipped in manifest.skipped:
        if skipped.name in taken:
            yield make_error(
                "E057", "the name is listed as skipped too", path=index.names.path(0), record=skipped.name
            )
    yield from _check_lookup(index.document_keys, documents)
    yield from _check_lookup(index.name_keys, keys)


def check_padding(index: IndexReader, tables: Iterable[str]) -> Faults:
    """E076 of all parts of these tables."""
    for name in tables:
        table = getattr(index, name)
        for number in range(len(table.parts)):
            if not table.part(number).padding_is_zero(table.buffer(number)):
                yield make_error(
                    "E076", "padding of the index part is not zero: restore the file", path=table.path(number)
                )


def _check_ends(end: NDArray[np.int64], text: memoryview, path: str) -> Faults:
    begin = np.concatenate(([0], end[:-1]))
    lengths = end - begin
    if (lengths < 1).any() or end[-1] != len(text) or (lengths > limits.MAX_NAME_NBYTES).any():
        yield make_error(
            "E056",
            f"names must have 1 to {limits.MAX_NAME_NBYTES} bytes and end with {len(text)}; found lengths "
            f"{lengths.min()} to {lengths.max()} ending with {end[-1]}",
            path=path,
        )
        return
    for row, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        try:
            str(text[first:last], "utf-8")
        except UnicodeDecodeError:
            yield make_error("E056", f"row {row}: the name is not UTF-8", path=path)


def _check_lookup(table: Any, expected: U64) -> Faults:
    seen = np.zeros(len(expected), dtype=bool)
    previous: tuple[int, int] | None = None
    for number in range(len(table.parts)):
        path = table.path(number)
        columns = table.part(number)
        key, slot = columns.arrays["key"], columns.arrays["slot"]
        ascending = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & (slot[1:] > slot[:-1]))
        if not ascending.all() or (previous is not None and (int(key[0]), int(slot[0])) <= previous):
            yield make_error("E059", "entries are not in ascending order of key and slot", path=path)
        previous = (int(key[-1]), int(slot[-1]))
        if (slot >= len(expected)).any():
            yield make_error("E059", f"a slot is beyond the {len(expected)} rows looked up", path=path)
            continue
        at = slot.astype(np.int64)
        if (expected[at] != key).any():
            yield make_error("E059", "a key is not the one of its slot", path=path)
        seen[at] = True
    if not seen.all():
        yield make_error("E059", f"{int((~seen).sum())} rows have no entry", path=table.path(0))


def _record_sizes(dims: NDArray[Any], layout: Layout) -> NDArray[np.int64]:
    unique, inverse = np.unique(dims, axis=0, return_inverse=True)
    sizes = np.empty(len(unique), dtype=np.int64)
    for i, row in enumerate(unique.tolist()):
        try:
            sizes[i] = layout.place(tuple(row)).nbytes
        except KVFormatError:
            sizes[i] = -1
    return sizes[inverse.reshape(-1)]


def _equal(keys: U64, value: Callable[[int], bytes | str]) -> Iterator[tuple[int, int]]:
    """Positions whose value stands before, each behind the first such position. Equal values have equal keys."""
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    first: dict[bytes | str, int] = {}
    last = -1
    for at in np.flatnonzero(ranked[1:] == ranked[:-1]).tolist():
        if at != last:
            first = {value(int(order[at])): int(order[at])}
        last = at + 1
        position = int(order[last])
        found = first.setdefault(value(position), position)
        if found != position:
            yield found, position


def _column(table: Any, name: str) -> U64:
    found: U64 = np.concatenate([table.part(number).arrays[name] for number in range(len(table.parts))])
    return found


def _some(wrong: NDArray[np.bool_]) -> list[int]:
    """Positions of the first faults; a table that is wrong all over needs no million findings."""
    found: list[int] = np.flatnonzero(wrong)[:_REPORTED].tolist()
    return found
