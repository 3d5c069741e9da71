"""Text to token ids, and the record of how: every choice that changes the ids enters the ``text`` section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Kind, Source
from kvformat.extract.text_encoder import Remedies, TextEncoder, refusal
from kvformat.extract.text_identity import recorded_text, text_difference
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from transformers import PreTrainedTokenizerBase

    from kvformat.spec.context import Text

__all__ = ["Tokeniser"]


class Tokeniser:
    """Turns sources into documents under fixed rules.

    Parameters
    ----------
    tokenizer, special_tokens, add_generation_prompt, remedies, missing
        As for :class:`~kvformat.extract.text_encoder.TextEncoder`.
    truncate
        Keep the first ``truncate`` tokens of a longer document.
    max_tokens
        Positions of the model; a longer document is refused unless truncated.
    vocab_size
        Rows of the model's embedding; ids must be below.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        special_tokens: bool = True,
        add_generation_prompt: bool = False,
        truncate: int | None = None,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        remedies: Remedies | None = None,
        missing: str = "",
    ) -> None:
        if truncate is not None and truncate < 1:
            raise make_error("E081", f"truncate must be at least 1, found {truncate}")
        if truncate is not None and max_tokens is not None and truncate > max_tokens:
            raise make_error("E081", f"truncate is {truncate}, but the model has {max_tokens} positions")
        self._encoder = TextEncoder(
            tokenizer,
            special_tokens=special_tokens,
            add_generation_prompt=add_generation_prompt,
            remedies=remedies or Remedies(),
            missing=missing,
        )
        self._truncate = truncate
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str | None = None,
        special_tokens: bool = True,
        add_generation_prompt: bool = False,
        truncate: int | None = None,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> Tokeniser:
        """Load the tokenizer of a model directory or hub id; where it has none, only token ids can be turned.

        Raises
        ------
        DependencyError
            E205 where transformers is not installed.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise make_error("E205", "tokenising needs transformers: pip install 'kvformat[hf]'") from error
        missing = ""
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model), revision=revision or "main")
        except Exception as error:  # noqa: BLE001 - transformers raises whatever the missing or odd file led to
            # Documents of token ids need none; text is refused with the reason when it comes.
            tokenizer, missing = None, f": {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return cls(
            tokenizer,
            special_tokens=special_tokens,
            add_generation_prompt=add_generation_prompt,
            truncate=truncate,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            missing=missing,
        )

    def document(self, source: Source, *, path: object = None) -> Document:
        """Document of one source; see :meth:`documents`.

        Raises
        ------
        InputError
            E300, E301, E305.
        """
        (found,) = self.documents([source], path=path)
        if isinstance(found, KVFormatError):
            raise found
        return found

    def documents(self, sources: Sequence[Source], *, path: object = None) -> list[Document | KVFormatError]:
        """Documents of some sources, in order, or what is wrong with them. Threads may call this at the same time.

        Texts are encoded in one call, which fast tokenizers do on several cores, without the interpreter's lock. What
        the ids of one are does not depend on the others.

        Parameters
        ----------
        path
            Where the sources come from, for messages.

        Returns
        -------
        list
            Documents, and in place of one that cannot be: E300 no tokens, or an id beyond the vocabulary; E301 longer
            than the model's positions; E305 no tokenizer, no chat template, or BOS doubled; E309 for images.
        """
        encoder = self._encoder
        found: list[Document | KVFormatError | None] = [None] * len(sources)
        waiting: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for number, source in enumerate(sources):
            try:
                if source.token_ids is not None:
                    found[number] = self._checked(source, source.token_ids, path)
                elif source.messages is not None:
                    if source.images:
                        message = f"its images are read by models that take some: {encoder.remedies.images}"
                        raise refusal("E309", source, path, message)
                    # A chat template writes the special tokens itself.
                    waiting[False].append((number, encoder.render(source, path)))
                else:
                    encoder.required(source, path)
                    waiting[encoder.special_tokens].append((number, source.text or ""))
            except KVFormatError as error:
                found[number] = error
        for special, texts in waiting.items():
            encoded = encoder.encode([text for _, text in texts], special_tokens=special)
            for (number, _), ids in zip(texts, encoded, strict=True):
                try:
                    if sources[number].text is not None:
                        encoder.refuse_doubled(sources[number], ids, path)
                    found[number] = self._checked(sources[number], ids, path)
                except KVFormatError as error:
                    found[number] = error
        return [one for one in found if one is not None]

    @property
    def max_tokens(self) -> int | None:
        """Positions of the model; None where there is no limit."""
        return self._max_tokens

    @property
    def vocab_size(self) -> int | None:
        """Ids are below; None where nobody knows."""
        return self._vocab_size

    def media_sources(self, source: Source) -> tuple[str, ...]:  # noqa: ARG002 -- for those that take some
        """Path or URL of each image of a source, in order; none here."""
        return ()

    def takes(self, kind: Kind) -> bool:
        """Whether documents of a kind can be turned at all: text needs a tokenizer, messages a template besides."""
        try:
            if kind == "messages":
                self._encoder.template()
            elif kind == "text":
                self._encoder.required()
        except KVFormatError:
            return False
        return True

    def text(self, kinds: AbstractSet[Kind]) -> Text:
        """How documents of these kinds became ids; members that played no part are absent."""
        return recorded_text(self._encoder, kinds, truncate=self._truncate)

    def difference(self, text: Text) -> str | None:
        """What tells that documents were tokenised by another tokenizer or template than this one, or None.

        Nothing is found where no text was tokenised, or where there is no tokenizer to compare with.
        """
        return text_difference(self._encoder, text)

    def _checked(self, source: Source, ids: Sequence[int] | NDArray[np.int32], path: object) -> Document:
        """Document of ids, within the model's limits."""
        if len(ids) == 0:
            raise refusal(
                "E300",
                source,
                path,
                "the text has no tokens; give an empty caption a token of its own, with special tokens or as "
                '{"token_ids": [BOS]}',
            )
        numbers = np.asarray(ids)
        largest = numbers.max()
        if self._vocab_size is not None and largest >= self._vocab_size:
            message = f"token id {largest} is beyond the model's vocabulary of {self._vocab_size}"
            raise refusal("E300", source, path, message)
        if self._truncate is not None:
            numbers = numbers[: self._truncate]
        if self._max_tokens is not None and len(numbers) > self._max_tokens:
            raise refusal(
                "E301",
                source,
                path,
                f"{len(numbers)} tokens, but the model has {self._max_tokens} positions; shorten the document or "
                f"truncate it on request (--truncate {self._max_tokens})",
            )
        try:
            return Document.of(numbers)
        except KVFormatError as error:
            raise refusal("E300", source, path, error.message) from error
