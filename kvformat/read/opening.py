"""``kvformat.open``: root and manifest are read and proved, everything else when it is touched."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

from kvformat.errors import (
    FormatError,
    IdentityError,
    KVFormatError,
    KVFormatWarning,
    UnsupportedError,
    make_error,
)
from kvformat.read.dataset import LEVELS, Dataset, Verify
from kvformat.read.missing import not_published
from kvformat.spec import limits
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import Manifest, parse_manifest, parse_root
from kvformat.spec.paths import ROOT, manifest_path
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.local_read import LocalReader
from kvformat.storage.readers import IO, Location, Reader, reader_of
from kvformat.storage.remote_options import RemoteOptions

__all__ = ["load_manifest", "open_dataset"]


def open_dataset(
    location: Location,
    *,
    expected_id: str | None = None,
    verify: Verify = "first",
    io: IO = "auto",
    max_open_files: int = 128,
    cache: CacheOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
) -> Dataset:
    """Open a published dataset.

    Parameters
    ----------
    location
        Local directory, or URL: ``file://``, ``s3://``, ``gs://``, ``az://``, ``https://``, ``hf://`` and whatever
        else fsspec has a file system for.
    expected_id
        Dataset id to insist on: pin it in what trains on the dataset.
    verify
        ``first``: every index part and slab is verified when this process first touches it. ``always``: at every
        access. ``off``: never; said explicitly by those who verified otherwise.
    io
        ``mmap`` files, read them by ``pread``, or ``auto``: pread on network and FUSE mounts and where mapping fails,
        else mmap. A file that is cut short while it is mapped ends the process with SIGBUS; by ``pread`` that is E005.
        So replace or remove the files of a dataset that is open; do not write to them. Of a URL it is about the files
        of the cache.
    max_open_files
        Shards held open, or records of a URL; tensors that are alive keep theirs mapped beyond that.
    cache
        Of a URL: where to keep what was fetched and verified, for all processes of the machine. Without one, it is
        kept in memory as long as it is used. A local directory is read in place.
    storage_options
        Of a URL: what fsspec's file system takes, such as credentials and ``endpoint_url``. They travel in a pickle of
        the dataset, and appear nowhere else. By default the environment's.
    remote_options
        Of a URL: sizes, numbers and deadlines of requests.

    Raises
    ------
    DatasetNotFoundError
        E001.
    UnsupportedError
        E012, E013.
    FormatError, DamageError
        E002 to E059.
    IdentityError
        E007 where the id is not ``expected_id``.
    StorageError, UsageError, DependencyError
        E203, E207, E208 of an object store; E211 of a cache's directory; E081, E205, E206.
    """
    if verify not in LEVELS:
        raise make_error("E081", f"verify must be one of {', '.join(LEVELS)}, found {verify!r}")
    if io not in ("auto", "mmap", "pread"):
        raise make_error("E081", f"io must be auto, mmap or pread, found {io!r}")
    reader = reader_of(
        location,
        io=io,
        cache=cache,
        storage_options=storage_options,
        remote_options=remote_options,
        verify=verify != "off",
    )
    identity, manifest, layout = load_manifest(reader, expected_id=expected_id)
    minor = int(manifest.version.partition(".")[2])
    if minor > limits.MINOR:
        message = f"written by version {manifest.version}, this reader knows {limits.VERSION}"
        warnings.warn(KVFormatWarning(message, code="W003", path=reader.location), stacklevel=2)
    options: dict[str, Any] = {"verify": verify, "io": io, "max_open_files": max_open_files}
    if reader.is_remote:
        options |= {"cache": cache, "storage_options": storage_options, "remote_options": remote_options}
    source = location if reader.is_remote else reader.location
    return Dataset(reader, location=source, dataset_id=identity, manifest=manifest, layout=layout, options=options)


def load_manifest(reader: Reader, *, expected_id: str | None = None) -> tuple[str, Manifest, Layout]:
    """Dataset id, manifest and layout of the dataset under a reader; errors as for :func:`open_dataset`."""
    try:
        return _load_manifest(reader, expected_id)
    except (FormatError, IdentityError, UnsupportedError):
        if not reader.is_remote:
            raise
    return _load_manifest(reader, expected_id)  # it may have been damaged on the way


def _load_manifest(reader: Reader, expected_id: str | None) -> tuple[str, Manifest, Layout]:
    path = reader.path(ROOT)
    try:
        data = reader.read(ROOT, max_nbytes=limits.MAX_ROOT_NBYTES)
    except KVFormatError as error:
        if error.code != "E002":
            raise
        if isinstance(reader, LocalReader):
            raise not_published(reader.root) from None
        raise make_error("E001", "no dataset is published here: check the URL", path=path) from None
    identity = hashlib.sha256(data).hexdigest()
    if expected_id is not None and identity != expected_id.lower():
        short = "" if len(expected_id) == len(identity) else ": an id has 64 digits, see `Dataset.id`"
        raise make_error("E007", f"the dataset id is {identity}, expected {expected_id}{short}", path=path)
    root = parse_root(data, path=path)
    name = manifest_path(root.manifest.sha256)
    manifest_bytes = reader.read(name, nbytes=root.manifest.size)
    if hashlib.sha256(manifest_bytes).hexdigest() != root.manifest.sha256:
        raise make_error("E006", "the manifest's SHA-256 is not the root's: restore the file", path=reader.path(name))
    manifest, layout = parse_manifest(manifest_bytes, root, path=reader.path(name))
    return identity, manifest, layout
