"""How transformers is called: its progress bars off, its errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

__all__ = ["first_line", "no_progress_bars"]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """The caller reports progress; bars of the library's own would break into it."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Type and first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
