"""Which client serves an object store: obstore or fsspec, and what is missing for it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from typing import Any

from kvformat.errors import make_error
from kvformat.storage.fsspec_store import FsspecStore
from kvformat.storage.location import resolve
from kvformat.storage.obstore_options import Inexpressible, target_of
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.storage_options import check_options
from kvformat.storage.store import Store, StoreFault
from kvformat.storage.store_faults import fault_of

__all__ = ["connect"]

_OBSTORE_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
_PACKAGES = {
    "s3": "'kvformat[s3]'",
    "s3a": "'kvformat[s3]'",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
}


class _Fork:
    """Whether this process was forked by one that had loaded obstore, whose threads do not survive that."""

    # A child that loads this module itself cannot know; one that finds obstore loaded already is presumed to be it.
    lost_obstore = "obstore" in sys.modules and multiprocessing.parent_process() is not None

    @classmethod
    def after(cls) -> None:
        cls.lost_obstore = cls.lost_obstore or "obstore" in sys.modules


os.register_at_fork(after_in_child=_Fork.after)


def connect(url: str, storage_options: dict[str, Any] | None, options: RemoteOptions) -> Store:
    """A client for an object store, of this process.

    ``transport="auto"`` is obstore where it is installed, knows the scheme, can express the options, and this process
    is no fork of one that had loaded it; else fsspec.

    Raises
    ------
    KVFormatError
        E205 where a package is missing; E206 for a scheme there is none for; E081 for options that make no sense, and
        where obstore is asked for, and cannot serve.
    StoreFault
        Where a client that connects at once cannot.
    """
    given = storage_options or {}
    scheme = url.partition("://")[0].lower()
    check_options(url, given)
    if options.transport != "fsspec":
        reason = _no_obstore(url, scheme, given, options)
        if reason is None:
            try:
                return _obstore(url, scheme, given, options)
            except StoreFault as error:
                reason = f"it refuses the settings ({error})"
        if options.transport == "obstore":
            if reason == _MISSING:
                raise make_error("E205", "obstore is not installed: pip install 'kvformat[obstore]'", path=url)
            raise make_error("E081", f"obstore cannot serve this: {reason}: use transport='auto'", path=url)
    return _fsspec(url, scheme, given, options)


_MISSING = "missing"


def _no_obstore(url: str, scheme: str, given: dict[str, Any], options: RemoteOptions) -> str | None:
    """Why obstore does not serve; None where it does."""
    if scheme not in _OBSTORE_SCHEMES:
        return f"it knows no {scheme}://"
    if importlib.util.find_spec("obstore") is None:
        return _MISSING
    if _Fork.lost_obstore:
        return "its threads do not survive a fork: start workers with spawn or forkserver"
    try:
        target_of(url, given, timeout_s=options.attempt_timeout_s)
    except Inexpressible as error:
        return f"it has no setting for {error}"
    return None


def _obstore(url: str, scheme: str, given: dict[str, Any], options: RemoteOptions) -> Store:
    from kvformat.storage.obstore_store import ObstoreStore

    in_parts = scheme in ("s3", "s3a") and importlib.util.find_spec("s3fs") is not None
    return ObstoreStore(
        url,
        given,
        max_requests=options.max_requests,
        timeout_s=options.attempt_timeout_s,
        parts=(lambda: _fsspec(url, scheme, given, options)) if in_parts else None,
    )


def _fsspec(url: str, scheme: str, given: dict[str, Any], options: RemoteOptions) -> Store:
    if scheme not in ("file", "local"):
        resolve(url)  # E206
    try:
        return FsspecStore(url, given, max_requests=options.max_requests)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        remedy = f"pip install {package}" if package else f"fsspec says: {error}"
        raise make_error("E205", f"{scheme}:// needs a package that is not installed: {remedy}", path=url) from error
    except OSError as error:  # of clients that connect when they are made
        raise fault_of(error) from error
    except (TypeError, ValueError, KeyError) as error:
        raise make_error(
            "E081", f"the file system of {scheme}:// refuses the storage_options: {type(error).__name__}", path=url
        ) from error
