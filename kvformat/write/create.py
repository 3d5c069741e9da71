"""``kvformat.create``."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvformat.errors import make_error
from kvformat.spec import limits
from kvformat.spec.context import Context, Text
from kvformat.spec.schema import Schema
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.readers import Location, remote_of
from kvformat.storage.remote_options import RemoteOptions
from kvformat.write.local_target import LocalTarget
from kvformat.write.remote_target import RemoteTarget
from kvformat.write.spool_places import spool_directory
from kvformat.write.target import Target
from kvformat.write.writer import OnDuplicate, Writer

__all__ = ["create"]


def create(
    location: Location,
    *,
    schema: Schema,
    context: Context,
    text: Text | None = None,
    provenance: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    extensions: Mapping[str, Any] | None = None,
    shard_nbytes: int = 1 << 30,
    shard_slots: int = 1024,
    resume: bool = False,
    tag: str = "",
    on_duplicate: OnDuplicate = "error",
    allow_non_finite: Collection[str] = (),
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
    spool: str | os.PathLike[str] | None = None,
    filesystem: LocalFiles | None = None,
) -> Writer:
    """Start a dataset at a location where none is.

    Parameters
    ----------
    location
        Local directory or ``file://`` URL, made where it does not exist; or a URL of an object store, such as
        ``s3://bucket/dataset``. A :class:`~kvformat.storage.remote.Remote` brings a client of its own.
    schema
        Which tensors every record has.
    context
        What determines the values; ``Context.unknown()`` where nobody knows.
    text, provenance
        How text became token ids, and what is recorded without being compared.
    files
        Covered files by label.
    extensions
        Free canonical JSON, carried along and never interpreted.
    shard_nbytes
        A shard closes before its data would exceed this many bytes.
    shard_slots
        Most records of a shard. The header of every shard is as large as that many records demand.
    resume
        Continue what an interrupted run with the same plan left staged: the caller replays the same adds. An exception
        then keeps the finished shards. Documents, values, schema, context and shard sizes must be those of that run;
        names, text, provenance and files are not staged, and may be others. In an object store, any machine continues
        it.
    tag
        Part of the plan: two runs with different tags never continue each other.
    on_duplicate
        What becomes of a document that is stored already, with other bytes: ``error`` or ``keep_first``.
    allow_non_finite
        Components and extras that may hold NaN or infinities.
    storage_options, remote_options
        Of an object store: what fsspec's file system of the scheme takes, such as credentials, and how it is used.
    spool
        Local directory in which shards of an object store wait for their upload: at most four of them, so room for
        ``4 * (shard_nbytes + header)`` is needed, or more where a single record is larger. What is in it is removed
        as soon as it is uploaded, or at the end; what a killed process left, by the next writer that uses the
        directory. Without it, ``kvformat/spool`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    filesystem
        Operations that change the disk; tests inject their own.

    Returns
    -------
    Writer
        To be used as a context manager.

    Raises
    ------
    DatasetExistsError
        E100, when the block is entered.
    StorageError
        When the block is entered: E207 where nothing can be written, E208 where an object store cannot be reached,
        E209 where it cannot commit, because it replaces what is there.
    FormatError, UsageError
        E018, E030 to E040 for a schema that breaks a rule, E081 for other arguments.
    """
    for what, value, wanted, how in (
        ("schema", schema, Schema, "see Schema.uniform"),
        ("context", context, Context, "pass Context.unknown() where nobody knows it"),
        ("text", text or Text(), Text, "see Text"),
    ):
        if not isinstance(value, wanted):
            raise make_error("E081", f"{what} must be a {wanted.__name__}, found {value!r:.80}: {how}")
    for what, mapping in (
        ("provenance", provenance),
        ("files", files),
        ("extensions", extensions),
        ("storage_options", storage_options),
    ):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise make_error("E081", f"{what} must be a mapping, found {mapping!r:.80}")
    for label, data in (files or {}).items():
        if not _is_file(label, data):
            message = f"files must be bytes by label, found {type(data).__name__} as {label!r:.80}: pass bytes(...)"
            raise make_error("E081", message)
    if not _are_names(allow_non_finite):
        raise make_error("E081", f"allow_non_finite must be a collection of names, found {allow_non_finite!r:.80}")
    if not _whole(shard_nbytes, limits.MAX_FILE_NBYTES):
        raise make_error("E081", f"shard_nbytes must be an integer of 1 to 2^48-1, found {shard_nbytes}")
    if not _whole(shard_slots, limits.MAX_SHARD_SLOTS):
        message = f"shard_slots must be an integer of 1 to {limits.MAX_SHARD_SLOTS}, found {shard_slots}"
        raise make_error("E081", message)
    if on_duplicate not in ("error", "keep_first"):
        raise make_error("E081", f"on_duplicate must be 'error' or 'keep_first', found {on_duplicate!r}")
    if not isinstance(remote_options, RemoteOptions | None):
        raise make_error("E081", f"remote_options must be RemoteOptions, found {remote_options!r:.80}")
    return Writer(
        _target(location, storage_options, remote_options, spool, filesystem),
        schema=schema,
        context=context,
        text=text or Text(),
        provenance=provenance or {},
        covered=files or {},
        extensions=extensions,
        shard_nbytes=shard_nbytes,
        shard_slots=shard_slots,
        resume=resume,
        tag=tag,
        on_duplicate=on_duplicate,
        allow_non_finite=allow_non_finite,
    )


def _target(
    location: Location,
    storage_options: Mapping[str, Any] | None,
    remote_options: RemoteOptions | None,
    spool: str | os.PathLike[str] | None,
    files: LocalFiles | None,
) -> Target:
    found = remote_of(location, storage_options=storage_options, remote_options=remote_options)
    if isinstance(found, Path):
        return LocalTarget(found, files or LocalFiles())
    return RemoteTarget(found, spool_directory(spool), files=files, keep_open=found is location)


def _is_file(label: object, data: object) -> bool:
    """Other buffers are refused: they may change before they are published, and have items of several bytes."""
    return isinstance(label, str) and isinstance(data, bytes)


def _are_names(value: object) -> bool:
    """A single string is refused: its letters would count as names."""
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


def _whole(value: object, most: int) -> bool:
    return isinstance(value, int) and 1 <= value <= most
