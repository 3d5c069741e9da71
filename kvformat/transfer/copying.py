"""``kvformat.copy``: a published dataset, brought to another place and proved on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.read.reading import reading
from kvformat.read.verify import verify
from kvformat.spec import limits
from kvformat.spec.paths import ROOT
from kvformat.storage.local_read import LocalReader
from kvformat.storage.readers import Location, Reader
from kvformat.transfer.contents import Contents, Item, contents_of, require_root
from kvformat.transfer.local_target import LocalTarget
from kvformat.transfer.remote_target import RemoteTarget
from kvformat.transfer.tally import Progress, Share, Tally
from kvformat.write.prepared import check_place
from kvformat.write.spool_places import spool_directory

__all__ = ["CopyReport", "copy"]

_MAX_THREADS = 8
_CHECKED_LEVEL = 2


class CopyReport(Struct, frozen=True, kw_only=True):
    """What a copy did.

    Attributes
    ----------
    id
        Dataset id, of the source and of the copy.
    location
        Where the copy is.
    records
        Their number.
    nbytes
        Bytes of all files of the dataset.
    copied_nbytes
        Bytes of the files this call brought there.
    skipped_nbytes
        Bytes of the files that were there already.
    already_there
        Whether the dataset was published there before, so that nothing was copied. Its index, sizes, shard headers and
        covered files were verified then (level 2 of :func:`kvformat.verify`), its values were not.
    """

    id: str
    location: str
    records: int
    nbytes: int
    copied_nbytes: int
    skipped_nbytes: int
    already_there: bool


class _Target(AbstractContextManager["_Target"], Protocol):
    """Where a copy goes."""

    def sweep(self) -> None: ...

    def require_space(self, items: Sequence[Item], threads: int) -> None: ...

    def place(self, source: Reader, item: Item, share: Share) -> bool: ...

    def commit(self) -> None: ...


def copy(
    source: Location,
    target: Location,
    *,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    spool: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a published dataset; the copy has the same id.

    Every file is proved by its SHA-256 on the way and has its final name only then; the root comes last. Files the
    dataset does not name are not copied. Nothing that is at the target is replaced or removed.

    A copy that fails, or is interrupted or killed, is continued by the same call: what is in its place by then is
    proved again, and stays.

    Parameters
    ----------
    source, target
        Local directory, ``file://`` URL, or URL of an object store.
    source_options, target_options
        What fsspec's file system of each URL takes, such as credentials and endpoint; where they are not given, the
        environment is asked.
    threads
        Files under way at once; by default as many as there are processors, 2 to 8.
    spool
        Local directory for files on their way from one object store to another, at most ``threads`` at once, each as
        large as a shard; by default ``kvformat/spool`` in the user's cache directory. Not used otherwise.
    progress
        Called with (bytes at the target, bytes in all), from any thread.

    Returns
    -------
    CopyReport
        Where the target holds the same dataset already, nothing is copied, and it is verified at level 2.

    Raises
    ------
    DatasetNotFoundError
        E001 without a dataset at the source.
    DatasetExistsError
        E100 with another dataset at the target.
    ConflictError
        E113 where another was published there meanwhile, or a file there has other content than its name says; E117
        while another process copies the same dataset to there.
    IdentityError
        E007 where the source changed meanwhile.
    FormatError, DamageError
        As :func:`kvformat.open` and, of what is copied, E002, E003, E005, E006, E077.
    StorageError
        E200 to E204, E207 to E209, E212.
    UsageError
        E081, also for a target in the directory of a plan; E206.
    """
    if threads is not None and threads < 1:
        raise make_error("E081", f"threads must be at least 1, found {threads}")
    with (
        reading(source, storage_options=source_options) as origin,
        reading(target, storage_options=target_options) as goal,
    ):
        if isinstance(goal, LocalReader):
            check_place(goal.root, what="a dataset")
        contents = contents_of(origin)
        place = _target_of(goal, origin, contents, spool)
        if _is_complete(goal, contents):
            _require_sound(target, target_options, contents)
            place.sweep()
            return _report(goal, contents, copied=0, already_there=True)
        number = threads or min(max(os.cpu_count() or 1, 2), _MAX_THREADS)
        copied = run(origin, place, contents, threads=number, progress=progress)
        return _report(goal, contents, copied=copied, already_there=False)


def run(origin: Reader, target: _Target, contents: Contents, *, threads: int, progress: Progress | None = None) -> int:
    """Bring all files of a dataset to a target and publish them; returns the bytes that were not there."""
    tally = Tally(contents.nbytes, progress)
    with target:
        target.require_space(contents.items, threads)
        copied = _place_all(origin, target, contents.items, tally, threads)
        require_root(origin, contents.id)
        target.commit()
        tally.add(len(contents.root))
    return copied + len(contents.root)


def _place_all(origin: Reader, target: _Target, items: Sequence[Item], tally: Tally, threads: int) -> int:
    left = iter(items)
    lock = threading.Lock()

    def work() -> int:
        copied = 0
        while not tally.stopped:
            with lock:
                item = next(left, None)
            if item is None:
                break
            share = Share(tally, item)
            if target.place(origin, item, share):
                copied += item.nbytes
            share.finish()
        return copied

    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="kvformat-copy") as pool:
        working = [pool.submit(work) for _ in range(min(threads, len(items)))]
        try:
            return sum(done.result() for done in as_completed(working))
        except BaseException:
            # Leaving the block waits for the others, which end at the next bytes they count.
            tally.stop()
            raise


def _is_complete(goal: Reader, contents: Contents) -> bool:
    """Whether the target is this dataset already; E100 where it is another one, or something else stands there."""
    path = goal.path(ROOT)
    try:
        found = goal.read(ROOT, max_nbytes=limits.MAX_ROOT_NBYTES)
    except KVFormatError as error:
        if error.code == "E002":
            return False
        if error.code in ("E003", "E004"):
            raise make_error("E100", "something else stands here: copy to elsewhere", path=path) from None
        raise
    if found != contents.root:
        message = "another dataset is published here: compare with `kvformat diff`, and copy to elsewhere"
        raise make_error("E100", message, path=path)
    return True


def _require_sound(target: Location, options: Mapping[str, Any] | None, contents: Contents) -> None:
    """Raise the first fault that shows without reading values."""
    report = verify(target, level=_CHECKED_LEVEL, expected_id=contents.id, storage_options=options)
    for fault in report.findings:
        message = f"the dataset is at the target already, but damaged: {fault.message}"
        raise make_error(fault.code, message, path=fault.path, record=fault.record, layer=fault.layer)


def _target_of(goal: Reader, origin: Reader, contents: Contents, spool: str | os.PathLike[str] | None) -> _Target:
    if isinstance(goal, LocalReader):
        return LocalTarget(goal.root, contents)
    if isinstance(origin, LocalReader):
        return RemoteTarget(goal.remote, contents, spool=None)
    return RemoteTarget(goal.remote, contents, spool=spool_directory(spool))


def _report(goal: Reader, contents: Contents, *, copied: int, already_there: bool) -> CopyReport:
    return CopyReport(
        id=contents.id,
        location=goal.path(""),
        records=contents.records,
        nbytes=contents.nbytes,
        copied_nbytes=copied,
        skipped_nbytes=contents.nbytes - copied,
        already_there=already_there,
    )
