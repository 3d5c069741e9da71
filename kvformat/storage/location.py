"""What a location string or path refers to."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvformat.errors import make_error

__all__ = ["local_path"]

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def local_path(location: str | os.PathLike[str]) -> Path:
    """Absolute local path of a location: a path, or a ``file://`` URL.

    Raises
    ------
    UsageError
        E206 for any other scheme, E081 for an empty location.
    """
    text: object = os.fspath(location)
    if isinstance(text, str) and _SCHEME.match(text):
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise make_error("E206", f"only local paths and file:// URLs are read and written, found {text!r}")
        text = unquote(parts.path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise make_error("E081", f"a location is a non-empty path or URL, found {location!r}")
    return Path(os.path.abspath(text))
