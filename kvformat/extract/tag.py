"""The tag of a run: what its values depend on besides plan, schema and context. Other tags continue nothing."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msgspec import Struct

from kvformat.extract.options import ContextKind
from kvformat.interfaces import Extractor
from kvformat.spec import canonical

__all__ = ["Identified", "Tag", "staging_tag"]


@runtime_checkable
class Identified(Protocol):
    """An extractor that can say what its values depend on where its context is unknown."""

    def values_digest(self) -> str:
        """Digest over everything that determines the values; taking it may read all weights."""


class Tag(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What :func:`kvformat.extract.run` ties its staged work to. A context knows the model, wherever it lies.

    ``threads``: with how many a model on the CPU computes, which its last bits depend on; absent elsewhere.
    """

    attn_implementation: str
    compute_dtype: str
    context: ContextKind
    device: str
    threads: int | None = None

    def encode(self) -> str:
        """As text."""
        return canonical.encode(self).decode()


def staging_tag(extractor: Extractor, tag: str) -> str:
    """The caller's tag and, where no context tells two models apart, the digest over what determines the values."""
    if extractor.context.kind != "unknown" or not isinstance(extractor, Identified):
        return tag
    return canonical.encode({"tag": tag, "values": extractor.values_digest()}).decode()
