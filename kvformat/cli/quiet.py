"""Keep the libraries beneath extraction from talking past this command line."""

from __future__ import annotations

import os

__all__ = ["quiet_libraries"]


def quiet_libraries(*, terminal: bool) -> None:
    """Ask the Hugging Face libraries for errors only and, off a terminal, for no bars; they read this when imported.

    Nothing is lost: a checkpoint that lacks weights is refused by extraction itself. What the user has set stays.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
