"""``kvformat status``: what is published at a location, and what unfinished work lies there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from msgspec import Struct
from msgspec.structs import replace

from kvformat.cli import options, output, plan_option, spool_option, staged_text
from kvformat.cli.group import FAULTS
from kvformat.codes import CODES
from kvformat.errors import KVFormatError, make_error
from kvformat.spec.paths import ROOT, STAGING

if TYPE_CHECKING:
    from kvformat.cli.spooled import Spooled
    from kvformat.cli.staged import StagedWork
    from kvformat.extract.plan import Plan
    from kvformat.storage.remote import Remote

__all__ = ["status"]

_SHOWN = 20
_FOLDERS = ("files", "index", "manifest", "shards")


class _Published(Struct, frozen=True, kw_only=True):
    id: str
    records: int
    nbytes: int
    shards: int


class _Orphan(Struct, frozen=True, kw_only=True):
    path: str
    nbytes: int


class _State(Struct, frozen=True, kw_only=True):
    """What is at a location.

    ``orphans`` is None where a fault keeps the named files unknown. ``data_without_root``: data are there that nothing
    publishes, and no staged work that would explain them. ``spools``: what waits on this machine for its upload to an
    object store, or was left there; None for a local dataset. ``plan``: how far the plan is, where one was given.
    """

    location: str
    published: _Published | None
    data_without_root: bool
    staging: tuple[StagedWork, ...]
    orphans: tuple[_Orphan, ...] | None
    unknown_staging: tuple[str, ...]
    spools: tuple[Spooled, ...] | None = None
    plan: plan_option.PlanState | None = None


class _Read(NamedTuple):
    """What is published, the files it names, what keeps it from being read, and in what it is not the plan given."""

    published: _Published | None = None
    named: frozenset[str] = frozenset()
    fault: KVFormatError | None = None
    differs: str | None = None


class _Look(NamedTuple):
    """What was found; what keeps a published dataset from being read; what data without a root mean."""

    state: _State
    fault: KVFormatError | None
    without_root: str | None


def status(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A dataset's directory or URL.")],
    *,
    plan: plan_option.PlanOfWork = None,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what is published and what is unfinished.

    Lists staged work with its state, and files no dataset names; of work that workers share, who is at work, what is
    done and missing, the rate and the time that is left, and the space that is needed. Of a URL, also what waits on
    this machine for its upload. With a plan, how far that is, before its first worker too, and whether it is what is
    published. Exits with 1 where something is published and cannot be read.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.storage.readers import remote_of

    place = remote_of(path, storage_options=storage_options)
    with contextlib.nullcontext(None) if plan is None else contextlib.closing(plan_option.opened(plan)) as planned:
        looked = _look(place, planned) if isinstance(place, Path) else _look_remote(place, spool, planned)
    found, fault, without_root = looked
    if as_json:
        output.emit_json(_document(found, fault))
    else:
        output.emit(*_lines(found, fault, without_root))
    if fault is not None:
        output.report(fault, as_json=False)
        raise typer.Exit(FAULTS)


def _look(root: Path, planned: Plan | None) -> _Look:
    from kvformat.cli.staged import look_all, others
    from kvformat.read.missing import data_without_root

    if not root.is_dir() and (planned is None or os.path.lexists(root)):
        raise make_error("E001", "no directory is there: check the location", path=root)
    read = _published(root, planned) if os.path.lexists(root / ROOT) else _Read()
    staging = _of_plan(look_all(root, planned), planned)
    without_root = None if staging else data_without_root(root)
    state = _State(
        location=str(root),
        published=read.published,
        data_without_root=without_root is not None,
        staging=staging,
        orphans=None if read.fault is not None else _local_orphans(root, read.named),
        unknown_staging=tuple(str(other) for other in others(root)),
        plan=_plan_state(planned, staging, read, root),
    )
    return _Look(state, read.fault, without_root)


def _look_remote(remote: Remote, spool: str | None, planned: Plan | None) -> _Look:
    from kvformat.cli.kept import look_kept
    from kvformat.cli.spooled import look_spools
    from kvformat.read.missing import DATA_WITHOUT_ROOT
    from kvformat.write.spool_places import spool_directory

    read = _published(remote, planned) if remote.stat(ROOT) is not None else _Read()
    base = spool_directory(spool)
    spools = tuple(look_spools(base, remote.url))
    objects = {stat.name: stat.nbytes for stat in remote.list() if stat.name.partition("/")[0] != STAGING}
    works, others, staged = look_kept(remote, spools, objects=objects, base=base, planned=planned)
    staging = _of_plan(works, planned)
    if not objects and not staging and not others and not spools and planned is None:
        raise make_error("E001", "nothing is there: check the location", path=remote.path(""))
    orphans = _orphans(objects.items(), read.named | staged, foreign=read.published is not None)
    data = {name.partition("/")[0] for name in objects} & {"manifest", "shards"}
    unread = read.published is None and read.fault is None
    without_root = DATA_WITHOUT_ROOT if data and not staging and unread else None
    state = _State(
        location=remote.path(""),
        published=read.published,
        data_without_root=without_root is not None,
        staging=staging,
        orphans=None if read.fault is not None else orphans,
        unknown_staging=others,
        spools=spools,
        plan=_plan_state(planned, staging, read, None),
    )
    return _Look(state, read.fault, without_root)


def _of_plan(works: Iterable[StagedWork], planned: Plan | None) -> tuple[StagedWork, ...]:
    """Staged work, told apart by whether it is of the plan that was given."""
    return tuple(
        work if planned is None or work.shared is None else replace(work, of_plan=work.shared.plan == planned.digest)
        for work in works
    )


def _plan_state(
    planned: Plan | None, staging: tuple[StagedWork, ...], read: _Read, place: Path | None
) -> plan_option.PlanState | None:
    if planned is None:
        return None
    published = read.published is not None
    return plan_option.describe(planned, staging, published=published, differs=read.differs, place=place)


def _published(place: Path | Remote, planned: Plan | None) -> _Read:
    from kvformat.read.opening import open_dataset
    from kvformat.spec.manifest import parse_root
    from kvformat.spec.paths import covered_path, manifest_path, part_path
    from kvformat.spec.tables import TABLES

    try:
        dataset = open_dataset(place)
        manifest = dataset.manifest
        reference = parse_root(dataset.reader.read(ROOT)).manifest.sha256
        named = {ROOT, manifest_path(reference)}
        named |= {covered_path(file.sha256) for file in manifest.files}
        named |= {part_path(part.sha256) for table in TABLES for part in manifest.parts(table)}
        named |= {dataset.index.shard(ordinal).path for ordinal in range(manifest.totals.shards)}
        differs = None if planned is None else plan_option.difference(dataset, planned)
    except KVFormatError as error:
        if error.code == "E001":  # removed meanwhile
            return _Read()
        if CODES[error.code].kind != "reader":
            raise
        return _Read(fault=error)
    totals = manifest.totals
    published = _Published(id=dataset.id, records=totals.records, nbytes=totals.nbytes, shards=totals.shards)
    return _Read(published, frozenset(named), differs=differs)


def _local_orphans(root: Path, named: frozenset[str]) -> tuple[_Orphan, ...]:
    """Where nothing is published, only the folders a writer uses are looked at: the directory may be anything."""
    from kvformat.storage.local_read import LocalReader

    if named:
        walked = LocalReader(root, use_mmap=False).walk()
    else:
        walked = [
            f"{folder}/{name}"
            for folder in _FOLDERS
            if (root / folder).is_dir()
            for name in LocalReader(root / folder, use_mmap=False).walk()
        ]

    def sizes() -> Iterable[tuple[str, int]]:
        for name in walked:
            if name not in named:
                try:
                    yield name, (root / name).lstat().st_size
                except FileNotFoundError:  # a writer goes on meanwhile
                    continue

    return _orphans(sizes(), named, foreign=bool(named))


def _orphans(files: Iterable[tuple[str, int]], named: frozenset[str], *, foreign: bool) -> tuple[_Orphan, ...]:
    """Files no root names: the rest of an interrupted publication, and ``foreign`` ones where that is asked for."""
    return tuple(
        _Orphan(path=name, nbytes=nbytes)
        for name, nbytes in files
        if name not in named and name.partition("/")[0] != STAGING and (foreign or name.partition("/")[0] in _FOLDERS)
    )


def _document(found: _State, fault: KVFormatError | None) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = {"ok": fault is None, **msgspec.to_builtins(found)}
    if found.spools is None:
        del document["spools"]
    if found.plan is None:
        del document["plan"]
    if fault is not None:
        document["error"] = output.finding(fault.code, fault.message, fault.path, fault.record, fault.layer)
    return document


def _lines(found: _State, fault: KVFormatError | None, without_root: str | None) -> list[str]:
    lines = [output.plain(found.location)]
    if found.published is not None:
        published = found.published
        records, size = output.counted(published.records, "record"), output.size_text(published.nbytes)
        lines += [
            f"published: {records} in {output.counted(published.shards, 'shard')}, {size}",
            f"    id {published.id}",
        ]
    elif fault is not None:
        lines.append(f"published, but not readable: {fault.code}")
    else:
        lines.append("not published" + (f": {without_root}" if without_root else ""))
    lines += [] if found.plan is None or fault is not None else plan_option.lines(found.plan)
    unpublished = found.published is None and fault is None
    for work in found.staging:
        lines += staged_text.lines(work, found.location, unpublished=unpublished)
    lines += [f"not a staging directory, left alone: {output.plain(other)}" for other in found.unknown_staging]
    if not found.staging:
        lines.append("no staged work")
    for one in found.spools or ():
        size = f"{output.counted(one.files, 'file')}, {output.size_text(one.nbytes)}"
        lines.append(f"spool, {one.state} ({staged_text.STATES[one.state]}): {output.plain(one.path)}, {size}")
    if found.orphans:
        size = output.size_text(sum(orphan.nbytes for orphan in found.orphans))
        why = "the dataset does not name" if found.published is not None else "no published dataset names"
        lines.append(f"{output.counted(len(found.orphans), 'file')} {why}, {size}:")
        lines += [f"    {output.plain(one.path)} ({output.size_text(one.nbytes)})" for one in found.orphans[:_SHOWN]]
        if len(found.orphans) > _SHOWN:
            lines.append(f"    and {len(found.orphans) - _SHOWN:,} more; --json lists all")
    return lines
