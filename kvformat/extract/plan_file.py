"""The files of a plan: a directory that appears whole, and is checked when it is opened."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.arrangement import Arrangement, Order
from kvformat.extract.columns import ColumnsFile, ColumnSpec, Written, prove_columns, write_columns
from kvformat.extract.documents.file import Documents, open_documents
from kvformat.extract.places import local_place
from kvformat.extract.rules import other_rules
from kvformat.spec import canonical, limits
from kvformat.spec.context import Text
from kvformat.spec.schema import Schema
from kvformat.storage.faults import translate
from kvformat.storage.local_read import LocalReader
from kvformat.storage.local_write import LocalFiles
from kvformat.write.folders import Folders
from kvformat.write.prepared import PLAN_FILES

__all__ = ["DOCUMENTS", "HEAD", "RECORDS", "FileProof", "PlanHead", "PlanTotals", "completed", "load", "save"]

HEAD, DOCUMENTS, RECORDS = PLAN_FILES
_REMEDY = "restore the plan from a copy, or make it again with `kvformat plan`"
_TABLE = "order"
_COLUMNS = (ColumnSpec("document", "U64"), ColumnSpec("shard_first", "U64"), ColumnSpec("group_first", "U64"))
_OTHER_FAULTS = frozenset({"E200", "E203", "E204", "E207"})  # of the storage, not of what is in it

Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=limits.MAX_INTEGER)]


class _Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class FileProof(_Base, frozen=True, kw_only=True):
    """What proves a file of columns: the SHA-256 of its header, which states those of the columns, and its size."""

    sha256: Hex64
    size: Positive

    @classmethod
    def of(cls, written: Written) -> FileProof:
        """From what the file itself says."""
        return cls(sha256=written.sha256, size=written.nbytes)


class PlanTotals(_Base, frozen=True, kw_only=True):
    """Counts over a whole plan. ``nbytes`` is the payload of all records, ``longest`` is in tokens."""

    groups: Positive
    inputs: Positive
    longest: Positive
    names: Positive
    nbytes: Positive
    records: Positive
    shards: Positive
    tokens: Positive


class PlanHead(_Base, frozen=True, kw_only=True):
    """``plan.json``. Its SHA-256 is the digest of the plan.

    Attributes
    ----------
    documents, records
        What proves the other files. That of the records names the digest of all the other members here, so that a
        change of any byte is found out without knowing the plan's digest.
    """

    batch_size: Positive
    documents: FileProof
    format: Literal["kvformat-plan"]
    header_size: Positive
    order: Order
    schema: Schema
    shard_nbytes: Positive
    shard_slots: Positive
    text: Text
    totals: PlanTotals
    version: str
    batch_tokens: Positive | None = None
    records: FileProof | None = None


class Loaded(NamedTuple):
    """A plan as its files hold it."""

    head: PlanHead
    documents: Documents
    arrangement: Arrangement


def completed(head: PlanHead, arrangement: Arrangement) -> PlanHead:
    """The head with what proves the records."""
    proof = prove_columns(_TABLE, _COLUMNS, _columns(arrangement), metadata=_metadata(head))
    return replace(head, records=FileProof.of(proof))


def save(path: Path, head: PlanHead, documents: Documents, arrangement: Arrangement) -> None:
    """Write the files of a plan durably; the directory appears whole, and nothing is overwritten.

    Raises
    ------
    UsageError
        E081 for a ``path`` that names no directory.
    StorageError
        E200, E202, E203; E207 where something else is at ``path``.
    DamageError
        E307 where this plan is there, and is damaged.
    """
    files = LocalFiles()
    path = local_place(path, what="a plan").absolute()
    Folders(files).make(path.parent)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    files.make_dir(draft)
    try:
        documents.save(files, draft / DOCUMENTS)
        fd = files.create(draft / RECORDS)
        try:
            write_columns(
                files, fd, draft / RECORDS, _TABLE, _COLUMNS, _columns(arrangement), metadata=_metadata(head)
            )
        finally:
            os.close(fd)
        files.create_file(draft / HEAD, canonical.encode(head))
        files.sync_dir(draft)
        try:
            draft.rename(path)
        except OSError as error:
            if not os.path.lexists(path):
                raise translate(error, path) from error
            _compare(path, head)
    finally:
        for name in (DOCUMENTS, RECORDS, HEAD):
            files.unlink(draft / name)
        files.remove_dir(draft)
    files.sync_dir(path.parent)


def load(path: Path) -> Loaded:
    """Open the files of a plan and check that they belong together.

    Raises
    ------
    DamageError
        E307.
    """
    try:
        head = _head(path)
        documents = open_documents(path / DOCUMENTS)
        columns = ColumnsFile(
            LocalReader(path, use_mmap=False).open(RECORDS), _TABLE, _COLUMNS, metadata=["plan"], what=_REMEDY
        )
    except KVFormatError as error:
        if error.code in ("E307", *_OTHER_FAULTS):
            raise
        if error.code == "E002" and not any(os.path.lexists(path / name) for name in (HEAD, DOCUMENTS, RECORDS)):
            message = f"no plan is there (a directory with {HEAD}): make one with `kvformat plan`"
            raise make_error("E307", message, path=path) from error
        what = "the file is missing" if error.code == "E002" else error.message
        raise make_error("E307", f"no sound plan: {what}; {_REMEDY}", path=error.path or path) from error
    for name, proof, found in ((DOCUMENTS, head.documents, documents.proof), (RECORDS, head.records, columns.proof)):
        if proof != FileProof.of(found):
            raise make_error(
                "E307", f"this file is not the plan's: put the right one here; {_REMEDY}", path=path / name
            )
    if columns.metadata != _metadata(head):
        raise make_error("E307", f"the plan is not as it was written; {_REMEDY}", path=path / HEAD)
    arrangement = Arrangement(*(columns.arrays[spec.name] for spec in _COLUMNS))
    _check(head, documents, arrangement, path)
    return Loaded(head, documents, arrangement)


def _head(path: Path) -> PlanHead:
    data = LocalReader(path, use_mmap=False).read(HEAD, max_nbytes=limits.MAX_MANIFEST_NBYTES)
    where = str(path / HEAD)
    version = canonical.loose(data, path=where).get("version")
    if version != limits.VERSION:
        raise make_error(
            "E307", f"written by version {version!r:.40}, this one reads {limits.VERSION}; {_REMEDY}", path=where
        )
    return canonical.convert(canonical.decode(data, path=where), PlanHead, path=where)


def _check(head: PlanHead, documents: Documents, arrangement: Arrangement, path: Path) -> None:
    """Refuse what hangs together, and is yet no plan of these documents."""
    document, shard_first, group_first = arrangement
    totals = head.totals
    sound = (
        head.text == documents.text
        and totals.records == len(document) == len(documents)
        and totals.shards == len(shard_first)
        and totals.groups == len(group_first)
        and totals.names == documents.num_names
        and (np.sort(document) == np.arange(len(documents), dtype=np.uint64)).all()
        and _ascends(shard_first, len(document))
        and _ascends(group_first, len(document))
        and np.isin(shard_first, group_first, assume_unique=True).all()
    )
    if not sound:
        raise make_error("E307", f"its parts contradict each other; {_REMEDY}", path=path)


def _ascends(first: NDArray[np.uint64], count: int) -> bool:
    return bool(first[0] == 0 and (first[1:] > first[:-1]).all() and first[-1] < count)


def _compare(path: Path, head: PlanHead) -> None:
    """Refuse where what is there already is not the plan that was to be written."""
    if not (path / HEAD).exists():
        raise make_error("E207", "something else is here already; choose another location", path=path)
    found = load(path)
    if found.head != head:
        message = f"another plan is here already; choose another location ({_difference(found.head, head)})"
        raise make_error("E207", message, path=path)
    found.documents.check()


def _difference(here: PlanHead, wanted: PlanHead) -> str:
    """In what a plan is another one, those options first that somebody chose."""
    found = [
        f"{name}: {getattr(here, name)} here, {getattr(wanted, name)} wanted"
        for name in ("order", "batch_size", "batch_tokens", "shard_nbytes", "shard_slots")
        if getattr(here, name) != getattr(wanted, name)
    ]
    if here.schema != wanted.schema:
        found.append("the schema: layers, dtypes, key stage or model")
    rules = other_rules(here.text, wanted.text)
    if rules is not None:
        found.append(f"how text became token ids: {rules}")
    if here.documents != wanted.documents and (rules is None or here.totals.names != wanted.totals.names):
        found.append(f"the documents: {here.totals.names:,} names here, {wanted.totals.names:,} wanted")
    return f"it differs in {'; '.join(found)}" if found else "it was made by other rules"


def _columns(arrangement: Arrangement) -> dict[str, NDArray[Any]]:
    return arrangement._asdict()


def _metadata(head: PlanHead) -> dict[str, str]:
    return {"plan": hashlib.sha256(canonical.encode(replace(head, records=None))).hexdigest()}
