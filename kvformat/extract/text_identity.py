"""How text became token ids, as it is recorded: what tells tokenizers and chat templates apart."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Kind
from kvformat.extract.text_encoder import TextEncoder
from kvformat.spec.context import Canary, Text

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from transformers import PreTrainedTokenizerBase

__all__ = ["CANARY", "recorded_text", "text_difference", "tokenizer_digest"]

CANARY = "  The keys' 3 values: naïve café — 北京, Ω≈1.602e-19, 🙂\n\tdef f(x): return x**2  # <|end|> [INST] </s>"
"""Text whose ids tell tokenizers apart: leading spaces, digits, scripts, emoji, code, near-special tokens."""


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


def recorded_text(encoder: TextEncoder, kinds: AbstractSet[Kind], *, truncate: int | None) -> Text:
    """How documents of these kinds became ids; members that played no part are absent.

    Raises
    ------
    InputError
        E305 where there is no tokenizer, none that can be identified, or no chat template, and one played a part.
    """
    if not kinds & {"text", "messages"}:
        return Text(truncate=truncate)
    tokenizer = encoder.required()
    ids = tokenizer(CANARY, add_special_tokens=encoder.special_tokens)["input_ids"]
    chat = "messages" in kinds
    return Text(
        add_generation_prompt=encoder.add_generation_prompt if chat else None,
        canary=Canary(text=CANARY, token_ids=tuple(ids)),
        chat_template=_digest(encoder.template()) if chat else None,
        special_tokens=encoder.special_tokens,
        tokenizer=tokenizer_digest(tokenizer),
        truncate=truncate,
    )


def text_difference(encoder: TextEncoder, text: Text) -> str | None:
    """What tells that documents were tokenised by another tokenizer or template than this one, or None.

    Nothing is found where no text was tokenised, or where there is no tokenizer to compare with.
    """
    if text.canary is None or encoder.tokenizer is None:
        return None
    if text.tokenizer != tokenizer_digest(encoder.tokenizer):
        return "their text was tokenised by another tokenizer than the model's"
    (ids,) = encoder.encode([text.canary.text], special_tokens=bool(text.special_tokens))
    if tuple(ids) != text.canary.token_ids:
        return "the canary has other ids with the model's tokenizer"
    if text.chat_template is not None:
        try:
            template = _digest(encoder.template())
        except KVFormatError:
            template = ""
        if text.chat_template != template:
            return "their messages were rendered by another chat template than the model's"
    return None


def _digest(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()
