"""Faults of object stores as kvformat errors, by what the caller can do about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.retry import ExhaustedFault
from kvformat.storage.store import (
    DeniedFault,
    ExpiredFault,
    FullFault,
    MissingFault,
    StoreFault,
    UnsupportedFault,
)

__all__ = ["Redactor", "translated"]

_USER = re.compile(r"(\w://)[^/\s@]*@")
_QUERY = re.compile(r"(\w://[^\s?'\"<>]*)\?[^\s'\"<>)]*")
_SHORTEST_SECRET = 4
_PUBLIC = frozenset(
    {"endpoint", "endpoint_url", "region", "region_name", "anon", "protocol", "project", "account_name"}
)

_WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch")
_MAY_BE_MISSING = "; without permission to list, a missing object is refused too"


class Redactor:
    """Takes out of a text what is nobody's business: user names and queries of URLs, values of storage options."""

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        self._secrets = sorted(set(_texts(storage_options)), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text without them."""
        text = _QUERY.sub(r"\1?...", _USER.sub(r"\1", text))
        for secret in self._secrets:
            text = text.replace(secret, "...")
        return text


_ENDPOINTS = dict.fromkeys(("s3", "s3a"), " (AWS_ENDPOINT_URL or endpoint_url, of another store than AWS)")
"""Where the address of a store is said, by scheme."""


@contextmanager
def translated(path: str, redact: Redactor, *, making: bool = False) -> Iterator[None]:
    """Raise the faults of the block as kvformat errors.

    The cause they name is a copy of the fault, without what the client's own errors say: those hold URLs with
    signatures, and whole requests.

    Parameters
    ----------
    making
        The block makes objects: one that is missing is the bucket.
    """
    try:
        yield
    except StoreFault as fault:
        raise _error(fault, path, redact, making=making) from _copy(fault, redact)


def _error(fault: StoreFault, path: str, redact: Redactor, *, making: bool) -> KVFormatError:
    said = redact(str(fault))
    said = f"{said}: " if said else ""
    if isinstance(fault, ExhaustedFault):
        tries = f"{fault.attempts} attempt{'s' if fault.attempts > 1 else ''} in {fault.seconds:.0f} s failed"
        how = f"the last with {type(fault.last).__name__}: {said}" if fault.last is not None else f"{said}"
        check = f"check network, store and endpoint{_ENDPOINTS.get(urlsplit(path).scheme, '')}"
        return make_error("E208", f"{tries}, {how}{check}; from Python, `deadline_s` gives it longer", path=path)
    if isinstance(fault, MissingFault):
        if making:
            return make_error("E203", f"{said}make the bucket or container first, or check the URL", path=path)
        return make_error("E002", "the object is missing: restore it from a copy of the dataset", path=path)
    if isinstance(fault, DeniedFault):
        what = "have expired, and new ones were refused too" if isinstance(fault, ExpiredFault) else "were refused"
        if "NoCredentials" in said:
            message = (
                f"there are no credentials: {said}set them in the environment (AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or a profile) or in `storage_options`, with anon=true for a public bucket"
            )
            return make_error("E207", message, path=path)
        hint = "" if any(code in said for code in _WRONG_KEYS) else _MAY_BE_MISSING
        message = (
            f"the credentials {what}: {said}check those in `storage_options` or, without any there, in the "
            f"environment and its configuration files{hint}"
        )
        return make_error("E207", message, path=path)
    if isinstance(fault, FullFault):
        return make_error("E200", f"{said}free space or raise the quota, and resume", path=path)
    if isinstance(fault, UnsupportedFault):
        return make_error("E203", f"{said}this store cannot do it: use another one, or update its package", path=path)
    return make_error("E203", f"{said}check the storage and try again", path=path)


def _copy(fault: StoreFault, redact: Redactor) -> StoreFault:
    inner = fault.last if isinstance(fault, ExhaustedFault) and fault.last is not None else fault
    said = redact(str(inner))
    if isinstance(inner, ExhaustedFault):
        return StoreFault(said)
    return type(inner)(said)


def _texts(value: object) -> Iterable[str]:
    """All strings below it that may be secret, those of headers and nested options too."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            if name not in _PUBLIC:
                yield from _texts(below)
    elif isinstance(value, list | tuple | set):
        for below in value:
            yield from _texts(below)
    elif isinstance(value, str) and len(value) >= _SHORTEST_SECRET:
        yield value
