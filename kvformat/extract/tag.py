"""The tag of a run's staging: what must be equal, beyond schema, context and sizes, for another to continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct

from kvformat.errors import KVFormatError
from kvformat.extract.options import ContextKind
from kvformat.interfaces import Extractor
from kvformat.spec import canonical

__all__ = ["Identified", "Tag", "members", "model_name", "staging_tag"]


@runtime_checkable
class Identified(Protocol):
    """An extractor that can say what its values depend on where its context is unknown."""

    def values_digest(self) -> str:
        """Digest over everything that determines the values; taking it may read all weights."""


class Tag(Struct, frozen=True, kw_only=True):
    """What :func:`kvformat.extract.run` ties its staging to."""

    attn_implementation: str
    compute_dtype: str
    context: ContextKind
    device: str
    model: str
    revision: str

    def encode(self) -> str:
        """As the text a writer takes."""
        return canonical.encode(self).decode()


def model_name(model: str) -> str:
    """What a tag calls a model: a directory by its real path however it was spelt, anything else as given."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def staging_tag(extractor: Extractor, tag: str) -> str:
    """The caller's tag and, where no context tells two models apart, the digest over what determines the values."""
    if extractor.context.kind != "unknown" or not isinstance(extractor, Identified):
        return tag
    return canonical.encode({"tag": tag, "values": extractor.values_digest()}).decode()


def members(tag: str) -> dict[str, str]:
    """Members of the :class:`Tag` within a staging's tag; none where another caller made it."""
    try:
        found = canonical.decode(tag.encode())
        if found.keys() == {"tag", "values"}:
            found = canonical.decode(str(found["tag"]).encode())
    except KVFormatError:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}
