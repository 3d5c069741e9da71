"""Protocols. Instances are injected; nothing here has a default implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from kvformat.spec.context import Context, Text
    from kvformat.spec.document import Document
    from kvformat.spec.schema import Schema

__all__ = ["Extracted", "Extractor"]


class Extracted(NamedTuple):
    """What an extractor returns for one document: tensors by component and by extra name.

    Component tensors are ``[layers, *axes]`` as the schema declares, on any device; ``token_ids``, ``position_ids``,
    ``mask`` and ``media`` come from the document and need not be given as extras.
    """

    components: Mapping[str, torch.Tensor]
    extras: Mapping[str, torch.Tensor]


class Extractor(Protocol):
    """Turns documents into components, and says what determines them."""

    @property
    def schema(self) -> Schema:
        """Shape and dtype of what :meth:`extract` returns."""

    @property
    def context(self) -> Context:
        """What determines the values."""

    @property
    def text(self) -> Text:
        """How text became token ids."""

    @property
    def provenance(self) -> Mapping[str, str]:
        """Recorded and shown, never compared: library versions, device, attention implementation."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Covered files by label, such as ``weights`` and ``inv_freq``."""

    @property
    def max_tokens(self) -> int | None:
        """Longest document the model has positions for; None where it has no limit."""

    def extract(self, documents: Sequence[Document]) -> Sequence[Extracted]:
        """Components of each document, in order. All documents of one call have the same number of tokens."""
