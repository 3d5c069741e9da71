"""``kvformat clean``: remove abandoned staged work, and nothing else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvformat.cli import options, output, spool_option
from kvformat.errors import KVFormatError, make_error

if TYPE_CHECKING:
    from kvformat.storage.lease import DirectoryLease

__all__ = ["ask", "clean", "take_leases"]


def clean(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A dataset's directory or URL.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
) -> None:
    """Remove staged work no writer holds.

    A published dataset is never touched. Asks first. What a live writer holds is left alone, and the command then
    fails with E117. After cleaning, an interrupted extraction starts from the beginning. Of a URL, what lies in
    .staging/ and in spools on this machine is removed; never a shard. Whether a writer is at work elsewhere cannot be
    told there.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.storage.readers import remote_of

    place = remote_of(path, storage_options=storage_options)
    if isinstance(place, Path):
        _clean(place, yes=yes)
    else:
        from kvformat.cli.clean_remote import clean_remote
        from kvformat.write.spool_places import spool_directory

        clean_remote(place, spool_directory(spool), yes=yes)


def ask(question: str) -> bool:
    """Ask on standard error, so that standard output holds results only; E081 where nobody answers."""
    output.complain(f"{question} [y/N]")
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer:
        raise make_error("E081", "clean asks before it removes, and nobody answered: pass --yes")
    return answer.strip().lower() in {"y", "yes"}


def _clean(root: Path, *, yes: bool) -> None:
    from kvformat.cli.staged import directories, others

    if not root.is_dir():
        raise make_error("E001", "no directory is there: check the location", path=root)
    held: dict[Path, DirectoryLease] = {}
    try:
        live = take_leases(directories(root), held)
        # The leases are held while the question stands: nobody resumes what is about to be removed.
        if not held and not live:
            output.emit("no staged work, 0 bytes freed")
        elif held and (yes or _agreed(held)):
            output.emit(f"removed {_count(len(held))}, {_remove(root, held):,} bytes freed")
        else:
            output.emit("nothing removed, 0 bytes freed")
    finally:
        for lease in held.values():
            lease.release()
    for other in others(root):
        output.complain(f"not a staging directory, left alone: {output.plain(other)}")
    if live:
        raise make_error("E117", f"{_count(len(live))} left alone: {_holders(live)}", path=live[0])


def _holders(live: Iterable[Path]) -> str:
    """Who holds what is left alone, as far as it says so, and what to do about it."""
    from kvformat.write.at_work import at_work
    from kvformat.write.local_workers import workers_in
    from kvformat.write.staging import is_shared
    from kvformat.write.worker_state import is_alive

    workers = []
    for path in live:
        with contextlib.suppress(KVFormatError):  # it is done meanwhile
            workers += [worker for worker in workers_in(path) if is_shared(path) and is_alive(worker)]
    if not workers:
        return "a writer is at work: wait for it, or stop it, and clean again"
    return at_work(workers, now=time.time(), then="clean again")


def take_leases(paths: Iterable[Path], held: dict[Path, DirectoryLease]) -> list[Path]:
    """Take the leases of directories into ``held``; returns those a live writer has, or workers that may live."""
    from kvformat.storage.lease import DirectoryLease
    from kvformat.write.local_workers import workers_in
    from kvformat.write.staging import is_shared
    from kvformat.write.worker_state import is_alive

    live = []
    for found in paths:
        try:
            lease = DirectoryLease.take(found)
        except KVFormatError as error:
            if error.code == "E002":  # its writer finished meanwhile
                continue
            raise
        if lease is None:
            live.append(found)
        elif is_shared(found) and any(is_alive(worker) for worker in workers_in(found)):
            lease.release()  # it does not reach other machines, or there is none
            live.append(found)
        else:
            held[found] = lease
    return live


def _remove(root: Path, held: dict[Path, DirectoryLease]) -> int:
    """Remove what is held; returns the bytes that are free now."""
    from kvformat.spec.paths import STAGING
    from kvformat.storage.local_write import LocalFiles
    from kvformat.write.staging import remove_staging

    files = LocalFiles()
    freed = sum(_freed(found) for found in held)
    for found in held:
        remove_staging(files, found)
    files.remove_dir(root / STAGING)  # where nothing else is in it
    return freed


def _agreed(held: dict[Path, DirectoryLease]) -> bool:
    from kvformat.write.staging import staged_files

    for path, lease in held.items():
        doubt = "" if lease.supported else " (no leases on this file system: make sure no writer is at work)"
        nbytes = sum(entry.lstat().st_size for entry in staged_files(path))
        output.complain(f"{output.plain(path)}: {output.size_text(nbytes)}{doubt}")
    return ask(f"Remove {_count(len(held))}?")


def _freed(path: Path) -> int:
    """Bytes of files that have no other name: a shard that was linked to its final place stays there."""
    from kvformat.write.staging import staged_files

    statuses = [entry.lstat() for entry in staged_files(path)]
    return sum(status.st_size for status in statuses if status.st_nlink == 1)


def _count(number: int) -> str:
    return f"{number} staging director{'y' if number == 1 else 'ies'}"
