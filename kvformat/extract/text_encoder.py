"""Texts and messages to token ids by a tokenizer, and the refusals of what would give other ids than one thinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Message, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Remedies", "TextEncoder", "refusal"]


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


class TextEncoder:
    """A tokenizer with its chat template. Threads may use it at the same time.

    Parameters
    ----------
    tokenizer
        A fast tokenizer, or None where every document comes as token ids.
    special_tokens
        Whether plain text gets the tokenizer's special tokens (BOS, EOS). A chat template writes its own, so messages
        never get them a second time.
    add_generation_prompt
        Whether rendered messages end with the opening of an assistant turn.
    remedies
        For messages, where the caller's user has other means than those of an extraction.
    missing
        Why there is no tokenizer; ends the message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        special_tokens: bool,
        add_generation_prompt: bool,
        remedies: Remedies,
        missing: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.add_generation_prompt = add_generation_prompt
        self.remedies = remedies
        self._missing = missing

    def required(self, source: Source | None = None, path: object = None) -> PreTrainedTokenizerBase:
        """The tokenizer; E305 where there is none."""
        if self.tokenizer is None:
            raise refusal("E305", source, path, f"text needs a tokenizer, {self.remedies.text}{self._missing}")
        return self.tokenizer

    def template(self, source: Source | None = None, path: object = None) -> str:
        """The chat template; E305 where there is none, or one that reads the clock."""
        tokenizer = self.required(source, path)
        try:
            template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise refusal(
                "E305",
                source,
                path,
                "messages need a chat template, and the tokenizer has none that stands by itself; give `text` or "
                f"`token_ids` ({error})",
            ) from error
        if "strftime_now" in template:
            raise refusal(
                "E305",
                source,
                path,
                "the chat template reads the clock, so the same messages give other ids tomorrow; render them with a "
                "date of your choice and give `text` (with --no-special-tokens) or `token_ids`",
            )
        return template

    def render(self, source: Source, path: object = None) -> str:
        """A source's messages as text, by the chat template; E305 where that refuses them."""
        tokenizer = self.required(source, path)
        self.template(source, path)
        messages: list[Message] = list(source.messages or ())
        try:
            rendered: Any = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=self.add_generation_prompt
            )
        except Exception as error:  # a template may raise anything, on purpose or not
            raise refusal("E305", source, path, f"the chat template refuses these messages: {error}") from error
        return str(rendered)

    def encode(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        """Ids of some texts, in one call; E305 without a tokenizer, unless there are no texts."""
        if not texts:
            return []
        found: list[list[int]] = self.required()(
            texts,
            add_special_tokens=special_tokens,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return found

    def refuse_doubled(self, source: Source, ids: Sequence[int], path: object = None) -> None:
        """Refuse a text that begins with BOS itself where the tokenizer adds one; E305."""
        tokenizer = self.required(source, path)
        bos = tokenizer.bos_token_id
        if self.special_tokens and bos is not None and list(ids[:2]) == [bos, bos]:
            raise refusal(
                "E305",
                source,
                path,
                f"the text begins with {tokenizer.bos_token!r} and the tokenizer adds another; take it out of the "
                "text or turn special tokens off (--no-special-tokens)",
            )


def refusal(code: str, source: Source | None, path: object, message: str) -> KVFormatError:
    """An error about a source, whose place its message begins with; or about all of them."""
    if source is None:
        return make_error(code, message, path=path)
    return make_error(code, f"{source.place}: {message}", path=path, record=source.id)
