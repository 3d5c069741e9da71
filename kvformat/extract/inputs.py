"""The document of a record, made again of what is stored beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.document import MASKS, Document, unpack_media

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset
    from kvformat.read.record import Record

__all__ = ["has_inputs", "require_inputs", "stored_document"]


def has_inputs(dataset: Dataset) -> bool:
    """Whether a dataset stores the token ids of its records, and with them all that a document is made of."""
    return any(extra.name == "token_ids" for extra in dataset.schema.extras)


def require_inputs(dataset: Dataset) -> None:
    """Refuse a dataset without token ids; E082."""
    if not has_inputs(dataset):
        raise make_error(
            "E082",
            "the dataset stores no token_ids, so nothing can be computed again from it; extract with the extra "
            "`token_ids`, as kvformat.extract does",
            path=dataset.location,
        )


def stored_document(dataset: Dataset, record: Record) -> Document:
    """Document of a record from its extras ``token_ids``, ``position_ids``, ``mask`` and ``media``.

    Raises
    ------
    FormatError
        E075 where it is not the one whose digest the index has.
    DamageError
        E070, E073.
    """
    names = {extra.name for extra in dataset.schema.extras} & {"token_ids", "position_ids", "mask", "media"}
    stored = {name: record.extra(name).numpy() for name in names}  # noqa: S610 - no database
    kind, length = stored["mask"].tolist() if "mask" in stored else (0, 0)
    if kind >= len(MASKS):
        raise make_error("E075", f"mask kind {kind}", path=dataset.location, record=record.index)
    try:
        document = Document.of(
            stored["token_ids"],
            position_ids=stored.get("position_ids"),
            mask=MASKS[kind],
            prefix_length=length,
            media=unpack_media(stored["media"]) if "media" in stored else (),
        )
    except KVFormatError as error:
        message = f"the stored inputs make no document: {error.message}"
        raise make_error("E075", message, path=dataset.location, record=record.index) from None
    if document.digest != record.document:
        raise make_error(
            "E075",
            f"the stored inputs make document {document.digest.hex()}, the row says {record.document.hex()}: "
            "restore the dataset",
            path=dataset.location,
            record=record.index,
        )
    return document
