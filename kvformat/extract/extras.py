"""Packages that extraction needs beside the core, which an extra installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvformat.errors import make_error

__all__ = ["needing"]


@contextmanager
def needing(what: str) -> Iterator[None]:
    """A block of imports of what the ``hf`` extra installs.

    Parameters
    ----------
    what
        Subject and verb of the message: ``extraction needs``.

    Raises
    ------
    DependencyError
        E205 where a module is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise make_error("E205", f"{what} {error.name}: pip install 'kvformat[hf]'") from error
