"""``kvformat.verify``: all faults of a dataset, level by level (SPEC.md, section 18)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from msgspec import Struct

from kvformat.codes import CODES
from kvformat.errors import KVFormatError, make_error
from kvformat.read import check_index
from kvformat.read.check_covered import check_covered
from kvformat.read.check_shard import check_header, check_record, check_sha256
from kvformat.read.dataset import Dataset
from kvformat.read.index import ShardRow
from kvformat.read.opening import load_manifest
from kvformat.read.reading import reading
from kvformat.spec import canonical, limits, tables
from kvformat.spec.manifest import Manifest
from kvformat.spec.paths import ROOT, STAGING, covered_path, manifest_path, part_path
from kvformat.storage.local_read import LocalReader
from kvformat.storage.readers import Location, Reader
from kvformat.storage.remote_options import RemoteOptions

__all__ = ["Finding", "Report", "verify"]

Progress = Callable[[int, int], None]
_MAX_THREADS = 8
_MAX_FETCHED = 4  # shards in memory
_UNLISTED = ("E203", "E207")  # HTTP servers list nothing, and others not to everyone


class Finding(Struct, frozen=True, kw_only=True):
    """One fault or warning."""

    code: str
    message: str
    path: str | None = None
    record: str | int | None = None
    layer: int | None = None


class Report(Struct, frozen=True, kw_only=True):
    """What verification found. ``ok`` means no fault; warnings are allowed."""

    ok: bool
    id: str | None
    level: int
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    records: int
    nbytes: int


def verify(
    location: Location,
    *,
    level: int = 4,
    expected_id: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
) -> Report:
    """Look for all faults of a dataset.

    Of an object store, levels 1 and 2 move no values: they ask for sizes, and fetch the index, the covered files and
    the header of every shard. Levels 3 and 4 fetch every shard once, whole, into memory, ``threads`` of them at a
    time; one in which faults show is fetched once more, and reported are those that show again. Objects are listed
    once, to find those the dataset does not name; a store that does not list, as no HTTP server does, is one W001.
    One that cannot be reached ends it, with E208 as a finding.

    Parameters
    ----------
    location
        Local directory, ``file://`` URL, or URL of an object store.
    level
        1: root and manifest. 2: and the index, sizes, shard headers, covered files, unknown files. 3: and every XXH3,
        scales, documents. 4: and every SHA-256 and all padding.
    expected_id
        Dataset id it must have.
    threads
        Shards checked at once; by default as many as there are processors, at most 8. Of an object store, at most 4 at
        levels 3 and 4, where each takes the memory of a shard, and ``max_requests`` at level 2.
    progress
        Called with (bytes done, bytes in all), from any thread.
    storage_options, remote_options
        As for :func:`kvformat.open`.

    Returns
    -------
    Report
        Findings in the order of their codes, which is their precedence. E007 where another dataset took the place of
        this one meanwhile.

    Raises
    ------
    DatasetNotFoundError
        E001.
    UsageError
        E081, E206.
    DependencyError
        E205.
    """
    if level not in (1, 2, 3, 4):
        raise make_error("E081", f"level must be 1 to 4, found {level!r}")
    if threads is not None and threads < 1:
        raise make_error("E081", f"threads must be at least 1, found {threads}")
    with reading(location, storage_options=storage_options, remote_options=remote_options) as reader:
        return _Verification(reader, level, threads or _usual_threads(reader, level), progress).run(expected_id)


def _usual_threads(reader: Reader, level: int) -> int:
    if not isinstance(reader, LocalReader):
        if level <= 2:
            return reader.remote.options.max_requests
        return min(os.cpu_count() or 1, _MAX_FETCHED)
    return min(os.cpu_count() or 1, _MAX_THREADS)


class _Verification:
    def __init__(self, reader: Reader, level: int, threads: int, progress: Progress | None) -> None:
        self._reader = reader
        self._level = level
        self._threads = threads
        self._progress = progress
        self._found: dict[Finding, None] = {}
        self._warned: list[Finding] = []
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._unreachable = False  # then nothing more is asked for: each answer would take its whole deadline

    def run(self, expected_id: str | None) -> Report:
        try:
            identity, manifest, layout = load_manifest(self._reader, expected_id=expected_id)
        except KVFormatError as error:
            if error.code == "E001":
                raise
            self._add([error])
            return self._report(None, 0, 0)
        if int(manifest.version.partition(".")[2]) > limits.MINOR:
            self._warn("W003", f"written by version {manifest.version}, this reader knows {limits.VERSION}", ROOT)
        options = {"verify": "always", "io": "mmap" if self._reader.use_mmap else "pread", "max_open_files": 4}
        dataset = Dataset(
            self._reader,
            location=self._reader.location,
            dataset_id=identity,
            manifest=manifest,
            layout=layout,
            options=options,
        )
        if self._level >= 2:
            self._check_files(dataset)
        self._attempt(partial(self._require_root, identity))
        return self._report(identity, manifest.totals.records, manifest.totals.nbytes)

    # -- files ---------------------------------------------------------------------------------------------------

    def _check_files(self, dataset: Dataset) -> None:
        manifest, index = dataset.manifest, dataset.index
        expected = {ROOT, _path_of(manifest)}
        for file in manifest.files:
            expected.add(covered_path(file.sha256))
            self._add(check_covered(self._reader, file, context=manifest.context, schema=dataset.schema))
        sound = {}
        for table in tables.TABLES:
            parts = getattr(index, table)
            expected.update(part_path(part.sha256) for part in parts.parts)
            # Every part is tried, so that every damaged one is found.
            opened = [self._attempt(partial(parts.part, number)) for number in range(len(parts.parts))]
            sound[table] = all(opened)
        rows_sound = False
        tokens_sound = sound["rows"] and self._add(check_index.check_tokens(index, manifest))
        if sound["shards"]:
            if self._add(check_index.check_shards(index, manifest)) and sound["rows"]:
                rows_sound = self._add(check_index.check_rows(index, manifest, dataset.layout)) and tokens_sound
            expected.update(index.shard_paths())
            if sound["rows"]:  # else each shard would look at the damaged part again
                self._check_shards(dataset, self._shards(dataset), headers=rows_sound)
        names_sound = sound["names"] and self._add(check_index.check_names(index, manifest))
        if rows_sound and names_sound and sound["document_keys"] and sound["name_keys"]:
            self._add(check_index.check_lookups(index, manifest))
        if self._level >= 4:
            self._add(check_index.check_padding(index, [table for table in tables.TABLES if sound[table]]))
        if sound["shards"]:
            self._check_unknown(expected)

    def _require_root(self, identity: str) -> None:
        """Everything was checked against the root read first: refuse a verdict on another one."""
        found = hashlib.sha256(self._reader.read(ROOT, max_nbytes=limits.MAX_ROOT_NBYTES)).hexdigest()
        if found != identity:
            raise make_error(
                "E007",
                f"the root was replaced meanwhile: what was verified has the id {identity}, now {found} is here; "
                "find out what replaced it, and verify again",
                path=self._reader.path(ROOT),
            )

    def _shards(self, dataset: Dataset) -> list[ShardRow]:
        found = []
        for ordinal in range(dataset.manifest.totals.shards):
            try:
                found.append(dataset.index.shard(ordinal))
            except KVFormatError as error:
                self._add([error])
        return found

    def _check_shards(self, dataset: Dataset, shards: list[ShardRow], *, headers: bool) -> None:
        passes = {2: 0, 3: 1, 4: 2}[self._level]
        self._total = passes * sum(row.size for row in shards)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="kvformat-verify") as pool:
            try:
                for _ in pool.map(lambda row: self._check_shard(dataset, row, headers=headers), shards):
                    pass
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _check_shard(self, dataset: Dataset, row: ShardRow, *, headers: bool) -> None:
        faults = self._faults_of(dataset, row, headers=headers, advance=self._advance)
        if not isinstance(self._reader, LocalReader) and any(CODES[f.code].kind == "reader" for f in faults):
            # Bits flip on the way, too: what counts is what the store gives twice.
            faults.clear()  # what was raised holds the shard in memory
            faults = self._faults_of(dataset, row, headers=headers, advance=lambda _nbytes: None)
        self._add(faults)

    def _faults_of(
        self, dataset: Dataset, row: ShardRow, *, headers: bool, advance: Callable[[int], None]
    ) -> list[KVFormatError]:
        found: list[KVFormatError] = []
        if self._unreachable:
            return found
        try:
            file = self._reader.open(row.path, nbytes=row.size, ranged=self._level == 2)
            fault = check_header(dataset, row, file) if headers else None
            if fault is not None:
                found.append(fault)
            if self._level >= 3:
                for number in range(row.first, row.end):
                    found += _until_raised(check_record(dataset, row, file, number, padding=self._level >= 4))
                advance(row.size)
            if self._level >= 4:
                fault = check_sha256(row, file, advance)
                if fault is not None:
                    found.append(fault)
        except KVFormatError as error:
            found.append(error)
        return found

    def _check_unknown(self, expected: set[str]) -> None:
        staging = False
        if self._unreachable:
            return
        try:
            names = self._reader.walk()
        except KVFormatError as error:
            if error.code not in _UNLISTED:
                self._add([error])
            else:
                self._warn("W001", f"files the dataset does not name were not looked for: {error.message}", "")
            return
        for name in names:
            if name.startswith(f"{STAGING}/"):
                staging = True
            elif name not in expected:
                self._warn("W001", "the dataset does not name this file; readers ignore it", name)
        if staging:
            self._warn("W002", "staged work lies here; see `kvformat status` and `kvformat clean`", STAGING)

    # -- findings ------------------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[], object]) -> bool:
        if self._unreachable:
            return False
        try:
            work()
        except KVFormatError as error:
            self._add([error])
            return False
        return True

    def _add(self, errors: Iterable[KVFormatError]) -> bool:
        """Collect errors; True where there was none."""
        clean = True
        if self._unreachable:
            return False
        for error in _until_raised(errors):
            clean = False
            self._unreachable |= error.code == "E208"
            finding = Finding(
                code=error.code, message=error.message, path=error.path, record=error.record, layer=error.layer
            )
            with self._lock:
                self._found[finding] = None
        return clean

    def _warn(self, code: str, message: str, name: str) -> None:
        self._warned.append(Finding(code=code, message=message, path=self._reader.path(name)))

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _report(self, identity: str | None, records: int, nbytes: int) -> Report:
        findings = sorted(self._found, key=lambda f: (f.code, f.path or "", str(f.record or ""), f.layer or 0))
        return Report(
            ok=not findings,
            id=identity,
            level=self._level,
            findings=tuple(findings),
            warnings=tuple(self._warned),
            records=records,
            nbytes=nbytes,
        )


def _path_of(manifest: Manifest) -> str:
    """Where a manifest lies: it was proved canonical, so its bytes and their digest follow from its values."""
    return manifest_path(hashlib.sha256(canonical.encode(manifest)).hexdigest())


def _until_raised(errors: Iterable[KVFormatError]) -> Iterator[KVFormatError]:
    """The errors a check yields, and the one it raises, if it does."""
    try:
        yield from errors
    except KVFormatError as error:
        yield error
