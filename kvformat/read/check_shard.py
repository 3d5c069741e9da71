"""Everything verification checks about one shard and its records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvformat.codec.shard import header_fault
from kvformat.errors import KVFormatError, make_error
from kvformat.read.dataset import Dataset
from kvformat.read.index import ShardRow
from kvformat.read.record import Record
from kvformat.read.shards import Checks, OpenShard
from kvformat.spec.document import MASKS, Document, unpack_media
from kvformat.storage.local_read import OpenFile, sha256_of

__all__ = ["check_header", "check_record", "check_sha256"]


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
        fault = _document_fault(dataset, record, file.path)
        if fault is not None:
            yield fault
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


def _document_fault(dataset: Dataset, record: Record, path: str) -> KVFormatError | None:
    extras = {extra.name: record.stored(extra.name) for extra in dataset.schema.extras}
    ids = np.frombuffer(extras["token_ids"], dtype="<i4")
    try:
        mask, length = 0, 0
        if "mask" in extras:
            mask, length = np.frombuffer(extras["mask"], dtype="<u8").tolist()
            if mask >= len(MASKS):
                return make_error("E075", f"mask kind {mask}", path=path, record=record.index)
        positions = None
        if "position_ids" in extras:
            positions = np.frombuffer(extras["position_ids"], dtype="<i4").reshape(-1, record.num_tokens)
        media = (
            unpack_media(np.frombuffer(extras["media"], dtype=np.uint8).reshape(-1, 49)) if "media" in extras else ()
        )
        document = Document.of(ids, position_ids=positions, mask=MASKS[mask], prefix_length=length, media=media)
    except KVFormatError as error:
        return make_error(
            "E075", f"the stored inputs make no document: {error.message}", path=path, record=record.index
        )
    if document.digest != record.document:
        return make_error(
            "E075",
            f"the stored inputs make document {document.digest.hex()}, the row says {record.document.hex()}",
            path=path,
            record=record.index,
        )
    return None
