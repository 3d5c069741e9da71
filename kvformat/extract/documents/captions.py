"""Random caption choices as the documents they may lead to.

A trainer that draws one of several captions, drops it now and then, and appends a line of metadata, may ask for any of
a few texts. They are enumerated, instead of replaying its draws: every caption with a weight above zero, with every
suffix with a weight above zero, and the null document of classifier-free dropout once, under a name of its own.

Example
-------
A function for ``--documents my_captions.py:documents``::

    def documents():
        samples = (
            Captioned(
                id=clip.id,
                captions=[Choice(clip.short, 0.3), Choice(clip.long, 0.7)],
                suffixes=[Choice(f" {clip.fps} FPS")],
            )
            for clip in clips()
        )
        return caption_documents(samples, dropout=0.1, null=Null(text=""))

A training step then asks for ``caption_name(clip.id, 1, 0)``, or for ``"null"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvformat.errors import make_error

__all__ = ["Captioned", "Choice", "Null", "caption_documents", "caption_name"]

_EXPLICIT = (
    'give it as Null(text="") where the tokenizer puts BOS before every text, or by its ids, as Null(token_ids=[BOS])'
)


class Choice(NamedTuple):
    """A text that may be drawn.

    Attributes
    ----------
    text
        The caption, or what is appended to one.
    weight
        How likely it is against the others of its list: finite, not negative, of any scale. One of weight 0 is never
        drawn.
    """

    text: str
    weight: float = 1.0


class Captioned(NamedTuple):
    """A sample with its captions.

    Attributes
    ----------
    id
        Of the sample; documents are named after it.
    captions
        Of which one is drawn.
    suffixes
        Of which one is appended as it is; nothing is, where there are none. To append nothing now and then, have an
        empty one among them.
    """

    id: str
    captions: Sequence[Choice]
    suffixes: Sequence[Choice] = ()


class Null(NamedTuple):
    """The document that stands for a dropped caption: exactly one of ``text`` and ``token_ids``.

    Attributes
    ----------
    name
        Of its record, 1 to 512 bytes of UTF-8; no sample's documents may have it.
    text
        What is tokenised, in the form ``member`` gives it. Of an empty one, the tokenizer has to make a token: BOS.
    token_ids
        Its token ids, at least one, taken as they are.
    """

    name: str = "null"
    text: str | None = None
    token_ids: Sequence[int] | None = None


def caption_name(sample: str, caption: int, suffix: int | None = None) -> str:
    """Name of the document of a caption, and of one of the sample's suffixes where it has any.

    Places are counted from 0 among all choices, those of weight zero included: names stay when weights change.
    """
    return f"{sample}/{caption}" if suffix is None else f"{sample}/{caption}/{suffix}"


def caption_documents(
    samples: Iterable[Captioned],
    *,
    dropout: float = 0.0,
    null: Null | None = None,
    member: Callable[[str], Mapping[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The documents that random choices of captions may lead to.

    Parameters
    ----------
    samples
        Read once, as far as documents are asked for. Ids of samples must differ.
    dropout
        Probability of dropping the caption, 0 to 1. Above 0, the null document comes first; at 1 there is no other.
    null
        The null document. Needed with dropout; without, it is left out.
    member
        What a text becomes: ``{"text": text}`` if not given. For a chat model, say,
        ``lambda text: {"messages": [{"role": "user", "content": text}]}``.

    Returns
    -------
    Iterator
        Objects with ``id`` and one of ``text``, ``messages``, ``token_ids``: the null document, then those of each
        sample, every caption with every suffix, as :func:`caption_name` names them.

    Raises
    ------
    UsageError
        E081, at once: for a dropout that is no probability, and for one without a null document.
    InputError
        E300, when it is the sample's turn: for a sample nothing can be drawn of, and weights that are none.
    """
    if not 0 <= dropout <= 1:
        raise make_error("E081", f"dropout must be a probability of 0 to 1, found {dropout!r}")
    if dropout > 0 and null is None:
        raise make_error("E081", f"dropout is {dropout}, and there is no null document; {_EXPLICIT}")
    if null is not None and (null.text is None) == (null.token_ids is None):
        raise make_error("E081", f"the null document has exactly one of text and token_ids; {_EXPLICIT}")
    if null is not None and null.token_ids is not None and len(null.token_ids) == 0:
        raise make_error("E081", f"the null document has no tokens; {_EXPLICIT}")
    return _documents(samples, dropout, null, member or _as_text)


def _documents(
    samples: Iterable[Captioned], dropout: float, null: Null | None, member: Callable[[str], Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    if dropout > 0 and null is not None:
        yield {"id": null.name, **(member(null.text) if null.text is not None else {"token_ids": null.token_ids})}
    if dropout == 1:
        return
    for sample in samples:
        captions = _support(sample, "captions", sample.captions)
        suffixes: list[tuple[int, str]] | list[tuple[None, str]] = [(None, "")]
        if sample.suffixes:
            suffixes = _support(sample, "suffixes", sample.suffixes)
        for caption, text in captions:
            for suffix, more in suffixes:
                yield {"id": caption_name(sample.id, caption, suffix), **member(text + more)}


def _support(sample: Captioned, what: str, choices: Sequence[Choice]) -> list[tuple[int, str]]:
    """Place and text of the choices that may be drawn."""
    for place, choice in enumerate(choices):
        if not (math.isfinite(choice.weight) and choice.weight >= 0):
            raise make_error(
                "E300",
                f"{what}[{place}]: a weight is finite and not negative, found {choice.weight!r}",
                record=sample.id,
            )
    found = [(place, choice.text) for place, choice in enumerate(choices) if choice.weight > 0]
    if not found:
        raise make_error("E300", f"none of its {what} has a weight above zero; leave the sample out", record=sample.id)
    return found


def _as_text(text: str) -> dict[str, str]:
    return {"text": text}
