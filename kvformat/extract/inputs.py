"""The document of a record, made again of what is stored beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvformat.errors import make_error
from kvformat.extract.documents.opening import is_documents_file
from kvformat.read.stored_inputs import INPUTS, document_of_inputs

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset
    from kvformat.read.record import Record
    from kvformat.spec.document import Document

__all__ = ["has_inputs", "has_media", "require_inputs", "require_media_sources", "stored_document"]

_TOGETHER = 1 << 16  # records whose dims are looked at in one call


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


def has_media(dataset: Dataset) -> bool:
    """Whether any document of a dataset has media. A dataset that could store some may have none."""
    size = next((extra.axes[0].size for extra in dataset.schema.extras if extra.name == "media"), 0)
    if isinstance(size, int):
        return size > 0
    column, count = dataset.schema.dims.index(size), len(dataset)
    return any(
        dataset.index.dims_of(np.arange(first, min(first + _TOGETHER, count), dtype=np.int64))[:, column].any()
        for first in range(0, count, _TOGETHER)
    )


def require_media_sources(dataset: Dataset, documents: object) -> None:
    """Refuse a dataset with images without what says where they are; E081.

    A dataset stores digests of images, and neither pixels nor places: those are in the documents file alone.

    Parameters
    ----------
    documents
        What was given: None, a documents file, or another source.
    """
    if is_documents_file(documents) or not has_media(dataset):
        return
    found = "none" if documents is None else f"{str(documents)!r:.80}"
    raise make_error(
        "E081",
        "documents of the dataset have images, and only their documents file says where these are: give it "
        f"(--documents FILE.kvdocs, which `kvformat documents --images` makes), found {found}",
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
    names = [extra.name for extra in dataset.schema.extras if extra.name in INPUTS]
    inputs = {name: record.extra(name).numpy() for name in names}  # noqa: S610 - no database
    return document_of_inputs(inputs, digest=record.document, path=dataset.location, record=record.index)
