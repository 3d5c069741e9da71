"""Text to token ids, and the record of how: every choice that changes the ids enters the ``text`` section."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.sources import Kind, Message, Source
from kvformat.spec.context import Canary, Text
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from transformers import PreTrainedTokenizerBase

__all__ = ["CANARY", "Tokeniser", "tokenizer_digest"]

CANARY = "  The keys' 3 values: naïve café — 北京, Ω≈1.602e-19, 🙂\n\tdef f(x): return x**2  # <|end|> [INST] </s>"
"""Text whose ids tell tokenizers apart: leading spaces, digits, scripts, emoji, code, near-special tokens."""


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
    ) -> None:
        if truncate is not None and truncate < 1:
            raise make_error("E081", f"truncate must be at least 1, found {truncate}")
        if truncate is not None and max_tokens is not None and truncate > max_tokens:
            raise make_error("E081", f"truncate is {truncate}, but the model has {max_tokens} positions")
        self._tokenizer = tokenizer
        self._missing = ""
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
        """Document of a source.

        Raises
        ------
        InputError
            E300 no tokens, or an id beyond the vocabulary; E301 longer than the model's positions; E305 no tokenizer,
            no chat template, or BOS doubled.
        """
        if source.token_ids is not None:
            ids = list(source.token_ids)
        elif source.messages is not None:
            ids = self._encode_messages(source, path)
        else:
            ids = self._encode_text(source, path)
        if not ids:
            raise make_error(
                "E300",
                f"line {source.line}: the text has no tokens; give an empty caption a token of its own, with special "
                'tokens or as {"token_ids": [BOS]}',
                path=path,
                record=source.id,
            )
        if self._vocab_size is not None and max(ids) >= self._vocab_size:
            raise make_error(
                "E300",
                f"line {source.line}: token id {max(ids)} is beyond the model's vocabulary of {self._vocab_size}",
                path=path,
                record=source.id,
            )
        if self._truncate is not None:
            ids = ids[: self._truncate]
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            raise make_error(
                "E301",
                f"line {source.line}: {len(ids)} tokens, but the model has {self._max_tokens} positions; shorten the "
                f"document or truncate it on request (--truncate {self._max_tokens})",
                path=path,
                record=source.id,
            )
        try:
            return Document.of(ids)
        except KVFormatError as error:
            raise make_error("E300", f"line {source.line}: {error.message}", path=path, record=source.id) from error

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

    def _encode_text(self, source: Source, path: object) -> list[int]:
        tokenizer = self._require(source, path)
        ids: list[int] = tokenizer(source.text, add_special_tokens=self._special_tokens, truncation=False)["input_ids"]
        bos = tokenizer.bos_token_id
        if self._special_tokens and bos is not None and ids[:2] == [bos, bos]:
            raise make_error(
                "E305",
                f"line {source.line}: the text begins with {tokenizer.bos_token!r} and the tokenizer adds another; "
                "take it out of the text or turn special tokens off (--no-special-tokens)",
                path=path,
                record=source.id,
            )
        return ids

    def _encode_messages(self, source: Source, path: object) -> list[int]:
        tokenizer = self._require(source, path)
        self._template(source, path)
        messages: list[Message] = list(source.messages or ())
        try:
            rendered: Any = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=self._add_generation_prompt
            )
        except Exception as error:  # a template may raise anything, on purpose or not
            raise make_error(
                "E305",
                f"line {source.line}: the chat template refuses these messages: {error}",
                path=path,
                record=source.id,
            ) from error
        ids: list[int] = tokenizer(rendered, add_special_tokens=False, truncation=False)["input_ids"]
        return ids

    def _require(self, source: Source | None, path: object) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            where = "" if source is None else f"line {source.line}: "
            raise make_error(
                "E305",
                f"{where}text needs a tokenizer, and the model has none that loads; give documents as `token_ids`"
                f"{self._missing}",
                path=path,
                record=None if source is None else source.id,
            )
        return self._tokenizer

    def _template(self, source: Source | None, path: object) -> str:
        where = "" if source is None else f"line {source.line}: "
        record = None if source is None else source.id
        try:
            template: str = self._require(source, path).get_chat_template()
        except ValueError as error:
            raise make_error(
                "E305",
                f"{where}messages need a chat template, and the tokenizer has none that stands by itself; give "
                f"`text` or `token_ids` ({error})",
                path=path,
                record=record,
            ) from error
        if "strftime_now" in template:
            raise make_error(
                "E305",
                f"{where}the chat template reads the clock, so the same messages give other ids tomorrow; render them "
                "with a date of your choice and give `text` (with --no-special-tokens) or `token_ids`",
                path=path,
                record=record,
            )
        return template


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
