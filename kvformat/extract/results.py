"""What an extractor gave back, held to its protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from kvformat.errors import make_error
from kvformat.interfaces import Extracted
from kvformat.spec.document import Document

__all__ = ["checked_results"]


def checked_results(found: object, documents: Sequence[Document]) -> list[Extracted]:
    """The results of one call, one for each document.

    Raises
    ------
    InputError
        E103 for anything but as many :class:`~kvformat.interfaces.Extracted`, of tensors by name.
    """
    if not isinstance(found, Iterable):
        raise make_error("E103", f"the extractor gave {type(found).__name__}: it must give a result for each document")
    results = list(found)
    if len(results) != len(documents):
        counts = f"{len(results)} results for {len(documents)} documents"
        raise make_error("E103", f"the extractor gave {counts}: it must give one for each")
    for result in results:
        if not isinstance(result, Extracted):
            message = f"the extractor gave {type(result).__name__} for a document: it must give an Extracted"
            raise make_error("E103", message)
        for what, tensors in (("components", result.components), ("extras", result.extras)):
            wrong = next(_wrong(tensors), None)
            if wrong is not None:
                message = f"the {what} an extractor gave hold {wrong}: they must be tensors by name"
                raise make_error("E103", message)
    return results


def _wrong(tensors: object) -> Iterator[str]:
    if not isinstance(tensors, Mapping):
        yield type(tensors).__name__
        return
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            yield f"{name!r} of type {type(tensor).__name__}"
        elif tensor.is_meta:
            yield f"{name!r} without values, on the meta device"
