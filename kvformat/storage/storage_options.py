"""Storage options as users give them: what would be found out only after a minute of attempts, or never."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvformat.errors import make_error

__all__ = ["check_options"]

_TEXTS = ("key", "secret", "token", "username", "password", "profile")
_MAPPINGS = ("client_kwargs", "config_kwargs")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def check_options(url: str, options: Mapping[str, Any]) -> None:
    """E081 where options cannot be meant. Values are not shown: they may be secret.

    Parameters
    ----------
    url
        For messages, and for its scheme.
    """
    if not all(isinstance(name, str) for name in options):
        raise make_error("E081", "storage_options have names that are no strings: give a mapping by name", path=url)
    if url.partition("://")[0].lower() not in ("s3", "s3a"):
        return
    for name in _MAPPINGS:
        _require(url, name, options.get(name), Mapping, "a mapping")
    client, config = (options.get(name) or {} for name in _MAPPINGS)
    _require(url, "config_kwargs['s3']", config.get("s3"), Mapping, "a mapping")
    for name in _TEXTS:
        _require(url, name, options.get(name), str | bytes, "a string")
    for given in (options, client):
        if given.get("endpoint_url") is not None:
            _check_endpoint(url, "endpoint_url", given["endpoint_url"])
            return
    for name in _ENDPOINTS:
        if found := os.environ.get(name):
            _check_endpoint(url, name, found)
            return


def _require(url: str, name: str, value: Any, kind: Any, what: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise make_error("E081", f"{name} in storage_options must be {what}, found {type(value).__name__}", path=url)


def _check_endpoint(url: str, name: str, endpoint: object) -> None:
    text = endpoint if isinstance(endpoint, str) else ""
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if "@" in text:
        message = f"{name} goes into logs and messages: take the credentials out of it, and pass key and secret"
        raise make_error("E081", message, path=url)
    if not sound:
        message = f"{name} must be http:// or https:// and a host, found {endpoint!r:.80}"
        raise make_error("E081", message, path=url)
