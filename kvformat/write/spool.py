"""Local directories in which shards wait for their upload to an object store."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translate, translated
from kvformat.storage.lease import DirectoryLease, exclusive
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.location import local_path
from kvformat.write.finisher import MOST_WAITING
from kvformat.write.worker_state import STALE_S, WorkerState

__all__ = [
    "MOST_SHARDS",
    "Spool",
    "SpoolFiles",
    "dead_spools",
    "default_spool",
    "plan_of",
    "remove_spool",
    "spool_directory",
    "spool_of",
    "spools",
    "state_of",
    "sweep",
    "worker_of",
]

MOST_SHARDS = 1 + MOST_WAITING
"""Shards in a spool at once: the one in work, and the finished ones a writer goes on before."""

_DIRECTORY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-(?P<token>[0-9a-f]{8})(?:-(?P<rank>[0-9]+))?")
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
        path = base / f"{_digest(url)}-{plan}-{secrets.token_hex(4)}"
        if worker is not None:
            path = spool_of(base, url, plan, worker)
        # Nobody sweeps between making the directory and taking its lease.
        with exclusive(base, timeout_s=_BUSY_TIMEOUT_S, refusal=lambda: _busy(base)):
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


def default_spool() -> Path:
    """``kvformat/spool`` in the user's cache directory: ``$XDG_CACHE_HOME``, or ``~/.cache``.

    Raises
    ------
    UsageError
        E081 where the user has no home directory.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # any other value is to be ignored, says the specification of these directories
        return named / "kvformat" / "spool"
    try:
        return Path.home() / ".cache" / "kvformat" / "spool"
    except RuntimeError:
        raise make_error("E081", "no home directory is known: say where the spool may be (spool=, --spool)") from None


def spool_directory(spool: str | os.PathLike[str] | None) -> Path:
    """Where spools are to be: as given, or :func:`default_spool`; E081 for a path that makes no sense."""
    return default_spool() if spool is None else local_path(spool)


def spools(base: Path, url: str | None = None) -> list[Path]:
    """Spool directories below ``base``, sorted; only those of a URL, where one is given."""
    prefix = "" if url is None else f"{_digest(url)}-"
    with translated(base):
        try:
            entries = sorted(base.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            path
            for path in entries
            if _DIRECTORY.fullmatch(path.name)
            and path.name.startswith(prefix)
            and path.is_dir()
            and not path.is_symlink()
        ]


def spool_of(base: Path, url: str, plan: str, worker: WorkerState) -> Path:
    """Where the spool directory of one worker is."""
    return base / f"{_digest(url)}-{plan}-{worker.token}-{worker.rank}"


def plan_of(path: Path) -> str:
    """Digest of the plan, or key of the run, a spool directory is for."""
    return path.name.split("-")[1]


def worker_of(path: Path) -> str | None:
    """Name of what the worker of a spool directory says of itself; None where workers share nothing."""
    match = _DIRECTORY.fullmatch(path.name)
    return None if match is None or match["rank"] is None else f"worker-{match['rank']}-{match['token']}.json"


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
    with exclusive(base, timeout_s=_BUSY_TIMEOUT_S, refusal=lambda: _busy(base)):
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
    with exclusive(base, timeout_s=_BUSY_TIMEOUT_S, refusal=lambda: _busy(base)):
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


def _is_dead(path: Path) -> bool:
    try:
        lease = DirectoryLease.take(path)
    except KVFormatError:  # another user's, perhaps
        return False
    if lease is None:
        return False
    lease.release()
    return lease.supported


def _sweep(files: LocalFiles, base: Path, forgotten: Collection[Path]) -> None:
    for path in spools(base):
        with contextlib.suppress(KVFormatError, OSError):  # another user's, perhaps: no reason not to write
            lease = DirectoryLease.take(path)
            if lease is None:
                continue
            try:
                if not lease.supported:
                    continue
                if worker_of(path) is None or path in forgotten or time.time() - path.stat().st_mtime > STALE_S:
                    remove_spool(files, path)
                else:
                    _empty(files, path)
            finally:
                lease.release()


def _make_base(base: Path) -> None:
    try:
        base.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        message = "a file stands where a directory for the spool is needed: choose another place"
        raise make_error("E207", message, path=base) from None
    except OSError as error:
        raise translate(error, base) from error


def _busy(base: Path) -> KVFormatError:
    return make_error("E117", f"other writers keep the spool busy for more than {_BUSY_TIMEOUT_S:.0f} s", path=base)


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]
