"""The document of a record, made again of the inputs stored beside it (SPEC.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.document import MASKS, Document, unpack_media

__all__ = ["INPUTS", "document_of_inputs"]

INPUTS = ("token_ids", "position_ids", "mask", "media")
"""Extras a document is made of; a record that has ``token_ids`` has whatever else its document needs."""


def document_of_inputs(inputs: Mapping[str, NDArray[Any]], *, digest: bytes, path: object, record: int) -> Document:
    """Document of a record.

    Parameters
    ----------
    inputs
        Those of :data:`INPUTS` that the schema has: ``token_ids`` int32 ``[tokens]``, ``position_ids`` int32
        ``[rows, tokens]``, ``mask`` uint64 ``[2]``, ``media`` uint8 ``[media, 49]``.
    digest
        Of the document, as the index has it: 32 bytes.
    path, record
        For messages.

    Raises
    ------
    FormatError
        E075 where they make no document, or another one.
    """
    kind, length = inputs["mask"].tolist() if "mask" in inputs else (0, 0)
    if kind >= len(MASKS):
        message = f"the stored mask is of kind {kind}, expected 0 to {len(MASKS) - 1}: restore the dataset"
        raise make_error("E075", message, path=path, record=record)
    try:
        document = Document.of(
            inputs["token_ids"],
            position_ids=inputs.get("position_ids"),
            mask=MASKS[kind],
            prefix_length=length,
            media=unpack_media(inputs["media"]) if "media" in inputs else (),
        )
    except KVFormatError as error:
        message = f"the stored inputs make no document: {error.message}: restore the dataset"
        raise make_error("E075", message, path=path, record=record) from None
    if document.digest != digest:
        raise make_error(
            "E075",
            f"the stored inputs make document {document.digest.hex()}, the row says {digest.hex()}: restore the "
            "dataset",
            path=path,
            record=record,
        )
    return document
