"""Text to token ids, and the record of how: every choice that changes the ids enters the ``text`` section."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Kind, Message, Source
from kvformat.spec.context import Canary, Text
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from transformers import PreTrainedTokenizerBase

__all__ = ["CANARY", "Remedies", "Tokeniser", "tokenizer_digest"]

CANARY = "  The keys' 3 values: naïve café — 北京, Ω≈1.602e-19, 🙂\n\tdef f(x): return x**2  # <|end|> [INST] </s>"
"""Text whose ids tell tokenizers apart: leading spaces, digits, scripts, emoji, code, near-special tokens."""


class Remedies(NamedTuple):
    """What messages advise where documents need what is not there.

    Attributes
    ----------
    text
        Text without a tokenizer.
    images
        Images without a model that takes some.
    """

    text: str = "and the model has none that loads; give documents as `token_ids`"
    images: str = "ask for it (--images)"


class Tokeniser:
    """Turns sources into documents under fixed rules.

    Parameters
    ----------
    tokenizer
        A fast tokenizer, or None where every document comes as token ids.
    special_tokens
        Whether plain text gets the tokenizer's special tokens (BOS, EOS). A chat template writes its own, so messages
        never get them a second time.
    add_generation_prompt
        Whether rendered messages end with the opening of an assistant turn.
    truncate
        Keep the first ``truncate`` tokens of a longer document.
    max_tokens
        Positions of the model; a longer document is refused unless truncated.
    vocab_size
        Rows of the model's embedding; ids must be below.
    remedies
        For messages, where the caller's user has other means than those of an extraction.
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
    ) -> None:
        if truncate is not None and truncate < 1:
            raise make_error("E081", f"truncate must be at least 1, found {truncate}")
        if truncate is not None and max_tokens is not None and truncate > max_tokens:
            raise make_error("E081", f"truncate is {truncate}, but the model has {max_tokens} positions")
        self._tokenizer = tokenizer
        self._missing = ""
        self._remedies = remedies or Remedies()
        self._special_tokens = special_tokens
        self._add_generation_prompt = add_generation_prompt
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
        made = cls(
            tokenizer,
            special_tokens=special_tokens,
            add_generation_prompt=add_generation_prompt,
            truncate=truncate,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
        )
        made._missing = missing
        return made

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
        found: list[Document | KVFormatError | None] = [None] * len(sources)
        waiting: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for number, source in enumerate(sources):
            try:
                if source.token_ids is not None:
                    found[number] = self._checked(source, source.token_ids, path)
                elif source.messages is not None:
                    if source.images:
                        raise _refusal(
                            "E309",
                            source,
                            path,
                            f"its images are read by models that take some: {self._remedies.images}",
                        )
                    # A chat template writes the special tokens itself.
                    waiting[False].append((number, self._render(source, path)))
                else:
                    self._require(source, path)
                    waiting[self._special_tokens].append((number, source.text or ""))
            except KVFormatError as error:
                found[number] = error
        for special, texts in waiting.items():
            encoded = self._encode([text for _, text in texts], special_tokens=special)
            for (number, _), ids in zip(texts, encoded, strict=True):
                try:
                    if sources[number].text is not None:
                        self._refuse_doubled(sources[number], ids, path)
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
                self._template(None, None)
            elif kind == "text":
                self._require(None, None)
        except KVFormatError:
            return False
        return True

    def text(self, kinds: AbstractSet[Kind]) -> Text:
        """How documents of these kinds became ids; members that played no part are absent."""
        truncate = self._truncate
        if not kinds & {"text", "messages"}:
            return Text(truncate=truncate)
        tokenizer = self._require(None, None)
        ids = tokenizer(CANARY, add_special_tokens=self._special_tokens)["input_ids"]
        chat = "messages" in kinds
        return Text(
            add_generation_prompt=self._add_generation_prompt if chat else None,
            canary=Canary(text=CANARY, token_ids=tuple(ids)),
            chat_template=hashlib.sha256(self._template(None, None).encode()).hexdigest() if chat else None,
            special_tokens=self._special_tokens,
            tokenizer=tokenizer_digest(tokenizer),
            truncate=truncate,
        )

    def difference(self, text: Text) -> str | None:
        """What tells that documents were tokenised by another tokenizer or template than this one, or None.

        Nothing is found where no text was tokenised, or where there is no tokenizer to compare with.
        """
        if text.canary is None or self._tokenizer is None:
            return None
        if text.tokenizer != tokenizer_digest(self._tokenizer):
            return "their text was tokenised by another tokenizer than the model's"
        (ids,) = self._encode([text.canary.text], special_tokens=bool(text.special_tokens))
        if tuple(ids) != text.canary.token_ids:
            return "the canary has other ids with the model's tokenizer"
        if text.chat_template is not None:
            try:
                template = hashlib.sha256(self._template(None, None).encode()).hexdigest()
            except KVFormatError:
                template = ""
            if text.chat_template != template:
                return "their messages were rendered by another chat template than the model's"
        return None

    def _checked(self, source: Source, ids: Sequence[int] | NDArray[np.int32], path: object) -> Document:
        """Document of ids, within the model's limits."""
        if len(ids) == 0:
            raise _refusal(
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
            raise _refusal("E300", source, path, message)
        if self._truncate is not None:
            numbers = numbers[: self._truncate]
        if self._max_tokens is not None and len(numbers) > self._max_tokens:
            raise _refusal(
                "E301",
                source,
                path,
                f"{len(numbers)} tokens, but the model has {self._max_tokens} positions; shorten the document or "
                f"truncate it on request (--truncate {self._max_tokens})",
            )
        try:
            return Document.of(numbers)
        except KVFormatError as error:
            raise _refusal("E300", source, path, error.message) from error

    def _encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        found: list[list[int]] = self._require(None, None)(
            texts,
            add_special_tokens=special_tokens,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return found

    def _refuse_doubled(self, source: Source, ids: Sequence[int], path: object) -> None:
        tokenizer = self._require(source, path)
        bos = tokenizer.bos_token_id
        if self._special_tokens and bos is not None and list(ids[:2]) == [bos, bos]:
            raise _refusal(
                "E305",
                source,
                path,
                f"the text begins with {tokenizer.bos_token!r} and the tokenizer adds another; take it out of the "
                "text or turn special tokens off (--no-special-tokens)",
            )

    def _render(self, source: Source, path: object) -> str:
        tokenizer = self._require(source, path)
        self._template(source, path)
        messages: list[Message] = list(source.messages or ())
        try:
            rendered: Any = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=self._add_generation_prompt
            )
        except Exception as error:  # a template may raise anything, on purpose or not
            raise _refusal("E305", source, path, f"the chat template refuses these messages: {error}") from error
        return str(rendered)

    def _require(self, source: Source | None, path: object) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise _refusal(
                "E305",
                source,
                path,
                f"text needs a tokenizer, {self._remedies.text}{self._missing}",
            )
        return self._tokenizer

    def _template(self, source: Source | None, path: object) -> str:
        tokenizer = self._require(source, path)
        try:
            template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise _refusal(
                "E305",
                source,
                path,
                "messages need a chat template, and the tokenizer has none that stands by itself; give `text` or "
                f"`token_ids` ({error})",
            ) from error
        if "strftime_now" in template:
            raise _refusal(
                "E305",
                source,
                path,
                "the chat template reads the clock, so the same messages give other ids tomorrow; render them with a "
                "date of your choice and give `text` (with --no-special-tokens) or `token_ids`",
            )
        return template


def _refusal(code: str, source: Source | None, path: object, message: str) -> KVFormatError:
    """An error about a source, whose place its message begins with; or about all of them."""
    if source is None:
        return make_error(code, message, path=path)
    return make_error(code, f"{source.place}: {message}", path=path, record=source.id)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) over the whole tokenizer: vocabulary, merges, added tokens, normaliser, pre- and post-processor.

    Taken over the JSON serialisation with sorted members and without white space; padding and truncation, which this
    package sets itself, are left out.

    Raises
    ------
    InputError
        E305 for a tokenizer without such a serialisation.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise make_error(
            "E305",
            f"{type(tokenizer).__name__} has no serialisation to identify it by; save it as tokenizer.json, or give "
            "documents as `token_ids`",
        )
    state = json.loads(backend.to_str())
    state["padding"] = state["truncation"] = None
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
