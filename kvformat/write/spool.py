"""Local directories in which shards wait for their upload to an object store."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translate, translated
from kvformat.storage.lease import DirectoryLease, exclusive
from kvformat.storage.local_write import LocalFiles
from kvformat.write.finisher import MOST_WAITING
from kvformat.write.spool_places import spool_of, spools, url_digest, worker_of
from kvformat.write.worker_state import STALE_S, WorkerState

__all__ = [
    "MOST_SHARDS",
    "Spool",
    "SpoolFiles",
    "dead_spools",
    "remove_spool",
    "state_of",
    "sweep",
]

MOST_SHARDS = 1 + MOST_WAITING
"""Shards in a spool at once: the one in work, and the finished ones a writer goes on before."""

_FILE = re.compile(r"[0-9]{8}\.(shard|part)")
_BUSY_TIMEOUT_S = 60.0


class SpoolFiles(LocalFiles):
    """Files nobody needs after a crash: nothing is synced."""

    def sync(self, fd: int, path: Path) -> None:
        """Leave it to the system."""

    def sync_dir(self, path: Path) -> None:
        """Leave it to the system."""


class Spool:
    """The spool directory of one writer, who holds its lease and removes it at the end.

    Its name tells of which URL and plan it is, and of which worker, where workers share a run. What a killed writer
    left is removed by the next one that starts one below the same directory; see :func:`sweep`.
    """

    def __init__(self, files: LocalFiles, path: Path, lease: DirectoryLease) -> None:
        self.files = files
        self._lease = lease
        self._num_parts = 0
        self.path = path

    @classmethod
    def create(
        cls,
        files: LocalFiles,
        base: Path,
        url: str,
        plan: str,
        *,
        worker: WorkerState | None = None,
        forgotten: Collection[Path] = (),
    ) -> Spool:
        """Make one below ``base``, which is made where it does not exist, for a URL and the digest of a plan.

        Parameters
        ----------
        worker
            Whose it is, where workers share a run.
        forgotten
            As for :func:`sweep`.

        Raises
        ------
        ConflictError
            E117 where other processes keep ``base`` busy.
        StorageError
            E200, E207 where no directory can be made.
        """
        _make_base(base)
        path = base / f"{url_digest(url)}-{plan}-{secrets.token_hex(4)}"
        if worker is not None:
            path = spool_of(base, url, plan, worker)
        # Nobody sweeps between making the directory and taking its lease.
        with _alone(base):
            _sweep(files, base, forgotten)
            try:
                files.make_dir(path)
                with translated(path):
                    path.chmod(0o700)
                lease = DirectoryLease.take(path)
                assert lease is not None  # the name is random, and nobody sweeps
            except BaseException:
                files.remove_dir(path)
                raise
        return cls(files, path, lease)

    def shard(self, ordinal: int) -> Path:
        """Path of a shard."""
        return self.path / f"{ordinal:08d}.shard"

    @contextlib.contextmanager
    def part(self, data: bytes) -> Iterator[Path]:
        """A file with this content, for a block. Not for several threads."""
        path = self.path / f"{self._num_parts:08d}.part"
        self._num_parts += 1
        try:
            self.files.create_file(path, data)
            yield path
        finally:
            self.files.unlink(path)

    def drop(self, ordinal: int) -> None:
        """Remove a shard."""
        self.files.unlink(self.shard(ordinal))

    def touch(self) -> None:
        """Note that its worker said something: its age is that of the last word. Never fails loudly."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def remove(self) -> None:
        """Remove the directory. More than once is harmless."""
        try:
            remove_spool(self.files, self.path)
        finally:
            self._lease.release()


def dead_spools(base: Path, url: str) -> list[Path]:
    """Spool directories of a URL's workers that are dead for certain.

    Raises
    ------
    ConflictError
        E117 where other processes keep ``base`` busy.
    DamageError
        E002 where there is no such directory.
    """
    # Nobody begins meanwhile: a directory without a lease is a dead one's.
    with _alone(base):
        return [path for path in spools(base, url) if worker_of(path) is not None and _is_dead(path)]


def sweep(files: LocalFiles, base: Path, forgotten: Collection[Path]) -> None:
    """Remove what killed writers left.

    The directory of a worker proves that it is dead, for as long as others may read what it said of itself in a store.
    It stays, empty, until that is removed, or is too old for anybody to believe.

    Parameters
    ----------
    forgotten
        Directories of workers of whom nothing is in the store any more.

    Raises
    ------
    ConflictError
        E117 where other processes keep ``base`` busy.
    DamageError
        E002 where there is no such directory.
    """
    with _alone(base):
        _sweep(files, base, forgotten)


def state_of(lease: DirectoryLease | None) -> Literal["live", "abandoned", "unknown"]:
    """What taking a directory's lease says of its writer."""
    if lease is None:
        return "live"
    return "abandoned" if lease.supported else "unknown"


def remove_spool(files: LocalFiles, path: Path) -> int:
    """Remove what a writer put into a spool directory, and the directory; returns the bytes that were in it."""
    freed = _empty(files, path)
    files.remove_dir(path)
    return freed


def _empty(files: LocalFiles, path: Path) -> int:
    freed = 0
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        if _FILE.fullmatch(entry.name):
            freed += entry.lstat().st_size
            files.unlink(entry)
    return freed


@contextlib.contextmanager
def _held_if_dead(path: Path) -> Iterator[bool]:
    """Whether the writer of a directory is dead for certain, which is held for the block then."""
    lease = DirectoryLease.take(path)
    try:
        yield state_of(lease) == "abandoned"
    finally:
        if lease is not None:
            lease.release()


def _is_dead(path: Path) -> bool:
    try:
        with _held_if_dead(path) as dead:
            return dead
    except KVFormatError:  # another user's, perhaps
        return False


def _sweep(files: LocalFiles, base: Path, forgotten: Collection[Path]) -> None:
    for path in spools(base):
        with contextlib.suppress(KVFormatError, OSError), _held_if_dead(path) as dead:  # another user's, perhaps
            if not dead:
                continue
            if worker_of(path) is None or path in forgotten or time.time() - path.stat().st_mtime > STALE_S:
                remove_spool(files, path)
            else:
                _empty(files, path)


def _make_base(base: Path) -> None:
    try:
        base.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        message = "a file stands where a directory for the spool is needed: choose another place"
        raise make_error("E207", message, path=base) from None
    except OSError as error:
        raise translate(error, base) from error


def _alone(base: Path) -> AbstractContextManager[object]:
    """Nobody else makes or sweeps directories below ``base`` meanwhile; E117 where others keep it busy, E002."""
    message = f"other writers keep the spool busy for more than {_BUSY_TIMEOUT_S:.0f} s"
    return exclusive(base, timeout_s=_BUSY_TIMEOUT_S, refusal=lambda: make_error("E117", message, path=base))
