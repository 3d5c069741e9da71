"""Documents as the arguments of a decoder's forward, and which of them it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvformat.errors import make_error

if TYPE_CHECKING:
    from kvformat.spec.document import Document

__all__ = ["check_documents", "decoder_inputs", "token_ids_of"]


def check_documents(documents: Sequence[Document], *, max_tokens: int | None, vocab_size: int) -> int:
    """The number of tokens that documents of one forward share.

    Parameters
    ----------
    max_tokens
        Positions of the model.
    vocab_size
        Ids must be below.

    Raises
    ------
    UsageError
        E081 for documents of different lengths, or none.
    InputError
        E301 too long; E110 for another mask than causal, for media, for several rows of positions, and for ids beyond
        the vocabulary.
    """
    lengths = {document.num_tokens for document in documents}
    if len(lengths) != 1:
        raise make_error("E081", f"documents of one call must have one length, found {sorted(lengths) or 'none'}")
    (num_tokens,) = lengths
    if max_tokens is not None and num_tokens > max_tokens:
        raise make_error("E301", f"{num_tokens} tokens, but the model has {max_tokens} positions")
    for document in documents:
        if document.mask != "causal" or document.media:
            raise make_error("E110", "this extractor takes causal documents without media only")
        if document.position_ids is not None and len(document.position_ids) != 1:
            raise make_error("E110", "this extractor takes positions of one row only")
        largest = int(document.token_ids.max())
        if largest >= vocab_size:
            raise make_error("E110", f"token id {largest} is beyond the vocabulary of {vocab_size}")
    return num_tokens


def token_ids_of(documents: Sequence[Document], device: torch.device) -> torch.Tensor:
    """Token ids, int64 ``[documents, tokens]``."""
    return _on_device(np.stack([d.token_ids for d in documents]), device)


def decoder_inputs(documents: Sequence[Document], device: torch.device) -> dict[str, torch.Tensor]:
    """Forward arguments of documents that :func:`check_documents` let through, on ``device``.

    ``input_ids`` and, where a document has positions of its own, ``position_ids``: int64 ``[documents, tokens]``.
    """
    inputs = {"input_ids": token_ids_of(documents, device)}
    if any(document.position_ids is not None for document in documents):
        rows = [np.arange(d.num_tokens) if d.position_ids is None else d.position_ids[0] for d in documents]
        inputs["position_ids"] = _on_device(np.stack(rows), device)
    return inputs


def _on_device(numbers: NDArray[np.integer[Any]], device: torch.device) -> torch.Tensor:
    """An int64 tensor; queued on the current stream of a GPU, which may still be at the forward before."""
    found = torch.from_numpy(numbers.astype(np.int64))
    if device.type == "cuda":
        # Of memory that is not page-locked the copy would wait for that forward. torch gives the locked memory to
        # nobody else before it was copied.
        return found.pin_memory().to(device, non_blocking=True)
    return found.to(device)
