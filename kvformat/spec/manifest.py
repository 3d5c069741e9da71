"""Root and manifest: their members, and everything that is checked when a dataset is opened (SPEC.md, 6 and 7)."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvformat.errors import make_error
from kvformat.spec import canonical, limits, tables
from kvformat.spec.context import Context, Text
from kvformat.spec.context import check as check_context
from kvformat.spec.layout import Layout
from kvformat.spec.rules import check_schema
from kvformat.spec.schema import Schema

__all__ = [
    "CoveredFile",
    "Index",
    "LookupPart",
    "Manifest",
    "ManifestRef",
    "NamesPart",
    "Part",
    "Root",
    "Skipped",
    "Totals",
    "parse_manifest",
    "parse_root",
]

Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Hex16 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Integer = Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]
FileSize = Annotated[int, Meta(ge=0, le=limits.MAX_FILE_NBYTES)]
InputNumber = Annotated[int, Meta(ge=0, le=limits.MAX_RECORDS)]
FileLabel = Annotated[str, Meta(pattern=r"^[a-z0-9_.-]{1,64}\Z")]
Version = Annotated[str, Meta(pattern=r"^1\.(0|[1-9][0-9]{0,3})\Z")]
_MAJOR_MINOR = re.compile(r"([0-9]+)\.[0-9]+", re.ASCII)


class _Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class ManifestRef(_Base, frozen=True, kw_only=True):
    """Digest and size of the manifest."""

    sha256: Hex64
    size: Integer


class Root(_Base, frozen=True, kw_only=True):
    """``kvformat.json``: the commit record."""

    format: Literal["kvformat"]
    manifest: ManifestRef
    version: Version
    requires: tuple[str, ...] | None = None

    @property
    def minor(self) -> int:
        """Minor version."""
        return int(self.version.partition(".")[2])


class CoveredFile(_Base, frozen=True, kw_only=True):
    """A file under ``files/`` and its label."""

    name: FileLabel
    sha256: Hex64
    size: FileSize


class Part(_Base, frozen=True, kw_only=True):
    """One part of the ``shards`` or ``rows`` table."""

    count: Integer
    sha256: Hex64
    size: Integer


class NamesPart(_Base, frozen=True, kw_only=True):
    """One part of the ``names`` table; ``nbytes`` is the length of its names together."""

    count: Integer
    nbytes: Integer
    sha256: Hex64
    size: Integer


class LookupPart(_Base, frozen=True, kw_only=True):
    """One part of a lookup table; ``first_key`` is its first key in hexadecimal."""

    count: Integer
    first_key: Hex16
    sha256: Hex64
    size: Integer


AnyPart = Part | NamesPart | LookupPart


class Index(_Base, frozen=True, kw_only=True):
    """The parts of all tables."""

    document_keys: tuple[LookupPart, ...]
    name_keys: tuple[LookupPart, ...]
    names: tuple[NamesPart, ...]
    rows: tuple[Part, ...]
    shards: tuple[Part, ...]


class Skipped(_Base, frozen=True, kw_only=True):
    """A document that was given and not stored, and why."""

    input: InputNumber
    name: str
    reason: str


class Totals(_Base, frozen=True, kw_only=True):
    """Counts over the whole dataset; ``nbytes`` is the size of all shards together."""

    names: Integer
    nbytes: Integer
    records: Integer
    shards: Integer
    tokens: Integer


class Manifest(_Base, frozen=True, kw_only=True):
    """Everything about a dataset but its tables and values."""

    context: Context
    files: tuple[CoveredFile, ...]
    format: Literal["kvformat"]
    header_size: Integer
    index: Index
    provenance: dict[str, str]
    schema: Schema
    shard_slots: Annotated[int, Meta(ge=1, le=limits.MAX_SHARD_SLOTS)]
    skipped: tuple[Skipped, ...]
    text: Text
    totals: Totals
    version: Version
    extensions: dict[str, Any] | None = None
    requires: tuple[str, ...] | None = None

    def parts(self, table: str) -> tuple[AnyPart, ...]:
        """Parts of a table, in order."""
        found: tuple[AnyPart, ...] = getattr(self.index, table)
        return found

    def file(self, name: str) -> CoveredFile | None:
        """The covered file with a label."""
        return next((file for file in self.files if file.name == name), None)


def parse_root(data: bytes, *, path: str | None = None) -> Root:
    """Decode and check ``kvformat.json``.

    Raises
    ------
    FormatError, UnsupportedError
        E004, E010 to E018.
    """
    if len(data) > limits.MAX_ROOT_NBYTES:
        raise make_error(
            "E004", f"the root has {len(data)} bytes, at most {limits.MAX_ROOT_NBYTES} are allowed", path=path
        )
    _refuse_newer(canonical.loose(data, path=path), path)
    root = canonical.convert(canonical.decode(data, path=path), Root, path=path)
    _check_requires(root.requires, path)
    if root.manifest.size > limits.MAX_MANIFEST_NBYTES:
        raise make_error(
            "E004",
            f"the manifest has {root.manifest.size} bytes, at most {limits.MAX_MANIFEST_NBYTES} are allowed",
            path=path,
        )
    return root


def parse_manifest(data: bytes, root: Root, *, path: str | None = None) -> tuple[Manifest, Layout]:
    """Decode and check a manifest against its root.

    Raises
    ------
    FormatError
        E010 to E059: everything that is detected at opening.
    """
    manifest = canonical.convert(canonical.decode(data, path=path), Manifest, path=path)
    _check_requires(manifest.requires, path)
    for member in ("format", "version", "requires"):
        if getattr(manifest, member) != getattr(root, member):
            raise make_error(
                "E019",
                f"`{member}` is {getattr(manifest, member)!r} in the manifest, {getattr(root, member)!r} in the root",
                path=path,
            )
    _check_totals(manifest, path)
    check_schema(manifest.schema, requires=manifest.requires or (), path=path)
    layout = Layout(manifest.schema)
    demanded = layout.header_size(manifest.version, manifest.shard_slots)
    if demanded > limits.MAX_HEADER_NBYTES:
        raise make_error("E033", f"shard headers would have {demanded} bytes, too many", path=path)
    if manifest.header_size != demanded:
        raise make_error(
            "E041", f"header_size is {manifest.header_size}, schema and slots demand {demanded}", path=path
        )
    check_context(manifest.context, path=path)
    _check_files(manifest, path)
    _check_skipped(manifest, path)
    _check_parts(manifest, path)
    return manifest, layout


def _refuse_newer(value: dict[str, Any], path: str | None) -> None:
    version = value.get("version")
    if value.get("format") == limits.FORMAT and isinstance(version, str):
        match = _MAJOR_MINOR.fullmatch(version)
        if match and int(match[1].lstrip("0")[:9] or "0") > limits.MAJOR:
            raise make_error(
                "E012",
                f"written by version {version}, this reader knows {limits.VERSION}: upgrade kvformat",
                path=path,
            )
    requires = value.get("requires")
    if isinstance(requires, list):
        unknown = sorted(name for name in requires if isinstance(name, str) and name not in limits.FEATURES)
        if unknown:
            raise make_error("E013", f"needs {', '.join(unknown)}, unknown here: upgrade kvformat", path=path)


def _check_requires(requires: tuple[str, ...] | None, path: str | None) -> None:
    if requires is not None and (not requires or list(requires) != sorted(set(requires))):
        raise make_error("E018", "`requires` must be non-empty and strictly ascending - at `$.requires`", path=path)


def _check_totals(manifest: Manifest, path: str | None) -> None:
    totals = manifest.totals
    if not 1 <= totals.records <= limits.MAX_RECORDS:
        raise make_error("E020", f"{totals.records} records: there must be 1 to 2^48-1", path=path)
    expected = {
        "rows": totals.records,
        "document_keys": totals.records,
        "names": totals.names,
        "name_keys": totals.names,
        "shards": totals.shards,
    }
    for table, total in expected.items():
        count = sum(part.count for part in manifest.parts(table))
        if count != total:
            raise make_error("E020", f"the parts of {table!r} have {count} rows, the totals say {total}", path=path)


def _check_files(manifest: Manifest, path: str | None) -> None:
    names = [file.name for file in manifest.files]
    if any(a >= b for a, b in pairwise(names)):
        raise make_error("E043", "`files` must be in strictly ascending order of their names", path=path)
    model = manifest.context.model
    if model is not None:
        weights = manifest.file("weights")
        if weights is None or weights.sha256 != model.weights.sha256:
            raise make_error(
                "E043", "the tensor list that `context.model.weights` refers to is no covered file", path=path
            )


def _check_skipped(manifest: Manifest, path: str | None) -> None:
    inputs = [skipped.input for skipped in manifest.skipped]
    if any(a >= b for a, b in pairwise(inputs)):
        raise make_error("E045", "`skipped` must be in strictly ascending order of `input`", path=path)
    for skipped in manifest.skipped:
        if not 1 <= len(skipped.name.encode()) <= limits.MAX_NAME_NBYTES or not skipped.reason:
            raise make_error("E045", f"skipped input {skipped.input} needs a name and a reason", path=path)


def _check_parts(manifest: Manifest, path: str | None) -> None:
    for table in tables.TABLES:
        for number, part in enumerate(manifest.parts(table)):
            what = f"part {number} of table {table!r}"
            if not 1 <= part.count <= limits.MAX_PART_ROWS:
                raise make_error(
                    "E050", f"{what} has {part.count} rows, 1 to {limits.MAX_PART_ROWS} are allowed", path=path
                )
            form = tables.form(
                table, part.count, len(manifest.schema.dims), getattr(part, "nbytes", 0), manifest.version
            )
            if part.size != form.nbytes:
                raise make_error("E050", f"{what} has {part.size} bytes, its counts demand {form.nbytes}", path=path)
    for table in ("document_keys", "name_keys"):
        keys = [part.first_key for part in getattr(manifest.index, table)]
        if keys != sorted(keys):
            raise make_error("E059", f"the parts of {table!r} are not in ascending order of `first_key`", path=path)
