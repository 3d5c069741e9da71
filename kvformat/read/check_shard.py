"""Everything verification checks about one shard and its records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.codec.shard import header_fault
from kvformat.errors import KVFormatError, make_error
from kvformat.read.dataset import Dataset
from kvformat.read.index import ShardRow
from kvformat.read.record import Record
from kvformat.read.shards import Checks, OpenShard
from kvformat.read.stored_inputs import document_of_inputs
from kvformat.spec.document import MEDIA_ENTRY_NBYTES
from kvformat.storage.local_read import OpenFile, sha256_of

__all__ = ["check_header", "check_record", "check_sha256"]

_DTYPES = {"token_ids": "<i4", "position_ids": "<i4", "mask": "<u8", "media": "u1"}


def check_header(dataset: Dataset, row: ShardRow, file: OpenFile) -> KVFormatError | None:
    """E061 to E063 of a shard whose rows are sound."""
    num_dims = dataset.num_dims
    dims = row.rows.flat["dims"]
    placements = [
        dataset.layout.place(tuple(dims[at * num_dims : (at + 1) * num_dims]))
        for at in range(row.row, row.row + row.end - row.first)
    ]
    return header_fault(
        file.read(0, dataset.manifest.header_size),
        layout=dataset.layout,
        version=dataset.manifest.version,
        ordinal=row.ordinal,
        placements=placements,
        header_size=dataset.manifest.header_size,
        path=file.path,
    )


def check_record(
    dataset: Dataset, row: ShardRow, file: OpenFile, number: int, *, padding: bool
) -> Iterator[KVFormatError]:
    """E070 to E076 of one record."""
    tensors = len(dataset.slabs)
    shard = OpenShard(row, file, Checks(file.identity, row.end - row.first, tensors))
    try:
        record = Record(dataset, number, shard)
        record.check_sums()
    except KVFormatError as error:
        yield error
        return
    sound = True
    for damage in record.faults():
        sound = False
        yield damage
    if sound and any(extra.name == "token_ids" for extra in dataset.schema.extras):
        try:
            inputs = _stored_inputs(dataset, record)
            document_of_inputs(inputs, digest=record.document, path=file.path, record=record.index)
        except KVFormatError as error:
            yield error
    if padding and np.frombuffer(record.padding(), dtype=np.uint8).any():
        yield make_error(
            "E076", "the padding after the record is not zero: restore the shard", path=file.path, record=number
        )


def check_sha256(row: ShardRow, file: OpenFile, progress: Callable[[int], None]) -> KVFormatError | None:
    """E077 of a shard."""
    digest = sha256_of(file, row.size, progress)
    if digest == row.sha256:
        return None
    return make_error(
        "E077",
        f"the shard's SHA-256 is {digest.hex()}, expected {row.sha256.hex()}: restore the file",
        path=file.path,
    )


def _stored_inputs(dataset: Dataset, record: Record) -> dict[str, NDArray[Any]]:
    """Views of the record, whose sums were proved."""
    shapes = {
        "token_ids": (-1,),
        "position_ids": (-1, record.num_tokens),
        "mask": (2,),
        "media": (-1, MEDIA_ENTRY_NBYTES),
    }
    names = [extra.name for extra in dataset.schema.extras if extra.name in shapes]
    return {name: np.frombuffer(record.stored(name), dtype=_DTYPES[name]).reshape(shapes[name]) for name in names}
