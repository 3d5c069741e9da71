"""The tokenizer of a model, by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from kvformat.errors import make_error
from kvformat.extract.hf.hub import commit_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer"]


def load_tokenizer(model: str | Path, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Tokenizer of a model directory or hub id.

    Raises
    ------
    InputError
        E305 where none loads.
    """
    commit = commit_of(model, revision) or revision
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(model), revision=commit or "main")
    except Exception as error:  # transformers raises whatever the missing or odd file led to
        reason = str(error).strip().partition("\n")[0]
        raise make_error(
            "E305", f"no tokenizer loads from there: {type(error).__name__}: {reason}", path=model
        ) from error
    return found
