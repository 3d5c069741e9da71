"""What workers that are gone left unfinished in a staging directory."""

from __future__ import annotations

import re
import time
from pathlib import Path

from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.write.local_workers import workers_in
from kvformat.write.staging import COVERED
from kvformat.write.worker_state import STALE_S, is_alive, is_loading

__all__ = ["sweep"]

_OWNED = re.compile(r".+\.([0-9a-f]{8})\.part|worker-[0-9]+-([0-9a-f]{8})\.json(?:\.part)?")
_RECEIPT = re.compile(r"([0-9]{8})\.json")
_SHARD = re.compile(r"([0-9]{8})(?:-[0-9a-f]{16}\.shard|\.skipped)")


def sweep(files: LocalFiles, path: Path, token: str) -> None:
    """Remove what workers that are gone had in work. ``token`` is one's own, of which nothing is removed.

    What nobody can be asked about is left alone for as long as a worker may be silent. Shards without a receipt, of a
    worker that was killed in between, go where nobody else is at work.
    """
    workers = workers_in(path)
    alive = {token} | {worker.state.token for worker in workers if is_alive(worker)}
    making = alive - {worker.state.token for worker in workers if is_loading(worker.state)}
    gone = {worker.state.token for worker in workers} - alive
    folder = path / COVERED
    with translated(path):
        entries = [*path.iterdir(), *(folder.iterdir() if folder.is_dir() else ())]
    finished = {int(match[1]) for entry in entries if (match := _RECEIPT.fullmatch(entry.name))}
    # The file of a worker goes last: cut short, the rest can still be told to be its own.
    for entry in sorted(entries, key=lambda entry: entry.name.startswith("worker-")):
        if (match := _OWNED.fullmatch(entry.name)) is not None:
            owner = match[1] or match[2]
            if owner in gone or (owner not in alive and _age(entry) > STALE_S):
                files.unlink(entry)
        elif making == {token} and (match := _SHARD.fullmatch(entry.name)) and int(match[1]) not in finished:
            files.unlink(entry)


def _age(path: Path) -> float:
    """Seconds since a file was written to."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
