"""What a location string or path refers to."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from kvformat.errors import make_error

__all__ = ["local_path", "resolve"]

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
_COLLAPSED = re.compile(r"(?:s3a?|gc?s|az|abfss?|https?|hf):/[^/]")
_CHAINED = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*::.*://|.*::[a-zA-Z][a-zA-Z0-9+.-]*://")
_LOCAL = ("file", "local")
_HTTP = ("http", "https")
# File systems of fsspec that wrap another one, or hold no objects of their own.
_WRAPPERS = frozenset(
    {
        "async_wrapper",
        "asyncwrapper",
        "blockcache",
        "cached",
        "data",
        "dir",
        "filecache",
        "generic",
        "libarchive",
        "reference",
        "simplecache",
        "tar",
        "zip",
    }
)


def resolve(location: str | os.PathLike[str]) -> Path | str:
    """Absolute path of a local location, or the URL of a remote one: scheme in small letters, no final slash.

    Raises
    ------
    UsageError
        E206 for a scheme there is no file system for, and for chained URLs; E081 for what is no location, and for
        URLs that hold a secret.
    """
    text: object = os.fspath(location)
    if not isinstance(text, str) or not text or "\0" in text:
        raise make_error("E081", f"a location is a non-empty path or URL, found {location!r}")
    found = _SCHEME.match(text)
    if isinstance(location, str) and _CHAINED.match(text):
        raise make_error(
            "E206",
            f"chained URLs are not read, found {_shown(text)!r}: give the last URL alone; `cache=` makes local copies",
        )
    if found is None:
        if _COLLAPSED.match(text):
            why = "one slash is missing" if isinstance(location, str) else "a path collapses slashes: pass a string"
            raise make_error("E081", f"a URL begins with scheme://, found {location!r}: {why}")
        return Path(os.path.abspath(text))
    scheme = found[1].lower()
    try:
        parts = urlsplit(text)
        secret = parts.password is not None or (scheme in _HTTP and parts.username is not None)
    except ValueError:
        raise make_error("E081", f"no URL: {_shown(text)!r}") from None
    if secret:
        raise make_error(
            "E081",
            f"a URL goes into logs and messages: take the credentials out of {_shown(text)!r} and pass them as "
            "`storage_options`, or in the environment",
        )
    if scheme in _LOCAL:
        return _file_path(parts, text)
    _check_remote(scheme, parts, text)
    return scheme + text[len(scheme) :].rstrip("/")


def local_path(location: str | os.PathLike[str]) -> Path:
    """Absolute local path of a location: a path, or a ``file://`` URL.

    Raises
    ------
    UsageError
        E206 for any other scheme, E081 for an empty location.
    """
    found = resolve(location)
    if isinstance(found, str):
        raise make_error(
            "E206",
            f"only local paths and file:// URLs are used here, found {found!r}: copy it with `kvformat copy`",
        )
    return found


def _file_path(parts: SplitResult, text: str) -> Path:
    if parts.netloc not in ("", "localhost"):
        raise make_error("E206", f"a file:// URL names a file of this machine, found {text!r}: use a mounted path")
    path = unquote(parts.path)
    if not path or "\0" in path:
        raise make_error("E081", f"a location is a non-empty path or URL, found {text!r}")
    return Path(os.path.abspath(path))


def _check_remote(scheme: str, parts: SplitResult, text: str) -> None:
    if scheme in _WRAPPERS or scheme not in _known_schemes():
        raise make_error(
            "E206",
            f"no file system for {scheme}:// is known to fsspec, found {text!r}: use a local path, or s3://, gs://, "
            "az://, https://, hf:// or another scheme of fsspec",
        )
    if not parts.netloc and scheme != "memory":
        raise make_error("E081", f"a URL names a bucket, container or host after {scheme}://, found {text!r}")
    if parts.fragment and scheme in _HTTP:
        raise make_error("E081", f"a fragment (#) is no part of a location, found {text!r}")
    if "?" in text and scheme not in _HTTP:
        raise make_error("E081", f"a query (?) is no part of a location, found {text!r}: use `storage_options`")
    if any(each in (".", "..") for each in parts.path.split("/")):
        raise make_error("E081", f"objects have no relative names: take . and .. out of {text!r}")


def _known_schemes() -> frozenset[str]:
    from fsspec import available_protocols

    return frozenset(available_protocols())


def _shown(text: str) -> str:
    """The URL without what stands before ``@``."""
    scheme, _, rest = text.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://...@{authority.rpartition('@')[2]}{slash}{path}" if "@" in authority else text
