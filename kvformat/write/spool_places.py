"""Where the spool directories of writers are, and what their names tell."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from kvformat.errors import make_error
from kvformat.storage.faults import translated
from kvformat.storage.location import local_path
from kvformat.write.worker_state import WorkerState

__all__ = ["default_spool", "plan_of", "spool_directory", "spool_of", "spools", "url_digest", "worker_of"]

_DIRECTORY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-(?P<token>[0-9a-f]{8})(?:-(?P<rank>[0-9]+))?")


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
    prefix = "" if url is None else f"{url_digest(url)}-"
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
    return base / f"{url_digest(url)}-{plan}-{worker.token}-{worker.rank}"


def plan_of(path: Path) -> str:
    """Digest of the plan, or key of the run, a spool directory is for."""
    return path.name.split("-")[1]


def worker_of(path: Path) -> str | None:
    """Name of what the worker of a spool directory says of itself; None where workers share nothing."""
    match = _DIRECTORY.fullmatch(path.name)
    return None if match is None or match["rank"] is None else f"worker-{match['rank']}-{match['token']}.json"


def url_digest(url: str) -> str:
    """What stands for a URL in a name."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]
